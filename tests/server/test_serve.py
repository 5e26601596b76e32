"""`moonpool serve` as a process: how it starts, ends, and takes signals."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import pytest
from tests.server.repositories import BAD, ECHO, write
from tests.server.running import RunningServer, running, starting
from tests.waiting import wait_until

SLOW = ECHO.replace(
    "    def execute(self, requests):",
    "    def execute(self, requests):\n        import time\n        time.sleep(float(1e9))",
)
SLOW_TO_LOAD = ECHO.replace(
    "class TritonPythonModel:", "import time\ntime.sleep(1e9)\nclass TritonPythonModel:"
)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write(tmp_path / "models", "good")
    return tmp_path / "models"


def test_it_serves_and_says_so_in_triton_s_words(models: Path) -> None:
    with running(models) as server:
        assert server.get("/v2/health/live")[0] == 200
        text = server.text()
    assert re.search(r"^\| good  \| 1       \| READY  \|$", text, re.MULTILINE)
    assert re.search(
        r"^I\d{4} [\d:.]{15} \d+ \w+\.py:\d+\] Started HTTPService at 127\.0\.0\.1:\d+$",
        text,
        re.MULTILINE,
    )
    assert "Only this machine is served" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(models: Path, number: signal.Signals) -> None:
    with running(models) as server:
        server.tell(number)
        assert server.wait() == 0
        assert "unloading models" in server.text()


def test_a_port_that_is_taken_is_told_before_any_model_is_loaded(models: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flag in ("http", "grpc", "metrics"):
            with starting(models, f"--{flag}-port={port}") as server:
                assert server.wait() == 1
                assert str(port) in server.text()
                assert "loaded" not in server.text()


def test_a_model_that_cannot_be_loaded_ends_it_unless_that_is_wanted(models: Path) -> None:
    write(models, "bad", BAD)
    with starting(models) as server:
        assert server.wait() == 1
        assert "creating server: Internal - failed to load all models" in server.text()
        assert re.search(
            r"^\| bad   \| 1       \| UNAVAILABLE: Internal: ValueError: boom",
            server.text(),
            re.MULTILINE,
        )
    with running(models, "--exit-on-error=false"):
        pass


def test_a_second_signal_ends_it_at_once_and_the_models_with_it(models: Path) -> None:
    write(models, "slow", SLOW_TO_LOAD)
    with starting(models) as server:
        stubs = wait_until(lambda: [pid for pid in children(server) if b"slow" in cmdline(pid)])
        server.tell(signal.SIGTERM)
        wait_until(lambda: "Signal (15) received." in server.text())
        server.tell(signal.SIGTERM)
        assert server.wait() in (0, 128 + signal.SIGTERM)
        wait_until(lambda: not any(cmdline(pid) for pid in stubs))


def test_a_load_does_not_keep_it_from_ending(models: Path) -> None:
    write(models, "slow", SLOW_TO_LOAD)
    with starting(models) as server:
        wait_until(lambda: [pid for pid in children(server) if b"slow" in cmdline(pid)])
        server.tell(signal.SIGTERM)
        assert server.wait() == 0


def children(server: RunningServer) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""
