"""Limits the resources that the kernel counts for one process: `setrlimit(2)`."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Sequence

from moonpool.stub.sandbox.outcome import SandboxRefused

_LIMITS = {
    "memory_bytes": resource.RLIMIT_AS,
    "data_bytes": resource.RLIMIT_DATA,
    "open_files": resource.RLIMIT_NOFILE,
    "file_bytes": resource.RLIMIT_FSIZE,
}
_PENDING_SIGNALS = 1024
_LOCKED_BYTES = 8 << 20
# The kernel takes one change every tenth of a second from all ordinary users together, so many that start at once do
# without.
_WEIGHING_S, _AGAIN_S = 0.3, 0.02
# Message queues, which outlive a process, and priorities over all other processes.
_NEVER = (resource.RLIMIT_MSGQUEUE, resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE)


def set_limits(limits: dict[str, int]) -> None:
    """Set the given limits, unless the process has tighter ones. Raises `SandboxRefused`.

    Leaves `tasks` to `limit_tasks`.
    """
    for name, which in _LIMITS.items():
        if name in limits:
            _limit(which, limits[name], name)


def forbid_core_dumps() -> None:
    """Forbid core dumps, which would write tensors to a disk when the process crashes."""
    _limit(resource.RLIMIT_CORE, 0, "core dumps")


def forbid_what_outlives() -> None:
    for which in _NEVER:
        _limit(which, 0, "message queues and priorities")


def limit_what_is_shared() -> None:
    """Limit resources that the kernel counts for all processes of the user, and locked memory, so that others have some
    left.
    """
    # The kernel counts timers as pending signals.
    _limit(resource.RLIMIT_SIGPENDING, _PENDING_SIGNALS, "pending signals")
    _limit(resource.RLIMIT_MEMLOCK, _LOCKED_BYTES, "locked memory")


def limit_tasks(tasks: int) -> None:
    """Limit the processes and threads of this user in this user namespace. The kernel does not count root's."""
    _limit(resource.RLIMIT_NPROC, tasks, "tasks")


def _limit(which: int, value: int, name: str) -> None:
    try:
        _, hard = resource.getrlimit(which)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(which, (value, value))
    except (OSError, ValueError, OverflowError) as error:
        raise SandboxRefused("limits", f"{name}={value} was refused ({error})", "set another value") from error


def share_processors(cpus: Sequence[int], nice: int) -> None:
    """Run on these processors only, if any are given, and with this niceness. Raises `SandboxRefused`."""
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except (OSError, ValueError, OverflowError) as error:
            raise SandboxRefused(
                "limits",
                f"processors {','.join(map(str, cpus))} were refused ({error})",
                "name processors that this machine has and the runtime may use",
            ) from error
    if nice:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        except OSError as error:
            raise SandboxRefused(
                "limits",
                f"to be as nice as {nice} was refused ({error})",
                "ask for no more than the usual weight of 100, or run the runtime as root",
            ) from error


def weigh_session() -> str:
    """Give the session of this process its niceness, whether that was asked for or inherited. Returns why not, or "".

    Where the kernel shares processors among sessions (`sched_autogroup_enabled`, unless a cgroup has the process), the
    niceness of a process counts within its session only, and a stub has a session of its own.
    """
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    deadline = time.monotonic() + _WEIGHING_S
    while nice:
        try:
            with open("/proc/self/autogroup", "w") as file:
                file.write(str(nice))
            break
        except FileNotFoundError:  # this kernel has no such groups
            break
        except OSError as error:
            if error.errno != errno.EAGAIN or time.monotonic() > deadline:
                return f"niceness {nice} of its session: {error}"
        time.sleep(_AGAIN_S)
    return ""
