"""The pid of a process that another one forked is what the kernel says, not what anybody else does."""

from __future__ import annotations

import array
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator

import pytest

from moonpool.runtime.prefork.birth import Birth, NotBorn
from moonpool.runtime.prefork.forked_process import ForkedProcess

PATIENCE_S = 20.0
Fork = Callable[[Callable[[], None]], int]


@pytest.fixture
def fork() -> Iterator[Fork]:
    """Runs something in a child process, which ends then."""
    pids: list[int] = []

    def start(action: Callable[[], None]) -> int:
        pid = os.fork()
        if not pid:
            try:
                action()
            finally:
                os._exit(0)
        pids.append(pid)
        return pid

    yield start
    for pid in pids:
        os.waitpid(pid, 0)


@pytest.fixture
def birth() -> Iterator[Birth]:
    birth = Birth()
    yield birth
    birth.close()


def _lives(birth: Birth) -> None:
    birth.end.send(b"\0")
    signal.pause()


def test_a_child_that_speaks_is_known_by_a_pidfd_of_its_own(birth: Birth, fork: Fork) -> None:
    pid = fork(lambda: _lives(birth))
    found, pidfd = birth.wait(os.getpid(), PATIENCE_S)
    assert found == pid

    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(PATIENCE_S * 1000)
    os.close(pidfd)


def test_who_speaks_for_its_child_is_not_taken_for_it(birth: Birth) -> None:
    birth.end.send(b"\0")
    with pytest.raises(NotBorn, match=f"process {os.getpid()}, which is no child of it"):
        birth.wait(os.getpid(), PATIENCE_S)


def test_a_grandchild_is_not_taken_for_a_child(birth: Birth, fork: Fork) -> None:
    read_fd, write_fd = os.pipe()

    def beget() -> None:
        pid = os.fork()
        if not pid:
            birth.end.send(b"\0")
            os.close(write_fd)
            os.read(read_fd, 1)
            os._exit(0)
        os.close(write_fd)
        os.read(read_fd, 1)
        os.waitpid(pid, 0)

    fork(beget)
    with pytest.raises(NotBorn, match="no child of it"):
        birth.wait(os.getpid(), PATIENCE_S)
    os.close(read_fd)
    os.close(write_fd)


def test_a_child_that_ends_without_a_word_is_no_birth(birth: Birth, fork: Fork) -> None:
    fork(lambda: None)
    with pytest.raises(NotBorn, match="forked nothing that lived"):
        birth.wait(os.getpid(), PATIENCE_S)


def test_nobody_is_waited_for_longer_than_was_said(birth: Birth) -> None:
    copy = os.dup(birth.end.fileno())
    with pytest.raises(NotBorn, match=r"said nothing for 0\.01 s"):
        birth.wait(os.getpid(), 0.01)
    os.close(copy)


def test_descriptors_that_come_with_the_word_are_dropped(birth: Birth, fork: Fork) -> None:
    gift = array.array("i", [0, 0, 0])

    def send() -> None:
        birth.end.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, gift)])
        signal.pause()

    pid = fork(send)
    before = len(os.listdir("/proc/self/fd"))
    found, pidfd = birth.wait(os.getpid(), PATIENCE_S)
    # One end was closed, and the pidfd came.
    assert len(os.listdir("/proc/self/fd")) == before
    os.kill(pid, signal.SIGKILL)
    os.close(pidfd)
    assert found == pid


def test_a_forked_process_has_the_exit_code_that_its_template_tells(
    birth: Birth, fork: Fork
) -> None:
    def live() -> None:
        os.setsid()
        _lives(birth)

    fork(live)
    process = ForkedProcess(*birth.wait(os.getpid(), PATIENCE_S), lambda pid: pid % 7)
    assert process.wait(0) is None
    assert "running" in repr(process)

    process.kill()

    assert process.wait(PATIENCE_S) == process.pid % 7
    process.kill()
    process.close()


def test_what_a_forked_process_started_goes_with_it(birth: Birth, fork: Fork) -> None:
    read_fd, write_fd = os.pipe()

    def live() -> None:
        os.setsid()
        birth.end.send(b"\0")
        os.close(read_fd)
        if not os.fork():
            signal.pause()

    fork(live)
    os.close(write_fd)
    process = ForkedProcess(*birth.wait(os.getpid(), PATIENCE_S), lambda _: 5)

    assert process.wait(PATIENCE_S) == 5
    # The last one that had the pipe has ended.
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)
    process.close()
