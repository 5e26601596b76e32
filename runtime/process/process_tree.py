"""Ends the processes that a stub has started, if it may start some.

`stub/programs/process_tree.py` starts such a stub in a PID namespace if the kernel allows one, else as a private user.
A process there, the *keeper*, waits for the end of a pipe, and then makes the kernel end all of them. This process
holds the other end of the pipe, so they end with it in any case.

Theory of operation. The stub and its keeper are children of this process, which reaps both: the stub first
(`child.py`), then the keeper (`end`), because in a PID namespace the keeper ends last. Other processes of the tree are
reaped by their parents. In a namespace, orphans become children of the keeper, which ignores SIGCHLD, so the kernel
reaps them.

Supervisor, watcher and shutdown use a tree from several threads. `_lock` guards the two descriptors: `begin_end` closes
the pipe once, and `end` reaps the keeper once. A second thread in `end` waits for the first, so after `end` nothing is
left, whichever thread called it.

A pid is trusted only as long as its process cannot have been reaped. The keeper is this process's child, so its number
is safe until `end`. An orphan may be reaped at any moment. So a pidfd is opened first, then the list of orphans is read
again; only if the number is still in it does the pidfd belong to an orphan, and gets the signal.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from moonpool.runtime.log import RuntimeLog

Start = Callable[[Sequence[str], Sequence[int]], subprocess.Popen[bytes]]
_log = RuntimeLog("moonpool")
_STUB_SIDE = str(Path(__file__).resolve().parents[2] / "stub" / "programs" / "process_tree.py")
# Python starts before the namespace is made, on a machine that may be busy.
_BEGIN_S = 30.0
# The kernel ends the processes, which may take a moment.
_END_S = 5.0
_PAUSE_S = 0.005
_ROUNDS = 20


class ProcessTree:
    """All processes that a stub starts, and their keeper. Any thread may call any method."""

    def __init__(self, keeper: int, stub: int, user: int | None, life_fd: int) -> None:
        """Own the pipe's end and the keeper from now on. If it raises OSError, all processes end.

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
        """Make the kernel end all processes. Does not wait."""
        with self._lock:
            if self._life_fd >= 0:
                os.close(self._life_fd)
                self._life_fd = -1

    def end(self) -> None:
        """End all processes, and wait until none is left. The stub has been reaped. May be called many times."""
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
                _log.error("cannot kill process %d, which a model started", self._keeper)
            os.close(self._pidfd)
            self._pidfd = -1
            if self._user is not None:
                # This keeper does not wait for them, and no other instance may get their user before they are gone.
                _wait_for_end_of(self._user)

    def orphans(self) -> list[int]:
        """List the processes that have lost their parent and live."""
        if self._life_fd < 0:
            return []
        if self._user is not None:
            parents = _parents_of(self._user)
            return [pid for pid, parent in parents.items() if parent not in parents and pid != self._stub]
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
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
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
            _log.error("cannot kill processes %s of user %d, which a model started", [*left], user)
            return
        time.sleep(_PAUSE_S)


def start_in_tree(start: Start, user: int | None) -> tuple[subprocess.Popen[bytes] | int, ProcessTree | None]:
    """Start a stub that may start other processes. Return the stub, or only its pid, and the tree that ends them all.

    The caller reaps the stub. The tree is None if the kernel refuses PID namespaces and there is no `user`. `start`
    gets the arguments that come before the stub's program, and descriptors to pass on. Raises OSError.
    """
    report_fd, told_fd = os.pipe2(os.O_CLOEXEC)
    kept_fd, life_fd = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            name = "" if user is None else str(user)
            words = (sys.executable, "-I", "-S", _STUB_SIDE, str(told_fd), str(kept_fd), name)
            process = start(words, (told_fd, kept_fd))
        finally:
            os.close(told_fd)
            os.close(kept_fd)
        how, *pids = _report_of(report_fd)
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
            tree = ProcessTree(keeper, stub, user if how == "user" else None, kept_life_fd)
        except OSError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stub, signal.SIGKILL)
            for pid in (stub, keeper):
                os.waitpid(pid, 0)
            process.returncode = 0
            raise
        return process if how == "user" else stub, tree
    finally:
        os.close(report_fd)
        if life_fd >= 0:
            os.close(life_fd)


def _report_of(report_fd: int) -> list[str]:
    """Read the report of the stub's side: "pids" or "user", and numbers of processes; [""] if there is none."""
    poll = select.poll()
    poll.register(report_fd, select.POLLIN)
    report = os.read(report_fd, 64) if poll.poll(_BEGIN_S * 1000) else b""
    return report.decode("ascii").split(" ")
