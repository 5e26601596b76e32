"""Namespaces: a network without interfaces, and mounts, IPC objects and a host name of its own.

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
}


def enter(*, network: bool) -> list[str]:
    """Leave the namespaces of the runtime; returns the names of those that are new. Raises OSError.

    Without root's rights that takes a user namespace, in which this user is who it was. `network` says whether
    the network is to stay the runtime's. All happens or nothing.
    """
    uid, gid = os.geteuid(), os.getegid()
    names = ["mnt", "ipc", "uts", "cgroup"] if network else ["mnt", "net", "ipc", "uts", "cgroup"]
    if uid != 0:
        names.insert(0, "user")
    kernel.call("unshare", sum(_FLAGS[name] for name in names))
    if uid != 0:
        # The kernel wants it forbidden before groups are mapped by somebody without rights over them.
        _write("setgroups", "deny")
        _write("uid_map", f"{uid} {uid} 1")
        _write("gid_map", f"{gid} {gid} 1")
    return names


def _write(name: str, line: str) -> None:
    fd = os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)
