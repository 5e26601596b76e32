"""Tests of the metrics of the machine: processors, memory, GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from moonpool.runtime.observe.machine import GPU_NAMES, GpuMetrics, MachineMetrics

pytestmark = pytest.mark.promise(
    "Watching a server", "The metrics of the machine are those of Triton. Those of GPUs are there only if it has some."
)

MEMORY = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\nHugePages_Total: 0\n"


class Machine:
    """A machine whose processor times the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.used = self.idle = 0

    def read(self, path: str) -> str:
        if path == "/proc/meminfo":
            return MEMORY
        # User, nice, system, idle, iowait, irq, softirq, steal; and guest, which is in user.
        return f"cpu  {self.used} 0 0 {self.idle} 0 0 0 0 99999 0\ncpu0 1 2 3 4\n"

    def values(self, metrics: MachineMetrics) -> list[float]:
        return [family.samples[0].value for family in metrics.families()]


def test_utilization_is_that_of_the_last_interval() -> None:
    machine = Machine()
    metrics = MachineMetrics(2.0, machine.read, lambda: machine.now_s)

    assert machine.values(metrics) == [0.0, 1_024_000, 614_400]
    machine.now_s, machine.used, machine.idle = 2.0, 30, 70
    assert machine.values(metrics)[0] == 0.3
    machine.now_s, machine.used = 3.0, 1000
    assert machine.values(metrics)[0] == 0.3
    machine.now_s, machine.idle = 4.0, 100
    assert machine.values(metrics)[0] == 0.97


def test_the_machine_that_this_is_can_be_told_of() -> None:
    utilization, total, used = (family.samples[0].value for family in MachineMetrics(0.0).families())

    assert 0 <= utilization <= 1
    assert 0 < used < total
    assert total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_where_there_is_no_driver_nothing_is_told_of_gpus(tmp_path: Path) -> None:
    metrics = GpuMetrics(str(tmp_path / "libnvidia-ml.so.1"))

    assert [family.name for family in metrics.families()] == list(GPU_NAMES)
    assert [family.samples for family in metrics.families()] == [[]] * len(GPU_NAMES)
    metrics.close()


# A driver of two GPUs, of which the second does not know its energy.
DRIVER = """
#include <string.h>
typedef void *gpu;
static char gpus[2];
static unsigned long long joules = 5000;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, gpu *g) { *g = gpus + i; return 0; }
int nvmlDeviceGetUUID(gpu g, char *s, unsigned n) { strncpy(s, g == gpus ? "GPU-a" : "GPU-b", n); return 0; }
int nvmlDeviceGetUtilizationRates(gpu g, unsigned *u) { u[0] = 25; u[1] = 50; return 0; }
int nvmlDeviceGetMemoryInfo(gpu g, unsigned long long *m) { m[0] = 800; m[1] = 600; m[2] = 200; return 0; }
int nvmlDeviceGetPowerUsage(gpu g, unsigned *w) { *w = 61500; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(gpu g, unsigned *w) { *w = 700000; return 0; }
struct process { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v3(gpu g, unsigned *n, struct process *p) {
  if (*n < 70) { *n = 70; return 7; }
  p[0] = (struct process){10, g == gpus ? 100 : 50, 0, 0};
  p[1] = (struct process){11, -1ull, 0, 0};
  *n = 2;
  return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(gpu g, unsigned long long *e) { *e = joules += 1000; return g != gpus; }
"""


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """Make the library of a driver."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is here to make a driver with")
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "driver.c")]
    subprocess.run(command, check=True)
    return library


def test_the_memory_of_processes_is_that_on_all_gpus_as_far_as_the_driver_knows(driver: Path) -> None:
    metrics = GpuMetrics(str(driver))

    assert metrics.bytes_by_process() == {10: 150}
    metrics.close()
    assert metrics.bytes_by_process() == {}


def test_gpus_are_told_of_as_triton_tells(driver: Path) -> None:
    metrics = GpuMetrics(str(driver))

    told = {family.name: family for family in metrics.families()}
    a, b = (("gpu_uuid", "GPU-a"),), (("gpu_uuid", "GPU-b"),)
    values = {name: {s.labels: s.value for s in family.samples} for name, family in told.items()}
    # The driver adds a joule at each question, and this is the second question after the first reading.
    assert values.pop("nv_energy_consumption") == {a: 2.0}
    assert values == {
        "nv_gpu_utilization": {a: 0.25, b: 0.25},
        "nv_gpu_memory_total_bytes": {a: 800, b: 800},
        "nv_gpu_memory_used_bytes": {a: 200, b: 200},
        "nv_gpu_power_usage": {a: 61.5, b: 61.5},
        "nv_gpu_power_limit": {a: 700, b: 700},
    }
    assert told["nv_energy_consumption"].type == "counter"
    metrics.close()
    assert all(not family.samples for family in metrics.families())
