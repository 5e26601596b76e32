"""Starts a stub so that all its processes end with it: in its own PID namespace, or else under its own user.

    python -I -S .../stub/programs/process_tree.py REPORT_FD LIFE_FD USER PROGRAM ARGUMENT...

    runtime ──▶ this process ──▶ keeper  (number 1 of the namespace: when it ends, the kernel ends all others)
       ▲                    └──▶ stub    (PROGRAM)
       └── both are the runtime's own children; this process reports their numbers and ends

The keeper waits for the end of file on the pipe LIFE_FD. Only the runtime holds the other end. So the keeper ends when
the runtime closes the pipe, and when the runtime ends in any way. The keeper has nothing else open. Orphans of the
namespace become its children. The stub itself is not number 1: the kernel withholds signals from number 1, and number 1
must reap orphans.

The stub and all that it starts have a /proc of that namespace, if the kernel allows it: other processes are not there,
and its own have the numbers there by which they know themselves.

If the kernel refuses the namespace, this process executes the program itself. If the program gets its own user (USER),
there is a keeper, too, which ends all processes of that user. Without a user ("") there is no keeper, and the report
says so. All of this happens before foreign code runs, so the runtime can trust the report.
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
    report_fd, life_fd, user, program = (int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    for fd in (report_fd, life_fd):
        os.set_inheritable(fd, False)
    folder = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    package = types.ModuleType("moonpool")
    package.__path__ = [os.path.dirname(folder)]
    sys.modules["moonpool"] = package
    from moonpool.ipc import signals
    from moonpool.stub.sandbox import identity, kernel, mounts, namespaces

    signals.use_defaults()

    def begin() -> int:
        """Fork like `os.fork`, but make the child a child of this process's parent."""
        return kernel.call("clone", _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)

    try:
        namespaces.enter_pids()
    except OSError:
        keeper = begin() if user else -1
        if keeper == 0:
            _keep(life_fd)
            identity.become(int(user))
            # The kernel signals all processes of the user in one step, in which none can fork. It may find no process.
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
            with contextlib.suppress(OSError):
                mounts.show_own_processes()
            os.execve(program[0], program, os.environ)
        finally:
            os._exit(127)
    os.write(report_fd, b"pids %d %d" % (keeper, stub))
    os._exit(0)


def _keep(life_fd: int) -> None:
    """Wait until the runtime closes the pipe or ends."""
    os.setsid()
    # A reader would wait for the end of a pipe as long as this process held its other end. The kernel reaps the
    # children.
    os.closerange(0, life_fd)
    os.closerange(life_fd + 1, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.read(life_fd, 1)


if __name__ == "__main__":
    main()
