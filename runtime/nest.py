"""Ends the processes that a stub has started, if it may start some.

`stub/nest.py` begins such a stub in a PID namespace if the kernel allows one, else as a user that no other process has. A
process there, the keeper, waits for the end of a pipe, and then has the kernel end all of them. This process holds the other
end of the pipe, so they end with it in any case.

Theory of operation. Supervisor, watcher and shutdown use a nest from several threads. `_lock` guards the two descriptors:
`begin_end` closes the pipe once, and `end` reaps the keeper once. Numbers of processes are trusted only while somebody who
cannot have been reaped holds them: the keeper until `end`, an orphan by a pidfd that is compared again before the signal.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence

    Start = Callable[[Sequence[str], Sequence[int]], subprocess.Popen[bytes]]

_log = logging.getLogger("moonpool")
_NEST = str(Path(__file__).resolve().parents[1] / "stub" / "nest.py")
# Python starts before the namespace is made, on a machine that may be busy.
_BEGIN_S = 30.0
# The kernel ends the processes, which may take a moment.
_END_S = 5.0
_PAUSE_S = 0.005
_ROUNDS = 20


class Nest:
    """All that a stub starts, with a keeper. Any thread may call any method."""

    def __init__(self, keeper: int, stub: int, user: int | None, life_fd: int) -> None:
        """Own the pipe's end, and reap the keeper from now on. Raises OSError, and then all has ended.

        `user` is the user of the processes; None if they are in the keeper's PID namespace.
        """
        self.is_namespace = user is None
        self._keeper, self._stub, self._user = keeper, stub, user
        self._life_fd = life_fd
        self._lock = threading.Lock()
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(keeper)
        except OSError:  # this process has no descriptor to spare
            self.begin_end()
            raise

    def begin_end(self) -> None:
        """Have the kernel end all of it. Does not wait."""
        with self._lock:
            if self._life_fd >= 0:
                os.close(self._life_fd)
                self._life_fd = -1

    def end(self) -> None:
        """End all, and wait until nothing is left. The stub has been reaped. May be called many times."""
        self.begin_end()
        with self._lock:
            if self._pidfd < 0:
                return
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if poll.poll(_END_S * 1000):
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
            else:
                _log.error("what a model started does not end: process %d stays", self._keeper)
            os.close(self._pidfd)
            self._pidfd = -1
            if self._user is not None:
                # The keeper does not wait for them, and no other process may get this user before they are gone.
                _wait_for_end_of(self._user)

    def orphans(self) -> list[int]:
        """List the processes that have lost their parent and live."""
        if self._life_fd < 0:
            return []
        if self._user is not None:
            parents = _parents_of(self._user)
            return [
                pid
                for pid, parent in parents.items()
                if parent not in parents and pid != self._stub
            ]
        # The keeper is not reaped before `end`, so the number is still its own.
        return children_of(self._keeper)

    def end_orphans(self) -> None:
        """End the processes that have lost their parent. If new ones come all the time, end everything."""
        for _ in range(_ROUNDS):
            orphans = self.orphans()
            if not orphans:
                return
            for pid in orphans:
                self._kill_orphan(pid)
        self.begin_end()

    def _kill_orphan(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                # The number may belong to another process by now.
                if pid in self.orphans():
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    poll = select.poll()
                    poll.register(pidfd, select.POLLIN)
                    poll.poll(100)
            finally:
                os.close(pidfd)


def children_of(pid: int) -> list[int]:
    """List the children of all threads of a process; none if it has ended."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(OSError),
                open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file,
            ):
                children += map(int, file.read().split())
    return children


def _parents_of(user: int) -> dict[int, int]:
    """List the living processes of a user, each with its parent."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/status", "rb") as file:
                lines = dict(line.split(b":", 1) for line in file if b":" in line)
                is_dead = lines[b"State"].split()[0] == b"Z"
                if int(lines[b"Uid"].split()[0]) == user and not is_dead:
                    found[int(name)] = int(lines[b"PPid"])
    return found


def _wait_for_end_of(user: int) -> None:
    end_s = time.monotonic() + _END_S
    while left := _parents_of(user):
        if time.monotonic() > end_s:
            _log.error("what a model started does not end: processes %s of user %d", [*left], user)
            return
        time.sleep(_PAUSE_S)


def begin_nested(
    start: Start, user: int | None
) -> tuple[subprocess.Popen[bytes] | int, Nest | None]:
    """Start a stub that may start others; return the stub, or its pid alone, and the nest that ends them.

    The caller reaps the stub. The nest is None if the kernel refuses PID namespaces and there is no `user`. `start` gets
    the words before its program, and descriptors to pass on. Raises OSError.
    """
    report_fd, told_fd = os.pipe2(os.O_CLOEXEC)
    kept_fd, life_fd = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            name = "" if user is None else str(user)
            words = (sys.executable, "-I", "-S", _NEST, str(told_fd), str(kept_fd), name)
            process = start(words, (told_fd, kept_fd))
        finally:
            os.close(told_fd)
            os.close(kept_fd)
        how, *pids = _told(report_fd)
        keeper = int(pids[0]) if pids else -1
        if how == "user" and keeper < 0:
            return process, None
        if how == "":
            process.kill()
        if how != "user":
            process.wait()
        if how == "":
            raise OSError(errno.ECHILD, "it ended before it was in its PID namespace")
        stub = process.pid if how == "user" else int(pids[1])
        kept_life_fd, life_fd = life_fd, -1
        try:
            nest = Nest(keeper, stub, user if how == "user" else None, kept_life_fd)
        except OSError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stub, signal.SIGKILL)
            for pid in (stub, keeper):
                os.waitpid(pid, 0)
            process.returncode = 0
            raise
        return process if how == "user" else stub, nest
    finally:
        os.close(report_fd)
        if life_fd >= 0:
            os.close(life_fd)


def _told(report_fd: int) -> list[str]:
    """Read the report of `stub/nest.py`: "pids" or "user", and numbers of processes; [""] if there is none."""
    poll = select.poll()
    poll.register(report_fd, select.POLLIN)
    told = os.read(report_fd, 64) if poll.poll(_BEGIN_S * 1000) else b""
    return told.decode("ascii").split(" ")
