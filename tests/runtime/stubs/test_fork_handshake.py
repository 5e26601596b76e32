"""The pid of a process that another one forked comes from the kernel and from nobody else."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from moonpool.runtime.stubs.template import ForkedProcess, ForkFailed, ForkHandshake

PATIENCE_S = 60.0
Child = Callable[..., int]
# Children run these programs. `end` is their end of the handshake, and `fds` are other descriptors.
SPEAKS = "os.write(end, b'0'); signal.pause()"
LEADS_AND_SPEAKS = f"os.setsid(); {SPEAKS}"
SENDS_DESCRIPTORS = """
socket.socket(fileno=end).sendmsg(
    [b"0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 0, 0]))]
)
signal.pause()
"""
BEGETS = """
read_fd, write_fd = fds
pid = os.fork()
if not pid:
    os.write(end, b"0")
    os.close(write_fd)
    os.read(read_fd, 1)
    os._exit(0)
os.close(write_fd)
os.read(read_fd, 1)
os.waitpid(pid, 0)
"""
LEAVES_A_CHILD = """
read_fd, _ = fds
os.setsid()
os.write(end, b"0")
os.close(read_fd)
if not os.fork():
    signal.pause()
"""


@pytest.fixture
def child(handshake: ForkHandshake) -> Iterator[Child]:
    """Runs a program in a child process of this one, which has the end of the birth and these descriptors."""
    children = []

    def start(program: str, *fds: int) -> int:
        end = handshake.end.fileno()
        code = f"import array, os, signal, socket\nend, fds = {end}, {fds}\n{program}"
        command = [sys.executable, "-S", "-c", code]
        children.append(subprocess.Popen(command, pass_fds=(end, *fds)))
        return children[-1].pid

    yield start
    for each in children:
        each.wait(PATIENCE_S)


@pytest.fixture
def handshake() -> Iterator[ForkHandshake]:
    handshake = ForkHandshake()
    yield handshake
    handshake.close()


def test_a_child_that_speaks_is_known_by_a_pidfd_of_its_own(handshake: ForkHandshake, child: Child) -> None:
    pid = child(SPEAKS)
    found, pidfd = handshake.wait(os.getpid(), PATIENCE_S)
    assert found == pid

    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(PATIENCE_S * 1000)
    os.close(pidfd)


@pytest.mark.promise(
    "Forked instances",
    "The kernel tells which process a template has forked. Neither the template, nor a "
    "grandchild, nor another instance is accepted in its place, and descriptors that come along "
    "are dropped.",
)
def test_a_process_that_answers_for_its_child_is_refused(handshake: ForkHandshake) -> None:
    handshake.end.send(b"\0")
    with pytest.raises(ForkFailed, match=f"process {os.getpid()}, which is not a child of it"):
        handshake.wait(os.getpid(), PATIENCE_S)


@pytest.mark.promise("Forked instances", "The kernel tells which process a …")
def test_a_grandchild_is_not_taken_for_a_child(handshake: ForkHandshake, child: Child) -> None:
    read_fd, write_fd = os.pipe()
    child(BEGETS, read_fd, write_fd)
    with pytest.raises(ForkFailed, match="not a child of it"):
        handshake.wait(os.getpid(), PATIENCE_S)
    os.close(read_fd)
    os.close(write_fd)


def test_a_child_that_ends_without_a_word_is_no_birth(handshake: ForkHandshake, child: Child) -> None:
    child("")
    with pytest.raises(ForkFailed, match="forked nothing that lived"):
        handshake.wait(os.getpid(), PATIENCE_S)


def test_nobody_is_waited_for_longer_than_was_said(handshake: ForkHandshake) -> None:
    copy = os.dup(handshake.end.fileno())
    with pytest.raises(ForkFailed, match=r"said nothing for 0\.01 s"):
        handshake.wait(os.getpid(), 0.01)
    os.close(copy)


@pytest.mark.promise("Forked instances", "The kernel tells which process a …")
def test_descriptors_that_come_with_the_word_are_dropped(handshake: ForkHandshake, child: Child) -> None:
    pid = child(SENDS_DESCRIPTORS)
    before = len(os.listdir("/proc/self/fd"))
    found, pidfd = handshake.wait(os.getpid(), PATIENCE_S)
    # The handshake closed one end and received the pidfd.
    assert len(os.listdir("/proc/self/fd")) == before
    os.kill(pid, signal.SIGKILL)
    os.close(pidfd)
    assert found == pid


def test_a_forked_process_has_the_exit_code_that_its_template_tells(handshake: ForkHandshake, child: Child) -> None:
    child(LEADS_AND_SPEAKS)
    process = ForkedProcess(*handshake.wait(os.getpid(), PATIENCE_S), lambda pid: pid % 7)
    assert process.wait(0) is None
    assert "running" in repr(process)

    process.kill()

    assert process.wait(PATIENCE_S) == process.pid % 7
    process.kill()
    process.close()


def test_the_children_of_a_forked_process_end_with_it(handshake: ForkHandshake, child: Child) -> None:
    read_fd, write_fd = os.pipe()
    child(LEAVES_A_CHILD, read_fd, write_fd)
    os.close(write_fd)
    process = ForkedProcess(*handshake.wait(os.getpid(), PATIENCE_S), lambda _: 5)

    assert process.wait(PATIENCE_S) == 5
    # The end of file shows that the last process with the pipe has ended.
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)
    process.close()


def test_before_linux_6_9_no_group_is_killed_by_a_number_that_may_be_another_s(
    handshake: ForkHandshake, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    pidfd_send_signal, killed = signal.pidfd_send_signal, []

    def without_groups(pidfd: int, number: int, info: None = None, flags: int = 0) -> None:
        if flags:
            raise OSError(errno.EINVAL, "no such flag")
        pidfd_send_signal(pidfd, number, info, flags)

    monkeypatch.setattr(signal, "pidfd_send_signal", without_groups)
    monkeypatch.setattr(os, "killpg", lambda *group: killed.append(group))
    child(LEADS_AND_SPEAKS)
    process = ForkedProcess(*handshake.wait(os.getpid(), PATIENCE_S), lambda _: 5)

    process.kill()

    assert process.wait(PATIENCE_S) == 5
    assert killed == []
    process.close()
