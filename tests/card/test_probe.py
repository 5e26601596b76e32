"""The probe and its cells on the fake driver: every question gets an answer, and one that hangs costs itself alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.card import guises, probe, results, strict
from tests.card.cells import ROOT, Cell, Cells
from tests.gpu.cards import fake_library, has_card

__all__ = ["fake_library"]

Found = dict[str, dict[str, Any]]


def processes_with(mark: str) -> list[int]:
    """Return the processes that have this text among their variables."""
    found = []
    for entry in os.scandir("/proc"):
        try:
            variables = Path(entry.path, "environ").read_bytes() if entry.name.isdecimal() else b""
        except OSError:
            continue
        if mark.encode() in variables and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


@pytest.fixture(autouse=True)
def _nothing_stays(fake_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cells find the fake driver, and none of their processes outlives the test."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("MOONPOOL_TEST_MARK", mark)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_library.parent))
    yield
    # `Cells` made this process the parent of orphans, which later tests would have to wait for.
    guises.adopt_orphans(False)
    assert processes_with(mark) == []


@pytest.fixture
def found() -> Found:
    return {}


def run(found: Found, *cells: Cell, at_once: int = 4, limit_s: float = 60) -> None:
    """Run cells, and put what they record into `found`, by name."""

    def record(name: str, ok: bool | None, value: object = None, *rest: object, text: str = "") -> None:
        assert name not in found
        found[name] = {"ok": ok, "value": value, "text": text or (rest[2] if rest[2:] else "")}

    Cells(record, time.monotonic() + limit_s).run(cells, at_once)


def test_a_call_that_does_not_return_costs_its_own_cell(found: Found) -> None:
    run(found, Cell("stuck", "hang", limit_s=5), Cell("fork", "forks"))

    assert found["stuck"]["ok"] is False
    assert "no end within 5.0 s, killed, hang in cuStreamSynchronize" in found["stuck"]["text"]
    assert found["fork: cuInit"]["value"] == "CUDA_ERROR_NOT_INITIALIZED"


def test_a_driver_that_takes_its_process_with_it_is_named(found: Found) -> None:
    run(found, Cell("dies", "crash"))

    assert found["dies"]["text"] == "ended with SIGSEGV, crash in cuMemcpyDtoHAsync_v2"


def test_an_error_that_nobody_thought_of_is_a_result(found: Found) -> None:
    run(found, Cell("odd", "create", {"types": "no number"}))

    assert found["odd"]["ok"] is False
    assert found["odd"]["value"] == "TypeError"


def test_what_there_is_no_time_for_is_said(found: Found) -> None:
    run(found, Cell("late", "forks"), limit_s=0)

    assert found == {"late": {"ok": None, "value": None, "text": "not tried: no time is left"}}


def test_without_a_driver_every_cell_says_so(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH")
    if has_card():
        pytest.skip("this machine has a driver")
    run(
        found,
        Cell("alone", "forks"),
        Cell("both", "opens", {"kind": "descriptor", "guise": guises.CHILD, "expected": "works", "needed": True}),
    )

    assert [each["ok"] for each in found.values()] == [False, False]
    assert all("libcuda.so.1: cannot open" in each["text"] for each in found.values())


def test_every_question_has_an_answer(found: Found) -> None:
    """One of each kind: all of them are asked in the dry run."""
    cells = {cell.name: cell for cell in (*probe.timed(0.05), *probe.untimed(0.05))}
    left_out = {"context", "cost of a legacy handle"}
    chosen = [
        cell
        for name, cell in cells.items()
        if name not in left_out and not any(name.endswith(f", {each}") for each in guises.OTHERS if each != guises.USER)
    ]
    run(found, *chosen)

    assert {name: each for name, each in found.items() if each["ok"] is False} == {}
    assert len({name.partition(":")[0] for name in found}) == len(chosen)
    assert found["driver: functions that moonpool calls"]["value"] == len(probe.functions()) > 40
    if os.geteuid() == 0:
        assert found["descriptor, other user: read and write"]["value"] == "works"
        assert found["legacy handle, other user: read and write"]["value"] == "CUDA_ERROR_MAP_FAILED"


def test_a_reader_that_waits_for_an_event_of_another_process_sees_what_came_before_it(found: Found) -> None:
    order = next(cell for cell in probe.untimed(0.1) if cell.name == "event, child")
    run(found, order)

    assert found["event, child: a reader that does not wait"]["value"] == "old bytes"
    assert found["event, child: a reader that waits for it"]["value"] == "new bytes"


def stage(folder: Path, module: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a stage as the runner does, and return its results."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        results.RESULTS: str(folder),
        results.STAGE: module,
        results.SHARE: "0.1",
        results.LIMIT_S: "120",
    }
    command = [sys.executable, "-m", f"tests.card.{module}", *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=170)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in (folder / results.NAME).read_text().splitlines()]


@pytest.mark.parametrize("part", ["", "hostile"])
def test_strict_runs_through(tmp_path: Path, part: str) -> None:
    lines = stage(tmp_path, "strict", *filter(None, [part]))
    values = {line["name"]: line["value"] for line in lines}

    assert [line for line in lines if line["ok"] is False] == []
    if part:
        assert values["a region that it was not sent, at off"] == "done"
        assert values["a region that it was not sent, at strict"] != "done"
        assert values["it loops in a kernel"] == "died"
    else:
        assert values["driver, at strict"] == "works"
        assert values["driver, calls beyond the tables"] == 0
        # The sandbox itself tries this call, to see whether event loops can have it.
        assert '"epoll_create1": ()' in [line["value"] for line in lines]


def test_what_the_tables_lack_is_said_as_a_rule(tmp_path: Path) -> None:
    from moonpool.ipc.policy import Policy

    read = tmp_path / "read"
    read.mkdir()
    plan = {"policy": Policy(level="strict", read=[str(read)]).to_json()}
    tables, run = strict.Tables(plan), strict.Run(pid=7, scratch=str(tmp_path / "scratch"))

    def lacks(name: str, *arguments: int, path: str = "") -> str:
        return tables.lacks(strict.Call(name, 0, arguments, path), run)

    assert lacks("open", os.O_RDONLY, path=f"{read}/file") == ""
    assert lacks("open", os.O_RDWR, path="/proc/7/task/9/comm") == ""
    assert lacks("open", os.O_RDWR, path=f"{tmp_path}/scratch/cache") == ""
    assert lacks("ioctl", 0xC90046C8, path="/dev/nvidiactl") == ""
    assert lacks("socket", 1, 5 | 0x80000, 0) == ""
    assert lacks("open", os.O_RDONLY, path="/etc/passwd") == '("/etc/passwd", READ),'
    written = lacks("open", os.O_RDWR, path=f"{read}/file")
    assert written == f'("{read}/file", READ | WRITE_FILE),'
    assert "gpu_access" in lacks("open", os.O_RDWR, path="/dev/nvidia-modeset")
    assert "0x5412" in lacks("ioctl", 0x5412, path="/dev/tty")
    assert "socket" in lacks("socket", 2, 1, 0)
