"""The fixture that fails a test which leaves something behind, seen from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise("The tree", "No test leaves a process, descriptor, thread or `/dev/shm` entry behind.")

ROOT = Path(__file__).parent.parent

SUITE = """
import gc, os, socket, subprocess, sys, threading
import pytest
from tests.leaks import _leaves_nothing_behind

kept = []
released = threading.Event()
name = f"/dev/shm/moonpool-leak-{os.getpid()}"

def test_leaves_a_child():
    kept.append(subprocess.Popen(["/bin/sleep", "60"]))

def test_leaves_a_child_that_has_ended():
    kept.append(subprocess.Popen(["/bin/true"]))

def test_leaves_a_child_of_a_thread_that_has_ended():
    start = lambda: kept.append(subprocess.Popen(["/bin/sleep", "61"]))
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()

def test_leaves_a_socket():
    kept.append(socket.socketpair())

def test_leaves_a_copy_of_a_descriptor():
    os.dup(0)

def test_leaves_a_memfd():
    os.memfd_create("moonpool-left")

def test_leaves_a_thread():
    threading.Thread(target=released.wait, name="forgotten").start()

def test_leaves_a_name_in_shared_memory():
    open(name, "w").close()

def test_is_clean_again():
    os.unlink(name)
    released.set()

def test_leaves_only_garbage():
    gc.disable()
    cycle = [os.fdopen(os.memfd_create("garbage"))]
    cycle.append(cycle)

def test_leaves_a_thread_that_is_about_to_end():
    end = threading.Event()
    threading.Thread(target=end.wait, args=(0.05,)).start()

@pytest.fixture(scope="module")
def pair():
    with socket.socket() as one:
        yield one

def test_uses_what_lives_longer(pair):
    assert pair

def test_leaves_a_daemon_thread():
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""

LEFT = {
    "test_leaves_a_child": r"the child process \d+ /bin/sleep 60",
    "test_leaves_a_child_that_has_ended": r"the child process \d+ \(ended, never waited for\)",
    "test_leaves_a_child_of_a_thread_that_has_ended": r"the child process \d+ /bin/sleep 61",
    "test_leaves_a_socket": r"the open descriptor \d+ → socket:.*; .*descriptor \d+ → socket:",
    "test_leaves_a_copy_of_a_descriptor": r"the open descriptor \d+ → /dev/null",
    "test_leaves_a_memfd": r"the open descriptor \d+ → /memfd:moonpool-left \(deleted\)",
    "test_leaves_a_thread": "the thread 'forgotten'",
    "test_leaves_a_name_in_shared_memory": r"the entry /dev/shm/moonpool-leak-\d+",
}
CLEAN = {
    "test_is_clean_again",
    "test_leaves_only_garbage",
    "test_leaves_a_thread_that_is_about_to_end",
    "test_uses_what_lives_longer",
    "test_leaves_a_daemon_thread",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of pytest for a suite in which most tests leave something behind."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text("import tests.leaks\ntests.leaks.GRACE_S = 0.5\n")
    (folder / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "400"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    ).stdout


@pytest.mark.parametrize("test", LEFT)
def test_leftovers_of_a_test_are_named(report: str, test: str) -> None:
    assert re.search(rf"ERROR \S+::{test} - Failed: the test left behind {LEFT[test]}", report)


def test_tests_that_leave_nothing_pass(report: str) -> None:
    failed = set(re.findall(r"^ERROR \S+::(\w+)", report, re.MULTILINE))

    assert failed == set(LEFT)
    assert set(re.findall(r"^PASSED \S+::(\w+)", report, re.MULTILINE)) == CLEAN | set(LEFT)
