"""Namespaces for tests, so that no test sees another's things or is charged for them.

    python tests/spaces.py KEPT... -- PROGRAM ARGUMENT...

The program runs with processes, ports, shared memory and temporary files of its own, as the user who started it. Of
the temporary files outside, it sees these paths.

Each worker of pytest-xdist is started so (`workers.py`). Pytest without workers only leaves the machine's `/dev/shm`,
because a living process cannot move into another namespace of processes.

A worker ends in this order. The first process stays outside and waits for the second one, which is number 1 inside: it
starts the worker, reaps orphans, and ends with the worker. With number 1 the kernel ends all processes inside. If the
first is killed, the kernel kills number 1. A terminal sends its SIGINT to all three, and the worker alone heeds it.

Temporary files are private because processes are: a runtime removes the scratch folders of processes that it does not
see, and names that have a process's number are unique for its namespace only.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from moonpool.stub.sandbox import identity, kernel, mounts, namespaces

_SET_PDEATHSIG, _SET_INTERFACE_FLAGS, _IS_UP = 1, 0x8914, 1
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
# Programs in namespaces of their own have this variable. A pytest that a test starts shares the test's /dev/shm.
INSIDE = "MOONPOOL_TEST_SPACES"


def command(needed: Iterable[str] = ()) -> list[str]:
    """Return the words that start a program so, if the program's own follow. It needs these paths."""
    top = Path(_temporary())
    found = (Path(path).resolve() for path in needed)
    kept = {str(top / path.relative_to(top).parts[0]) for path in found if top in path.parents}
    return [sys.executable, str(Path(__file__)), *sorted(kept), "--"]


def leave_shared_memory() -> None:
    """Give this process a /dev/shm of its own. Raises OSError where that is forbidden."""
    _enter(["mnt"])
    try:
        _mount_shared_memory()
    finally:
        _become_ordinary()
    os.environ[INSIDE] = "mnt"


def _enter(names: list[str]) -> None:
    # In a namespace of users, which gives others than root the right to the rest, this user keeps its number.
    namespaces.unshare(names if os.geteuid() == 0 else ["user", *names])
    if "mnt" in names:
        mounts.mount("none", "/", "", _REC | _PRIVATE)


def _become_ordinary() -> None:
    # A namespace of users gives its first process all capabilities.
    if os.geteuid() != 0:
        identity.drop_capabilities()


def _mount_shared_memory() -> None:
    mounts.mount("tmpfs", "/dev/shm", "tmpfs", _NOSUID | _NODEV, "mode=1777")


def _mount_temporary(kept: Iterable[str]) -> None:
    """Cover the folder for temporary files, but for these paths directly inside."""
    opened = {path: os.open(path, os.O_PATH) for path in kept}
    mounts.mount("tmpfs", _temporary(), "tmpfs", _NOSUID | _NODEV, "mode=1777")
    for path, fd in opened.items():
        mounts.make_place(path, fd)
        mounts.mount(f"/proc/self/fd/{fd}", path, "", _BIND | _REC)
        os.close(fd)


def _temporary() -> str:
    return os.path.realpath(tempfile.gettempdir())


def _raise_loopback() -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_INTERFACE_FLAGS, struct.pack("16sh22x", b"lo", _IS_UP))


def _be_first(kept: Iterable[str], program: list[str]) -> int:
    """Arrange the rest, start the program, reap orphans, and return the program's exit status. Number 1 does this."""
    kernel.prctl(_SET_PDEATHSIG, signal.SIGKILL)
    _mount_temporary(kept)
    mounts.mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    _mount_shared_memory()
    _raise_loopback()
    os.environ[INSIDE] = "all"
    _become_ordinary()
    worker = subprocess.Popen(program)
    while True:
        pid, status = os.wait()
        if pid == worker.pid:
            worker.returncode = os.waitstatus_to_exitcode(status)
            return worker.returncode


def main() -> None:
    at = sys.argv.index("--")
    kept, program = sys.argv[1:at], sys.argv[at + 1 :]
    # A handler, unlike an ignored signal, does not go over to the program.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)
    try:
        _enter(["mnt", "net", "ipc", "pid"])
    except OSError as error:
        sys.exit(f"{error}")
    first = os.fork()
    status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) if first else _be_first(kept, program)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
