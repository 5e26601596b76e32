"""Processes come from one thread, and have nothing of ours but what they are given."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moonpool.runtime.process.spawner import spawn

PATIENCE_S = 60.0


def run(code: str, environment: dict[str, str] | None = None, folder: str = "/") -> str:
    """Run code in a process, and return its output."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    try:
        process = spawn(
            [sys.executable, "-I", "-c", code],
            environment=environment or {},
            folder=folder,
            output_fd=write_fd,
            fds=(write_fd,),
        )
    finally:
        os.close(write_fd)
    with os.fdopen(read_fd) as file:
        text = file.read()
    assert process.wait(PATIENCE_S) == 0, text
    return text.strip()


def test_the_environment_is_what_it_is_given() -> None:
    text = run("import os; print(sorted(os.environ.items()))", {"ONE": "1"})
    found = dict(eval(text))
    # Python itself may set this one where the environment names no locale.
    found.pop("LC_CTYPE", None)
    assert found == {"ONE": "1"}


def test_the_folder_is_what_it_is_given(tmp_path: Path) -> None:
    assert run("import os; print(os.getcwd())", folder=str(tmp_path)) == str(tmp_path)


def test_it_has_no_descriptors_but_those_it_is_given() -> None:
    secret = os.open("/etc/hostname", os.O_RDONLY)
    os.set_inheritable(secret, True)
    try:
        open_fds = run("import os; print(*sorted(map(int, os.listdir('/proc/self/fd')))[:-1])")
    finally:
        os.close(secret)
    fds = [int(fd) for fd in open_fds.split()]
    # The program has the standard descriptors, and the pipe that `run` gives it.
    assert fds[:3] == [0, 1, 2]
    assert len(fds) == 4


def test_it_reads_nothing_and_is_in_a_session_of_its_own() -> None:
    code = "import os, sys; print(repr(sys.stdin.read()), os.getsid(0) == os.getpid())"
    assert run(code) == "'' True"


def test_standard_error_goes_where_standard_output_goes() -> None:
    assert run("import sys; sys.stderr.write('problem')") == "problem"


def test_a_program_that_is_not_there_is_an_error_for_the_caller() -> None:
    with pytest.raises(FileNotFoundError):
        spawn(["/nonexistent"], environment={}, folder="/", output_fd=2, fds=())
    with pytest.raises(OSError, match="hostname"):
        spawn(["/etc/hostname"], environment={}, folder="/", output_fd=2, fds=())
    # The next process starts all the same.
    assert run("print('here')") == "here"


def test_one_thread_starts_all_and_outlives_whoever_asked() -> None:
    # A process that asked for it is killed when the thread that started it ends.
    code = (
        "import ctypes, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0);"
        "print('ready', flush=True); sys.stdin = open(3); sys.stdin.read(); print('alive')"
    )
    hold_fd, release_fd = os.pipe2(os.O_CLOEXEC)
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        processes.append(
            spawn(
                [sys.executable, "-I", "-c", code.replace("open(3)", f"open({hold_fd})")],
                environment={},
                folder="/",
                output_fd=write_fd,
                fds=(hold_fd,),
            )
        )

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(PATIENCE_S)
    os.close(write_fd)
    os.close(hold_fd)
    with os.fdopen(read_fd) as file:
        assert file.readline() == "ready\n"
        os.close(release_fd)
        assert file.read() == "alive\n"
    assert processes[0].wait(PATIENCE_S) == 0


def test_many_threads_may_ask_at_once() -> None:
    codes: list[int] = []

    def start() -> None:
        process = spawn(["/bin/true"], environment={}, folder="/", output_fd=2, fds=())
        codes.append(process.wait(PATIENCE_S))

    threads = [threading.Thread(target=start) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert codes == [0] * 16
    assert [t.name for t in threading.enumerate()].count("moonpool-spawner") == 1


# This runs in a process of its own, because libraries that other tests have imported may not survive a fork.
FORKED = """
import contextlib, os, signal, sys
from moonpool.runtime.process.spawner import _spawner, spawn

def start():
    return spawn(["/bin/true"], environment={}, folder="/", output_fd=2, fds=()).wait()

assert start() == 0
with _spawner._lock if sys.argv[1] == "held" else contextlib.nullcontext():
    if os.fork() == 0:
        signal.alarm(20)
        os._exit(start())
print(os.wait()[1])
"""


@pytest.mark.parametrize("lock", ["free", "held"])
def test_a_fork_has_a_thread_of_its_own_for_it_whatever_others_did_meanwhile(lock: str) -> None:
    done = subprocess.run([sys.executable, "-c", FORKED, lock], capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.stdout == "0\n", done.stderr


THREADLESS = """
import os, sys, threading
from moonpool.runtime.process.spawner import spawn

def refuse(_):
    raise RuntimeError("can't start new thread")

def start():
    return spawn([sys.executable, "-c", ""], environment={}, folder="/", output_fd=1, fds=())

start_thread, threading.Thread.start = threading.Thread.start, refuse
for _ in range(2):
    try:
        start()
    except OSError as error:
        print(type(error).__name__, error.errno, str(error).partition(";")[0])
threading.Thread.start = start_thread
print(start().wait())
"""


@pytest.mark.promise("At the limits", "If no thread can be started …")
def test_a_start_that_failed_for_lack_of_a_thread_works_later() -> None:
    done = subprocess.run([sys.executable, "-c", THREADLESS], capture_output=True, text=True, timeout=PATIENCE_S)
    text = "the runtime has no thread for moonpool-spawner: can't start new thread"
    refused = f"OutOfThreads {errno.EAGAIN} {text}"
    assert done.stdout.splitlines() == [refused, refused, "0"]
