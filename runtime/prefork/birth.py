"""How the runtime comes to know a process that another process forked.

A template runs foreign code, so its word for a pid is worth nothing. The new process says one byte on a socket of the
runtime's, and the kernel writes beside it who said so (SCM_CREDENTIALS, unix(7)).
"""

from __future__ import annotations

import os
import select
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("=iII")


class NotBorn(Exception):
    """There is no new process, or not the one that was asked for; the text is a clause that says why."""


class Birth:
    """The runtime's end of such a socket; `end` is for the process that is to be born."""

    def __init__(self) -> None:
        self._ours, self.end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def wait(self, parent_pid: int, timeout_s: float) -> tuple[int, int]:
        """The pid of the new process and a pidfd, which the caller owns. Raises `NotBorn`.

        It is a child of `parent_pid`, which must not be reaped meanwhile. `end` is closed here before, so that
        the end of all that have it is seen.
        """
        self.end.close()
        poll = select.poll()
        poll.register(self._ours, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise NotBorn(f"said nothing for {timeout_s:g} s")
        # No room for descriptors: the kernel drops them.
        said, ancillary, _, _ = self._ours.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
        pids = [
            _CREDENTIALS.unpack(data)[0]
            for level, kind, data in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        ]
        if not said or not pids:
            raise NotBorn("forked nothing that lived")
        return pids[0], _child(pids[0], parent_pid)

    def close(self) -> None:
        """Close both ends. May be called many times."""
        self._ours.close()
        self.end.close()


def _child(pid: int, parent_pid: int) -> int:
    """A pidfd of a process that is, or was, a child of `parent_pid`."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise NotBorn("forked a process that ended at once") from error
    # In this order: a process that got the number meanwhile has another parent, or is a child of that one, too.
    if _parent_of(pid) != parent_pid:
        os.close(pidfd)
        raise NotBorn(f"answered with process {pid}, which is no child of it")
    return pidfd


def _parent_of(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return -1
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))
