"""Triton's metrics of the machine: processors, memory, and GPUs.

Theory of operation. Several threads may ask for metrics at the same time. `MachineMetrics` has a lock, so one reading
of the processors' times ends an interval and the next begins with it. The lock of `GpuMetrics` keeps the driver's
library open while a thread asks it: `close` waits for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from moonpool.runtime.observe.exposition import ExposedFamily, Sample

# Columns of a line of /proc/stat, behind its name: the time in which processors did nothing, or waited for a disk.
_IDLE, _IOWAIT = 3, 4
# Later columns hold the time of virtual machines, which earlier ones contain.
_COLUMNS = 8
MACHINE_NAMES = ("nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes")
_TEXTS = ("CPU utilization rate [0.0 - 1.0]", "CPU total memory (RAM), in bytes", "CPU used memory (RAM), in bytes")


class MachineMetrics:
    """The metrics of processors and memory. Any thread may call any method."""

    def __init__(
        self,
        interval_s: float = 2.0,
        read: Callable[[str], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Measure utilization between two readings that are at least `interval_s` apart."""
        self._interval_s = interval_s
        self._read = read or _read
        self._clock = clock
        self._lock = threading.Lock()
        self._at_s = clock()
        self._times = self._processor_times()
        self._utilization = 0.0

    def _processor_times(self) -> tuple[int, int]:
        """Return the ticks that were used, and all ticks."""
        first = self._read("/proc/stat").partition("\n")[0]
        ticks = [int(word) for word in first.split()[1 : 1 + _COLUMNS]]
        return sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT], sum(ticks)

    def families(self) -> list[ExposedFamily]:
        """Return the metrics as they are now. Raises OSError if /proc cannot be read."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._at_s >= self._interval_s:
                used, total = self._processor_times()
                passed = total - self._times[1]
                if passed > 0:
                    self._utilization = max(0.0, (used - self._times[0]) / passed)
                self._at_s, self._times = now_s, (used, total)
            utilization = self._utilization
        memory = self._memory()
        total_bytes = memory["MemTotal"]
        used_bytes = total_bytes - memory["MemAvailable"]
        values = (utilization, total_bytes, used_bytes)
        return [
            ExposedFamily(name, text, "gauge", [Sample("", (), value)])
            for name, text, value in zip(MACHINE_NAMES, _TEXTS, values, strict=True)
        ]

    def _memory(self) -> dict[str, int]:
        """Return sizes in bytes by name."""
        rows = (line.split() for line in self._read("/proc/meminfo").splitlines())
        return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) > 1}


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()


_UUID_BYTES = 96


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


# What the driver gives as the bytes of a process if it cannot say, and as the code if there are more processes than
# places.
_UNKNOWN_BYTES = 2**64 - 1
_TOO_SMALL = 7
_PROCESSES = 64


# Name, type, description; the library's function, the structure that it fills in, and the value in that.
_FAMILIES: list[tuple[str, str, str, str, type[Any], Callable[[Any], float]]] = [
    (
        "nv_gpu_utilization",
        "gauge",
        "GPU utilization rate [0.0 - 1.0)",
        "nvmlDeviceGetUtilizationRates",
        _Utilization,
        lambda answer: answer.gpu / 100,
    ),
    (
        "nv_gpu_memory_total_bytes",
        "gauge",
        "GPU total memory, in bytes",
        "nvmlDeviceGetMemoryInfo",
        _Memory,
        lambda answer: answer.total,
    ),
    (
        "nv_gpu_memory_used_bytes",
        "gauge",
        "GPU used memory, in bytes",
        "nvmlDeviceGetMemoryInfo",
        _Memory,
        lambda answer: answer.used,
    ),
    (
        "nv_gpu_power_usage",
        "gauge",
        "GPU power usage in watts",
        "nvmlDeviceGetPowerUsage",
        ctypes.c_uint,
        lambda answer: answer.value / 1000,
    ),
    (
        "nv_gpu_power_limit",
        "gauge",
        "GPU power management limit in watts",
        "nvmlDeviceGetEnforcedPowerLimit",
        ctypes.c_uint,
        lambda answer: answer.value / 1000,
    ),
    (
        "nv_energy_consumption",
        "counter",
        "GPU energy consumption in joules since the Triton Server started",
        "nvmlDeviceGetTotalEnergyConsumption",
        ctypes.c_ulonglong,
        lambda answer: answer.value / 1000,
    ),
]
GPU_NAMES = tuple(family[0] for family in _FAMILIES)
_ENERGY = "nv_energy_consumption"


class GpuMetrics:
    """The metrics of the GPUs that the driver knows. Any thread may call any method."""

    def __init__(self, library: str = "libnvidia-ml.so.1") -> None:
        """Open the driver's library. If it is missing or does not answer, there are no GPUs."""
        self._lock = threading.Lock()
        self._library: Any = None
        self._gpus: dict[str, ctypes.c_void_p] = {}
        with contextlib.suppress(OSError, AttributeError):
            self._open(ctypes.CDLL(library))
        # Joules that were consumed before now.
        _, _, _, function, answer, value_in = _FAMILIES[-1]
        self._before = dict(self._values(function, answer, value_in))

    def _open(self, library: Any) -> None:
        if library.nvmlInit_v2():
            return
        self._library = library
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            handle = ctypes.c_void_p()
            uuid = ctypes.create_string_buffer(_UUID_BYTES)
            if not library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) and not library.nvmlDeviceGetUUID(
                handle, uuid, _UUID_BYTES
            ):
                self._gpus[uuid.value.decode("ascii", "replace")] = handle

    def _values(self, function: str, kind: type[Any], value_in: Callable[[Any], float]) -> list[tuple[str, float]]:
        """Return the values of the GPUs that have this figure."""
        values = []
        for uuid, handle in self._gpus.items():
            answer = kind()
            with contextlib.suppress(AttributeError):  # a library that is older than the function
                if not getattr(self._library, function)(handle, ctypes.byref(answer)):
                    values.append((uuid, value_in(answer)))
        return values

    def families(self) -> list[ExposedFamily]:
        """Return the metrics as they are now."""
        with self._lock:
            families = []
            for name, kind, text, function, answer, value_in in _FAMILIES:
                samples = []
                for uuid, value in self._values(function, answer, value_in):
                    before = self._before.get(uuid, 0.0) if name == _ENERGY else 0.0
                    samples.append(Sample("", (("gpu_uuid", uuid),), value - before))
                families.append(ExposedFamily(name, text, kind, samples))
            return families

    def bytes_by_process(self) -> dict[int, int]:
        """Return the bytes that processes have on all GPUs together, as far as the driver says so.

        In a container, drivers before 525 may know processes by other numbers than this process does.
        """
        used: dict[int, int] = {}
        with self._lock:
            for handle in self._gpus.values():
                for process in self._processes(handle):
                    if process.bytes != _UNKNOWN_BYTES:
                        used[process.pid] = used.get(process.pid, 0) + process.bytes
        return used

    def _processes(self, handle: ctypes.c_void_p) -> list[_Process]:
        with contextlib.suppress(AttributeError):  # a library that is older than the function
            ask = self._library.nvmlDeviceGetComputeRunningProcesses_v3
            room = _PROCESSES
            while True:
                count, found = ctypes.c_uint(room), (_Process * room)()
                code = ask(handle, ctypes.byref(count), found)
                if code != _TOO_SMALL:
                    return [] if code else list(found[: min(count.value, room)])
                room *= 2
        return []

    def close(self) -> None:
        """Release the library. There are no GPUs any more."""
        with self._lock:
            library, self._library, self._gpus = self._library, None, {}
            if library is not None:
                library.nvmlShutdown()
