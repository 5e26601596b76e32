"""Puts one layer of the sandbox on its own process, and then tries the acts that the layer has to prevent.

    python -I -S .../stub/sandbox/trial.py LAYER POLICY

Prints one JSON object: `on`, the layer as a stub would name it, or "" if it is not on; `detail`, its parts;
`why` it is not on, with the advice. Then the process waits until its input ends, so that it can be inspected.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
import types
from typing import Callable


def _make_importable() -> None:
    """Make moonpool importable without what lies beside it, as a stub has it."""
    package = types.ModuleType("moonpool")
    here = os.path.dirname(os.path.realpath(__file__))
    package.__path__ = [os.path.dirname(os.path.dirname(here))]
    sys.modules["moonpool"] = package


if __name__ == "__main__":
    _make_importable()

from moonpool.ipc import signals, syscalls  # noqa: E402
from moonpool.ipc.policy import Policy  # noqa: E402
from moonpool.stub.sandbox import granted, identity, landlock, limits, mounts, namespaces, rules, seccomp  # noqa: E402
from moonpool.stub.sandbox.outcome import SandboxRefused  # noqa: E402

_PATIENCE_S = 10
# It is on every system, and all users who could start this may read it.
_FOREIGN_FILE = os.path.realpath(__file__)
_LOOPBACK = "127.0.0.1"


class NotThere(Exception):
    """The layer is not on, or does not hold. The text says why, and what to do."""


def _dies_with_runtime(_: Policy) -> tuple[str, str]:
    """Check that a grandchild lives until its parent ends, and no longer."""

    held_fd, holder_fd = os.pipe()
    parent = os.fork()
    if parent == 0:
        ready_fd, told_fd = os.pipe()
        me = os.getpid()
        if os.fork() == 0:
            identity.die_with(me)
            os.write(told_fd, b"!")
            signal.pause()
        os.read(ready_fd, 1)
        os._exit(0)
    os.close(holder_fd)
    os.waitpid(parent, 0)
    # The grandchild has the other end until its own end.
    signal.alarm(_PATIENCE_S)
    os.read(held_fd, 1)
    signal.alarm(0)
    return "dies_with_runtime", "a process is killed when the one that started it ends"


def _limits(policy: Policy) -> tuple[str, str]:
    limits.set_limits(policy.limits)
    limits.forbid_core_dumps()
    limits.forbid_what_outlives()
    opened: list[int] = []

    def open_too_many() -> None:
        while len(opened) <= policy.limits["open_files"]:
            opened.append(os.open(os.devnull, os.O_RDONLY))

    _is_refused("to open more files than allowed", open_too_many, errno.EMFILE)
    for fd in opened:
        os.close(fd)
    size_bytes = policy.limits["memory_bytes"]
    try:
        bytearray(size_bytes)
    except MemoryError:
        pass
    else:
        raise NotThere("it is on, but does not hold: there was more memory than allowed")
    return "limits", "memory, open files, sizes of files, core dumps"


def _namespaces(_: Policy) -> tuple[str, str]:
    with _listener((_LOOPBACK, 0)) as server:
        address = server.getsockname()
        try:
            names = namespaces.enter(network=False)
        except OSError as error:
            raise NotThere(_no_namespaces(error)) from error
        _is_refused("to reach a port of this machine", lambda: _connect(address))
    return f"namespaces:{'+'.join(names)}", ", ".join(names)


def _no_namespaces(error: OSError) -> str:
    if os.geteuid() == 0:
        advice = "give the container CAP_SYS_ADMIN"
    else:
        advice = (
            "allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone or "
            "kernel.apparmor_restrict_unprivileged_userns; in a container its seccomp profile)"
        )
    return f"unshare was refused ({error.strerror}); {advice}"


def _own_user(policy: Policy) -> tuple[str, str]:
    user = policy.user
    if user is None:
        raise NotThere(
            "only root can give each instance a user of its own, of those that its user namespace maps; run "
            "the runtime as root"
        )
    try:
        identity.become(user)
    except OSError as error:
        raise NotThere(
            f"to become user {user} was refused ({error.strerror}); give the container CAP_SETUID and "
            "CAP_SETGID and map that user"
        ) from error
    ids = {*os.getresuid(), *os.getresgid(), *os.getgroups()}
    if ids != {user}:
        raise NotThere(f"it is on, but the process has the users and groups {sorted(ids)}")
    _is_refused("to become root again", lambda: os.setuid(0), errno.EPERM)
    return "own_user", f"user {user} here, another one for each instance"


def _no_capabilities(_: Policy) -> tuple[str, str]:
    if os.geteuid() == 0:
        identity.drop_bounding_set()
    identity.drop_capabilities()
    _is_refused("to change the root folder", lambda: os.chroot("/"), errno.EPERM)
    return "no_capabilities", "none, and no way to any"


def _no_new_privs(_: Policy) -> tuple[str, str]:
    return "no_new_privs", "programs with the set-user-ID bit give nothing"


def _not_dumpable(_: Policy) -> tuple[str, str]:
    identity.forbid_looking_inside()
    # The files of such a process in /proc belong to root, so other users cannot look into it.
    owner = os.stat("/proc/self/mem").st_uid
    if owner != 0:
        raise NotThere(f"it is on, but /proc/self/mem belongs to user {owner} still")
    return "not_dumpable", "no process of the same user looks into its memory"


def _landlock(_: Policy) -> tuple[str, str]:
    abi = landlock.abi()
    if abi == 0:
        raise NotThere(
            "this kernel has no Landlock; use Linux 5.13 or newer with CONFIG_SECURITY_LANDLOCK and "
            "landlock in the list of lsm=, in a container whose seccomp profile allows it"
        )
    keeps = ["files"]
    with _listener((_LOOPBACK, 0)) as server, _listener("", socket.AF_UNIX) as nameless:
        address, abstract = server.getsockname(), nameless.getsockname()
        landlock.restrict(abi, [], [])
        _is_refused("to read a foreign file", lambda: open(_FOREIGN_FILE).close(), errno.EACCES)
        if abi >= landlock.KNOWS_PORTS:
            _is_refused("to connect", lambda: _connect(address), errno.EACCES)
            keeps.append("TCP ports")
        if abi >= landlock.KNOWS_SCOPES:
            _is_refused("to signal others", lambda: os.kill(os.getppid(), 0), errno.EPERM)
            _is_refused("to reach an abstract socket", lambda: _connect(abstract), errno.EPERM)
            keeps += ["signals", "abstract sockets"]
        if abi > landlock.NEWEST:
            keeps.append(f"nothing that is newer than version {landlock.NEWEST}")
    return f"landlock:{abi}", f"version {abi}: {', '.join(keeps)}"


def _seccomp(_: Policy) -> tuple[str, str]:
    allowed = rules.allowed(pid=os.getpid())
    program = seccomp.program(syscalls.this_machine(), allowed, rules.KILLED, rules.ABSENT)
    try:
        seccomp.install(program)
    except OSError as error:
        raise NotThere(
            f"this kernel takes no filter for system calls ({error.strerror}); use one with "
            "CONFIG_SECCOMP_FILTER, in a container whose seccomp profile allows it"
        ) from error
    _is_refused("to make a socket", socket.socket, errno.EPERM)
    _is_refused("to fork", os.fork, errno.EPERM)
    return "seccomp", f"{len(allowed)} system calls are allowed"


def _granted_folders(policy: Policy) -> tuple[str, str]:
    """Check a granted folder that belongs to the runtime's user and is closed to all others."""

    with contextlib.suppress(OSError):
        namespaces.enter(network=False)
    (folder,) = granted.opened(policy.granted, policy.user)
    with contextlib.suppress(OSError):
        mounts.rearrange(policy, policy.user, [folder])
    owner = os.stat(folder.path).st_uid
    if policy.user is None:
        folder.check()
        return granted.LAYER, f"each instance is the runtime's user, {owner}"
    identity.become(policy.user)
    if not folder.is_lent:
        cure = granted.command_to_share("FOLDER")
        raise NotThere(f"{folder.why_not}; give folders to write to to a user that instances share: {cure}")
    folder.check()
    with open(f"{folder.path}/file", "x", encoding="ascii"):
        pass
    where = os.path.dirname(folder.path)
    return (granted.LAYER, f"an instance writes to a folder as its owner, on the file system of {where}")


_TRIALS: dict[str, Callable[[Policy], tuple[str, str]]] = {
    "dies_with_runtime": _dies_with_runtime,
    "limits": _limits,
    "namespaces": _namespaces,
    "own_user": _own_user,
    "no_capabilities": _no_capabilities,
    "no_new_privs": _no_new_privs,
    "not_dumpable": _not_dumpable,
    "landlock": _landlock,
    "seccomp": _seccomp,
    "granted_folders": _granted_folders,
}


def _is_refused(what: str, attempt: Callable[[], object], *reasons: int) -> None:
    """Raise `NotThere` unless the kernel refuses the attempt, with one of these error numbers if any are given."""
    try:
        attempt()
    except OSError as error:
        if reasons and error.errno not in reasons:
            raise NotThere(f"it is on, but {what} failed for another reason ({error})") from error
    else:
        raise NotThere(f"it is on, but does not hold: {what} was possible")


def _listener(address: tuple[str, int] | str, family: int = socket.AF_INET) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    server.bind(address)
    server.listen()
    return server


def _connect(address: tuple[str, int] | str) -> None:
    family = socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(_PATIENCE_S)
        client.connect(address)


def main() -> None:
    """Put on the layer that the arguments name, print the outcome, and wait."""
    signals.use_defaults()
    layer, policy = sys.argv[1], Policy.from_json(sys.argv[2])
    on = detail = why = ""
    try:
        # Other layers need it, and none of the acts below fails because of it.
        identity.forbid_new_privileges()
        on, detail = _TRIALS[layer](policy)
    except (NotThere, SandboxRefused) as error:
        why = str(error)
    except OSError as error:
        why = f"the kernel refused it ({error})"
    sys.stdout.write(json.dumps({"on": on, "detail": detail, "why": why}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
