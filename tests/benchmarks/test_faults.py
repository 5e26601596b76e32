"""Faults that are planted under load, and the resources that processes use."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import wait_until

from moonpool.benchmarks.faults import Fault, FaultInjector, NoCount
from moonpool.benchmarks.resources import (
    NoMetrics,
    ResourceMeter,
    Resources,
    gpus_in,
    local_pid,
    resources_together,
    triton_stubs,
)
from moonpool.runtime.client.request import Unreachable

PATIENCE_S = 60.0


class Sleepers:
    """Processes that are started again when they have ended, as a supervisor does."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self.processes = [self._start() for _ in range(count)]
        self.restarts = 0

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def pids(self) -> list[int]:
        """The living ones. Whoever has died is replaced by the next call."""
        with self._lock:
            found = []
            for index, process in enumerate(self.processes):
                if process.poll() is None:
                    found.append(process.pid)
                else:
                    self._close(process)
                    self.processes[index] = self._start()
                    self.restarts += 1
            return found

    def _close(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None:
            process.stdin.close()
        process.wait(PATIENCE_S)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            self._close(process)


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    found = Sleepers(2)
    yield found
    found.close()


def test_instances_are_killed_and_come_back(sleepers: Sleepers) -> None:
    with FaultInjector(Fault("killed", every_s=0.01), sleepers.pids, lambda: None) as faults:
        wait_until(lambda: len(faults.outcomes) >= 2, PATIENCE_S, "two faults")

    faults.check()
    found = faults.as_dict()
    assert sleepers.restarts >= 2
    assert found["kind"] == "killed"
    assert found["count"] >= 2
    assert found["not_recovered"] == 0
    assert 0 < found["recovered_s"]["median"] <= found["recovered_s"]["max"]


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_nothing_stays_stopped(sleepers: Sleepers) -> None:
    pids = sleepers.pids()
    with FaultInjector(Fault("stopped", every_s=0.01), sleepers.pids, lambda: None) as faults:
        wait_until(lambda: "T" in map(state_of, pids), PATIENCE_S, "a stopped process")

    wait_until(lambda: "T" not in map(state_of, pids), PATIENCE_S, "no stopped process")
    # It is not known how long this one would have taken.
    assert faults.as_dict() == {
        "kind": "stopped", "every_s": 0.01, "share": None, "for_s": None, "count": 0, "not_recovered": 0,
        "recovered_s": None,
    }  # fmt: skip


def test_a_share_of_the_requests_meets_an_instance_that_hangs(sleepers: Sleepers) -> None:
    counts = iter(range(0, 10**9, 60))
    pids = sleepers.pids()
    fault = Fault("stopped", share=0.01, for_s=0.01)
    with FaultInjector(fault, sleepers.pids, lambda: next(counts)) as faults:
        wait_until(lambda: len(faults.outcomes) >= 2, PATIENCE_S, "two faults")

    # It was continued when its time was over, so it is still the same process.
    wait_until(lambda: "T" not in map(state_of, pids), PATIENCE_S, "no stopped process")
    assert sleepers.restarts == 0
    found = faults.as_dict()
    assert (found["kind"], found["share"], found["for_s"]) == ("stopped", 0.01, 0.01)
    assert found["recovered_s"]["median"] >= 0.01


def test_a_share_needs_a_server_that_counts(sleepers: Sleepers) -> None:
    with FaultInjector(Fault("stopped", share=0.5), sleepers.pids, lambda: None) as faults, pytest.raises(NoCount):
        wait_until(faults.check, PATIENCE_S, "the failure")


def test_triton_s_stubs_of_a_model_are_told_from_others(tmp_path: Path) -> None:
    for model in ("m", "n"):
        file = tmp_path / model / "1" / "model.py"
        file.parent.mkdir(parents=True)
        file.write_text("input()")

    def stub(model: str, name: str) -> subprocess.Popen[bytes]:
        words = [name, str(tmp_path / model / "1" / "model.py"), "region"]
        return subprocess.Popen(words, executable=sys.executable, stdin=subprocess.PIPE)

    found = "triton_python_backend_stub"
    processes = [stub("m", f"/opt/{found}"), stub("n", found), stub("m", "another_program")]
    try:
        wait_until(lambda: triton_stubs(os.getpid(), "m") == [processes[0].pid], PATIENCE_S, "the stub")
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_what_keeps_faults_from_happening_is_raised() -> None:
    def pids() -> list[int]:
        raise Unreachable("no server answers")

    with FaultInjector(Fault("killed", every_s=0.001), pids, lambda: None) as faults, pytest.raises(Unreachable):
        wait_until(faults.check, PATIENCE_S, "the failure")


def test_processor_time_and_memory_are_measured() -> None:
    # It works once it is told to, so that nothing is done before the meter begins.
    program = "import time\ninput()\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\ninput()"
    command = [sys.executable, "-c", program]
    meter = ResourceMeter(lambda: [busy.pid])
    with subprocess.Popen(command, stdin=subprocess.PIPE) as busy:
        assert busy.stdin is not None
        meter.begin()
        busy.stdin.write(b"\n")
        busy.stdin.flush()
        wait_until(lambda: meter.end().cpu_s >= 0.2, PATIENCE_S, "the processor time")
        used = meter.end()
        busy.stdin.write(b"\n")
        busy.stdin.close()

    assert used.memory_bytes > 1 << 20
    figures = used.as_dict(requests=10, seconds=1.0)
    assert figures["cpu_s_per_request"] == pytest.approx(used.cpu_s / 10)
    assert figures["cores"] == pytest.approx(used.cpu_s)


METRICS = """# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="a"} 0.5
nv_gpu_utilization{gpu_uuid="b"} 0.1
nv_gpu_memory_used_bytes{gpu_uuid="a"} 1000000
nv_gpu_memory_used_bytes{gpu_uuid="b"} 5e5
nv_gpu_power_usage{gpu_uuid="a"} NaN
"""


class Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(METRICS.encode())

    def log_message(self, *_: object) -> None:
        pass


def test_gpus_are_read_from_the_metrics_port() -> None:
    assert gpus_in(METRICS) == {"nv_gpu_utilization": 0.3, "nv_gpu_memory_used_bytes": 1.5e6}
    assert gpus_in("nv_gpu_utilization NaN\nother 5\nnonsense") == {}
    with http.server.HTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        meter = ResourceMeter(lambda: [os.getpid()], url)
        meter.begin()
        found = meter.end()
        server.shutdown()
        thread.join(PATIENCE_S)

    assert (found.gpu_utilization, found.gpu_memory_bytes) == (0.3, 1.5e6)
    for wrong in (url, "file:///etc/passwd", "http://127.0.0.1:1/metrics"):
        with pytest.raises(NoMetrics):
            ResourceMeter(lambda: [os.getpid()], wrong)


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "A server's word on its processes is believed only of the process that holds its port, and of those it has "
    "started.",
)
def test_only_the_process_that_listens_is_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        assert local_pid({"server": {"pid": os.getpid()}}, port) == os.getpid()
        for lie in (1, os.getppid(), "x", None, -1):
            assert local_pid({"server": {"pid": lie}}, port) is None
    assert local_pid({"server": {"pid": os.getpid()}}, port) is None
    assert local_pid({}, port) is None


def test_resources_of_windows_are_joined() -> None:
    one, other = Resources(1.0, 100, 0.5), Resources(2.0, 50, 0.7, 5.0)

    assert resources_together([one, other]) == Resources(3.0, 100, 0.7, 5.0)
    assert resources_together([one, None]) is None
    assert resources_together([]) is None
