"""Guises: who opens what another process made. Each takes from a process a part of what a stub in the sandbox lacks.

A process puts its guise on before it loads the driver, as a stub does. Sources: `unshare(2)`, `mount(2)`,
`user_namespaces(7)`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

SAME, CHILD = "same process", "child"
USER, USER_NAMESPACE = "other user", "own user namespace"
PIDS, PIDS_ALONE = "own PID namespace", "own PID namespace and the old /proc"
MOUNTS, NODES, ALL = "own net and mount namespaces", "own device nodes alone", "all of these"
# With a user of its own and all namespaces; Landlock and the filter of `strict` are the stage `strict`'s.
OTHERS = (CHILD, USER, USER_NAMESPACE, PIDS, PIDS_ALONE, MOUNTS, NODES, ALL)

STRANGER = 60600
_NEW = {"mnt": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000}
_NEW |= {"user": 0x10000000, "pid": 0x20000000, "net": 0x40000000}
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_NO_NEW_PRIVS = 1, 4, 38
_SET_CHILD_SUBREAPER = 36
_CAPSET = {"x86_64": 126, "aarch64": 91}
_SHARED_NODES = ("null", "zero", "random", "urandom", "nvidiactl", "nvidia-uvm")
_libc = ctypes.CDLL(None, use_errno=True)


class Impossible(Exception):
    """This machine does not let a process put on the guise."""


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise Impossible(f"{name}: {errno.errorcode.get(number, number)}")


def _unshare(*names: str) -> None:
    _call("unshare", sum(_NEW[name] for name in names))


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = [each.encode() for each in (source, target, kind)]
    _call("mount", *texts, ctypes.c_ulong(flags), options.encode())


def adopt_orphans(adopts: bool = True, /) -> None:
    """Make this process the parent of those whose own parent, below it, has ended, or no longer."""
    _libc.prctl(_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def die_with(parent: int) -> None:
    """Have this process killed when its parent ends, and at once if that has happened. A change of user undoes it."""
    _libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent of the first process of a PID namespace has no number there.
    if os.getppid() not in (parent, 0):
        os._exit(1)


def _become_a_stranger() -> None:
    if os.geteuid():
        raise Impossible("it takes root")
    os.setgroups([])
    os.setresgid(STRANGER, STRANGER, STRANGER)
    os.setresuid(STRANGER, STRANGER, STRANGER)


def _enter_a_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _unshare("user")
    for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path(f"/proc/self/{name}").write_text(line)


def _enter_a_pid_namespace(*, sees_itself: bool) -> None:
    """Go on as the first process of a namespace. The one that was called waits for it, and ends as it does.

    In the old `/proc`, threads have other numbers than those by which the process names them.
    """
    _unshare("pid")
    pid = os.fork()
    if pid:
        # Who talks with the process has to see its end.
        os.closerange(3, 1 << 16)
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    if sees_itself:
        _enter_mounts()
        _mount("proc", "/proc", "proc", 0)


def _enter_mounts(*others: str) -> None:
    _unshare("mnt", *others)
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)


def _keep_own_nodes(nodes: Sequence[str]) -> None:
    """Leave the driver's node and those of its own card in `/dev`, and what every program needs."""
    kept = {}
    for name in (*_SHARED_NODES, *nodes):
        if os.path.exists(f"/dev/{name}"):
            kept[name] = os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC)
    _mount("tmpfs", "/dev", "tmpfs", 0, "mode=0755")
    for name, fd in kept.items():
        Path(f"/dev/{name}").touch()
        _mount(f"/proc/self/fd/{fd}", f"/dev/{name}", "", _MS_BIND)
        os.close(fd)


def _see_alone(nodes: Sequence[str]) -> None:
    _enter_mounts()
    _keep_own_nodes(nodes)


def _give_up_rights() -> None:
    _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    number = _CAPSET.get(os.uname().machine)
    if number is not None:
        header, nothing = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", 0, 0, 0, 0, 0, 0)
        _call("syscall", ctypes.c_long(number), header, nothing)
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def _put_on_all(nodes: Sequence[str]) -> None:
    _enter_mounts("net", "ipc", "uts", "cgroup")
    _keep_own_nodes(nodes)
    _become_a_stranger()
    _give_up_rights()


def put_on(guise: str, nodes: Sequence[str], parent: int) -> None:
    """Put a guise on. `nodes` are the names of the device nodes of its own card. Raises `Impossible`."""
    wear: dict[str, Callable[[], None]] = {
        CHILD: lambda: None,
        USER: _become_a_stranger,
        USER_NAMESPACE: _enter_a_user_namespace,
        PIDS: lambda: _enter_a_pid_namespace(sees_itself=True),
        PIDS_ALONE: lambda: _enter_a_pid_namespace(sees_itself=False),
        MOUNTS: lambda: _enter_mounts("net"),
        NODES: lambda: _see_alone(nodes),
        ALL: lambda: _put_on_all(nodes),
    }
    die_with(parent)
    try:
        wear[guise]()
    except OSError as error:
        raise Impossible(str(error)) from error
    die_with(parent)
