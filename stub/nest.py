"""Starts a stub so that all its processes end with it: in a PID namespace of its own, else as a user of its own.

    python -I -S .../stub/nest.py REPORT_FD LIFE_FD USER PROGRAM ARGUMENT...

    runtime ──▶ this process ──▶ keeper  (number 1 there: when it ends, the kernel ends all others)
       ▲                    └──▶ stub    (PROGRAM)
       └── both are the runtime's own children; this process reports their numbers and ends

The keeper waits for the end of the pipe LIFE_FD, whose other end only the runtime has. So the keeper ends when the runtime closes
the pipe, and when the runtime ends in any way. It has nothing else open, and orphans of the namespace become its children.
The stub is not number 1 itself: the kernel keeps signals from number 1, which would also have to reap orphans.

If the kernel refuses the namespace, this process becomes the program itself. If the program will have a user of its own (USER),
there is a keeper, too, which ends all processes of that user. Without a user ("") there is no keeper, and the report says so.
All of this happens before anything foreign runs, so the runtime believes the report.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import types
from typing import NoReturn

_CLONE_PARENT = 0x8000


def main() -> NoReturn:
    """Read the arguments, start the stub, and end."""
    report_fd, life_fd, user, program = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        sys.argv[4:],
    )
    for fd in (report_fd, life_fd):
        os.set_inheritable(fd, False)
    here = os.path.dirname(os.path.realpath(__file__))
    package = types.ModuleType("moonpool")
    package.__path__ = [os.path.dirname(here)]
    sys.modules["moonpool"] = package
    from moonpool.stub.sandbox import identity, kernel, namespaces

    def begin() -> int:
        """As `os.fork`, for another child of this process's parent."""
        return kernel.call("clone", _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)

    try:
        namespaces.enter_pids()
    except OSError:
        keeper = begin() if user else -1
        if keeper == 0:
            _keep(life_fd)
            identity.become(int(user))
            # The kernel signals all processes of the user at once, while none can fork. There may be none.
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            os._exit(0)
        os.write(report_fd, b"user %d" % keeper)
        os.execve(program[0], program, os.environ)
    keeper = begin()
    if keeper == 0:
        identity.forbid_looking_inside()
        _keep(life_fd)
        os._exit(0)
    stub = begin()
    if stub == 0:
        os.setsid()
        try:
            os.execve(program[0], program, os.environ)
        finally:
            os._exit(127)
    os.write(report_fd, b"pids %d %d" % (keeper, stub))
    os._exit(0)


def _keep(life_fd: int) -> None:
    """Wait until the runtime closes the pipe, or has ended."""
    os.setsid()
    # So that nobody waits for the end of a pipe that this process still has open. The kernel reaps its children.
    os.closerange(0, life_fd)
    os.closerange(life_fd + 1, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.read(life_fd, 1)


if __name__ == "__main__":
    main()
