"""The process of a stub: its end, the processes that end with it, and the words for it."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import wait_until

from moonpool.runtime.process.child import StubProcess, exit_in_words

PATIENCE_S = 60.0
Start = Callable[[str], StubProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a script in the interpreter's place: it gets a stub's arguments."""
    processes: list[StubProcess] = []
    ends = [*socket.socketpair(), *socket.socketpair(), *socket.socketpair()]

    def start(script: str) -> StubProcess:
        program = tmp_path / f"python{len(processes)}"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        with open(tmp_path / "output", "ab") as output:
            process = StubProcess(
                "m_0_0",
                str(program),
                work_fd=ends[0].fileno(),
                control_fd=ends[2].fileno(),
                calls_fd=ends[4].fileno(),
                output_fd=output.fileno(),
                environment={"PATH": os.environ["PATH"]},
                folder=str(tmp_path),
            )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait(PATIENCE_S)
        process.close()
    for end in ends:
        end.close()


def output(folder: Path) -> str:
    return (folder / "output").read_text()


def test_it_is_called_as_stubs_are(start: Start, tmp_path: Path) -> None:
    process = start('echo "$@"')
    assert process.wait(PATIENCE_S) == 0
    boot, word, name, *fds, parent, msgpack = output(tmp_path).split()
    assert (word, name) == ("triton_python_backend_stub", "m_0_0")
    assert boot.endswith("/stub/boot.py")
    assert len(set(map(int, fds))) == 3
    assert int(parent) == os.getpid()
    assert os.path.isfile(f"{msgpack}/__init__.py")


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("exit 0", 0, "exited with 0"),
        ("exit 7", 7, "exited with 7"),
        ("kill -SEGV $$", -signal.SIGSEGV, "killed by SIGSEGV"),
        ("kill -KILL $$", -signal.SIGKILL, "killed by SIGKILL"),
    ],
)
def test_how_it_ended_is_known_and_said(start: Start, script: str, code: int, words: str) -> None:
    process = start(script)
    assert process.wait(PATIENCE_S) == code
    assert process.wait(0) == code
    assert words in repr(process)
    assert exit_in_words(code) == words


def test_a_signal_without_a_name_has_a_number() -> None:
    assert exit_in_words(-200) == "killed by signal 200"


def test_waiting_for_one_that_runs_ends_with_the_time(start: Start) -> None:
    process = start("exec sleep 1000")
    assert process.wait(0) is None
    assert process.wait(0.01) is None
    assert repr(process) == f"<process {process.pid}, running>"


def test_it_can_be_told_to_end_and_may_refuse(start: Start, tmp_path: Path) -> None:
    process = start("trap '' TERM; echo ready; while true; do sleep 1000 & wait; done")
    wait_until(lambda: "ready" in output(tmp_path))
    process.signal(signal.SIGTERM)
    assert process.wait(0.05) is None
    process.kill()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("ends_itself", [True, False])
def test_the_children_of_a_process_end_with_it(start: Start, tmp_path: Path, ends_itself: bool) -> None:
    process = start("sleep 1000 & echo $!; " + ("exit 3" if ends_itself else "while true; do wait; done"))
    wait_until(lambda: output(tmp_path).strip())
    child = int(output(tmp_path))
    if not ends_itself:
        process.kill()
    assert process.wait(PATIENCE_S) in (3, -signal.SIGKILL)
    wait_until(lambda: not _is_running(child))


def test_signals_to_one_that_is_gone_reach_nobody(start: Start) -> None:
    process = start("exit 0")
    process.wait(PATIENCE_S)
    process.signal(signal.SIGTERM)
    process.kill()
    process.close()
    process.close()
    process.signal(signal.SIGTERM)
    process.kill()
    assert process.wait(0) == 0


def test_signals_to_one_that_ended_and_was_not_waited_for_harm_nobody(start: Start) -> None:
    process = start("exit 4")
    os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOWAIT)
    process.signal(signal.SIGTERM)
    process.kill()
    assert process.wait(PATIENCE_S) == 4


def test_many_threads_may_wait_and_one_reaps(start: Start) -> None:
    process = start("read line; exit 5")  # its input is empty
    codes: list[int | None] = []
    threads = [threading.Thread(target=lambda: codes.append(process.wait(PATIENCE_S))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert codes == [5] * 8


def test_a_program_that_reaps_all_children_is_told_so(start: Start) -> None:
    process = start("exit 6")
    os.waitpid(process.pid, 0)
    with pytest.warns(RuntimeWarning, match="was reaped by other code of this program"):
        assert process.wait(PATIENCE_S) == 0


def test_an_interpreter_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        StubProcess(
            "m_0_0",
            str(tmp_path / "none"),
            work_fd=0,
            control_fd=0,
            calls_fd=0,
            output_fd=2,
            environment={},
            folder="/",
        )
