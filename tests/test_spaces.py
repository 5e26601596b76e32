"""The namespaces of tests, seen from outside: suites that run in namespaces inside this one's."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import lesser_kernel, spaces
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent

CONFTEST = """
from tests import workers
from tests.leaks import _leaves_nothing_behind
from tests.workers import pytest_xdist_setupnodes

import tests.leaks
tests.leaks.GRACE_S = 0.5

def pytest_configure(config):
    workers.give_namespaces(config)

def pytest_report_header(config):
    return workers.header(config)
"""
HEAD = """
import os, socket, subprocess, tempfile
from pathlib import Path
import pytest
from tests.waiting import wait_until
SHARED = Path(__file__).parent
"""

# Starts pytest over a suite of this source, with these options.
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)

    def started(source: str, *options: str, **refusals: int) -> subprocess.Popen[str]:
        (tmp_path / "test_suite.py").write_text(HEAD + source)
        program = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *options]
        kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST")}
        kept.pop(spaces.INSIDE, None)
        return subprocess.Popen(
            lesser_kernel.command(program, **refusals) if refusals else program,
            cwd=tmp_path,
            env={**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "400"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # What a terminal would make a group.
            start_new_session=True,
        )

    return started


def output_of(process: subprocess.Popen[str]) -> str:
    output = process.communicate()[0]
    if "namespaces: none" in output:
        pytest.skip("this machine forbids namespaces")
    return output


ALONE = """
@pytest.mark.parametrize("number", range(2))
def test_is_alone(number):
    name = "moonpool-is-alone"
    entries = [Path("/dev/shm", name), Path(tempfile.gettempdir(), name)]
    with socket.create_server(("127.0.0.1", 31817)):
        for entry in entries:
            entry.touch(exist_ok=False)
        (SHARED / str(number)).touch()
        wait_until((SHARED / str(1 - number)).exists)
        # The first process, the worker, and its children.
        assert len([name for name in os.listdir("/proc") if name.isdigit()]) == 2
        for entry in entries:
            entry.unlink()
"""


def test_workers_do_not_see_each_other_s_things(start: Start) -> None:
    output = output_of(start(ALONE, "-n", "2"))

    assert "2 passed" in output
    assert "namespaces: one of each kind for each worker" in output


ENTRIES = """
def test_leaves_nothing():
    (SHARED / "begun").touch()
    wait_until((SHARED / "made").exists)

def test_leaves_an_entry():
    Path("/dev/shm/moonpool-own").touch()
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_test_is_charged_for_its_own_entries_only(start: Start, tmp_path: Path, workers: str) -> None:
    process = start(ENTRIES, "-n", workers)
    wait_until(lambda: (tmp_path / "begun").exists() or process.poll() is not None)
    other = Path(f"/dev/shm/moonpool-other-{os.getpid()}")
    other.touch()
    try:
        (tmp_path / "made").touch()
        output = output_of(process)
    finally:
        other.unlink()

    assert "2 passed, 1 error" in output
    assert "ERROR test_suite.py::test_leaves_an_entry - Failed: the test left behind" in output


ORPHAN = "sleep\000543.21"
ORPHANS = """
@pytest.mark.parametrize("number", range(2))
def test_waits(number):
    subprocess.run(["sh", "-c", "setsid sleep 543.21 > /dev/null 2>&1 &"], check=True)
    (SHARED / str(number)).touch()
    wait_until(lambda: False, 600)
"""


def test_nothing_lives_after_an_interrupt(start: Start, tmp_path: Path) -> None:
    process = start(ORPHANS, "-n", "2")
    wait_until(lambda: all((tmp_path / str(number)).exists() for number in range(2)) or process.poll() is not None)
    wait_until(lambda: command_lines().count(ORPHAN) == 2)
    os.killpg(process.pid, signal.SIGINT)
    output_of(process)

    assert process.returncode == pytest.ExitCode.INTERRUPTED
    wait_until(lambda: ORPHAN not in command_lines())


def command_lines() -> str:
    found = Path("/proc").glob("[0-9]*/cmdline")
    return "\n".join(text for path in found if (text := _text(path)))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        # The process has ended meanwhile.
        return ""


@pytest.mark.parametrize(
    ("workers", "words"), [("2", "none, so there is one worker ([Errno 1]"), ("0", "none ([Errno 1]")]
)
def test_a_machine_that_forbids_namespaces_has_one_worker(start: Start, workers: str, words: str) -> None:
    source = "@pytest.mark.parametrize('number', range(2))\ndef test_any(number): pass\n"
    output, _ = start(source, "-n", workers, unshare=errno.EPERM).communicate()

    assert f"namespaces: {words}" in output
    assert "2 passed" in output
    assert ("created: 1/1 worker" in output) == (workers == "2")
