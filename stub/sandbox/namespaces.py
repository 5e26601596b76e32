"""Enters new namespaces: a network without interfaces, and private mounts, IPC objects and host name.

Source: `unshare(2)`, `user_namespaces(7)`.
"""

from __future__ import annotations

import os

from moonpool.stub.sandbox import kernel

_FLAGS = {
    "user": 0x10000000,
    "mnt": 0x00020000,
    "net": 0x40000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "cgroup": 0x02000000,
    "pid": 0x20000000,
}


def enter(*, network: bool) -> list[str]:
    """Leave the namespaces of the runtime, and return the names of the new ones. The kernel makes all or none. Raises
    OSError.

    Without root's rights, that takes a user namespace, in which this user keeps its id. With `network`, the process
    stays in the runtime's network.
    """
    names = ["mnt", "ipc", "uts", "cgroup"] if network else ["mnt", "net", "ipc", "uts", "cgroup"]
    if os.geteuid() != 0:
        names.insert(0, "user")
    unshare(names)
    return names


def enter_pids() -> None:
    """Put the processes that this one starts from now on into a PID namespace of their own. Raises OSError.

    The first of them becomes number 1 there. This process can no longer start threads.
    """
    unshare(["pid"] if os.geteuid() == 0 else ["user", "pid"])


def enter_mounts() -> None:
    """Give this process mounts of its own. Raises OSError."""
    unshare(["mnt"])


def unshare(names: list[str]) -> None:
    """Leave the namespaces of these names. In a new one of users, this user keeps its id. Raises OSError."""
    uid, gid = os.geteuid(), os.getegid()
    kernel.call("unshare", sum(_FLAGS[name] for name in names))
    if "user" in names:
        # Without rights over groups, a process may map its group only after it has given up setgroups.
        _write("setgroups", "deny")
        _write("uid_map", f"{uid} {uid} 1")
        _write("gid_map", f"{gid} {gid} 1")


def _write(name: str, line: str) -> None:
    fd = os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)
