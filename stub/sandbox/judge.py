"""Decides if the sandbox is going to refuse an act of Python code, from the rules by which the sandbox was made.

An audit event comes before the act and does not say how it ended. So the decision uses the same tables as the layers:
the paths of the policy and of `landlock.py`, the table of `rules.py`, and the ports. It also looks at the file system,
to leave out acts that fail for another reason: a missing file is no refusal. Below a folder that is covered
(`mounts.py`) every file looks missing, so each attempt to open one there counts as refused.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Iterable, Mapping
from types import FrameType
from typing import Any, Callable, Optional

from moonpool.ipc.denials import BIND, CONNECT, EXEC, FORK, KILL, OPEN, RESOLVE, SOCKET, TCP, UNIX, WRITE
from moonpool.ipc.policy import Policy
from moonpool.stub.sandbox import mounts, rules
from moonpool.stub.sandbox.landlock import USE_DEVICE, WRITE_FILE, usual_files
from moonpool.stub.sandbox.rules import Alternatives

# Kind and text of a refused act; None if it is not refused.
Verdict = Optional[tuple[int, str]]

_O_PATH = getattr(os, "O_PATH", 0)
_CREATES = os.O_CREAT
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_SIGCHLD = 17
_WORD = 0xFFFFFFFF
# Folders of code, of which thousands of files are opened. No link in them leads to a place where a model may not read.
_CODE = ("/usr", "/lib", "/lib64", "/bin", "/sbin")


class Judge:
    """Decides about acts. Looks at files and changes nothing. Any thread may call any method."""

    def __init__(self, policy: Policy, layers: Collection[str]) -> None:
        """`layers` are the names of the layers that are on."""
        names = {layer.partition(":")[0] for layer in layers}
        self.events: dict[str, Callable[[Any], Verdict]] = {}
        usual = usual_files(network=bool(policy.ports), gpu=bool(policy.devices))
        usual += [(path, USE_DEVICE) for path in policy.devices]
        own = [policy.scratch] if policy.scratch else []
        if mounts.LAYER in names:
            own.append(mounts.SHARED_MEMORY)
        granted = [path for path, _ in policy.granted]
        writable = [*own, *(path for path, writes in policy.granted if writes)]
        writable += [path for path, rights in usual if rights & WRITE_FILE]
        readable = [*policy.read, *granted, *writable, *(path for path, _ in usual)]
        self._read, self._write = _Paths(readable), _Paths(writable)
        roots = {*_CODE, *map(os.path.realpath, (sys.prefix, sys.base_prefix))}
        code = [path for path in policy.read if path in roots]
        self._code = tuple(f"{path}/" for path in code)
        self._own = (f"{policy.scratch}/",) if policy.scratch else ()
        self._calls: Mapping[str, Alternatives] = {}
        self._ports = frozenset(policy.ports)
        # The calls that the model was granted.
        self.syscalls = tuple(policy.syscalls)
        self._hidden: tuple[str, ...] = ()
        if "namespaces" in names and policy.user is not None:
            found = mounts.covers([*policy.read, *granted, *own])
            self._hidden = tuple(f"{path}/" for path in found)
        if "landlock" in names:
            self.events.update(self._of_files())
        if "seccomp" in names:
            self._calls = rules.allowed(
                pid=os.getpid(),
                ports=bool(policy.ports),
                granted=policy.syscalls,
                gpu=bool(policy.devices),
                forks=policy.forks,
            )
            self.events.update(self._of_calls())

    def _of_files(self) -> dict[str, Callable[[Any], Verdict]]:
        return {
            "open": self._opens,
            "os.listdir": lambda args: self.reads(args[0]),
            "os.scandir": lambda args: self.reads(args[0]),
            "ctypes.dlopen": self._loads,
            "os.mkdir": lambda args: self._makes(args[0], args[2]),
            "os.remove": lambda args: self._changes(args[0], args[1]),
            "os.rmdir": lambda args: self._changes(args[0], args[1]),
            "os.truncate": lambda args: self._changes(args[0], -1),
            "os.rename": lambda args: self._changes(args[0], args[2]) or self._makes(args[1], args[3]),
            "os.link": lambda args: self._makes(args[1], args[3]),
            "os.symlink": lambda args: self._makes(args[1], args[2]),
        }

    def _of_calls(self) -> dict[str, Callable[[Any], Verdict]]:
        return {
            "socket.__new__": self._makes_socket,
            "socket.connect": self._connects,
            "socket.bind": self._binds,
            "socket.getaddrinfo": lambda args: self._resolves(args[0], args[1]),
            "socket.gethostbyname": lambda args: self._resolves(args[0], None),
            "os.fork": self._forks,
            "os.forkpty": self._forks,
            "subprocess.Popen": lambda args: self._starts(args[0]),
            "os.posix_spawn": lambda args: self._starts(args[0]),
            "os.system": lambda args: self._starts(args[0]),
            "os.exec": lambda args: self._becomes(args[0]),
            "os.kill": lambda args: self._kills(args[0]),
            "os.killpg": lambda args: self._kills(-args[0]),
        }

    # Files

    def _opens(self, args: tuple[Any, ...]) -> Verdict:
        path, mode, flags = args
        if type(path) is str and "/../" not in path:
            is_read = not flags & _WRITES and not (mode and mode[0] != "r")
            if path.startswith(self._own) or (is_read and path.startswith(self._code)):
                return None
        if flags & _O_PATH:  # Landlock lets it pass
            return None
        # Functions that open files by libc give a mode and no flags.
        if flags & _WRITES or (mode and ("+" in mode or mode[0] in "wax")):
            return self.writes(path, creates=bool(flags & _CREATES) or bool(mode and mode[0] in "wax"))
        return self.reads(path)

    def _loads(self, args: tuple[Any, ...]) -> Verdict:
        path = args[0]
        # A name without a slash is looked up in many places.
        return self.reads(path) if isinstance(path, str) and "/" in path else None

    def reads(self, path: object) -> Verdict:
        """The verdict on reading a file or listing a folder."""
        real = _real(path)
        if real is None or real in self._read:
            return None
        return (OPEN, real) if _is_there(real) or real.startswith(self._hidden) else None

    def writes(self, path: object, *, creates: bool) -> Verdict:
        """The verdict on writing to a file, which need not exist if the act `creates` it."""
        real = _real(path)
        if real is None or real in self._write:
            return None
        is_possible = _is_there(real) or real.startswith(self._hidden) or (creates and _is_there(os.path.dirname(real)))
        return (WRITE, real) if is_possible else None

    def _changes(self, path: object, folder_fd: int) -> Verdict:
        """The verdict on removing or changing an existing file."""
        return self.writes(path, creates=False) if folder_fd == -1 else None

    def _makes(self, path: object, folder_fd: int) -> Verdict:
        """The verdict on making a new name. If the name exists, the act fails for that reason."""
        if folder_fd != -1:
            return None
        verdict = self.writes(path, creates=True)
        return None if verdict is not None and _is_there(verdict[1]) else verdict

    # Calls

    def _permits(self, name: str, *arguments: int) -> bool:
        alternatives = self._calls.get(name)
        if not alternatives:
            return alternatives is not None
        return any(
            all((arguments[place] & mask) in values for place, mask, values in conditions if place < len(arguments))
            for conditions in alternatives
        )

    def _makes_socket(self, args: tuple[Any, ...]) -> Verdict:
        _, family, kind, protocol = args
        if family == -1 or _wraps_descriptor():
            return None
        if self._permits("socket", family & _WORD, kind & _WORD, protocol & _WORD):
            return None
        is_internet = family in (socket.AF_INET, socket.AF_INET6)
        if is_internet and kind & 0xF == socket.SOCK_STREAM and protocol in (0, 6):
            return SOCKET, TCP
        if family == socket.AF_UNIX and kind & 0xF in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
            return SOCKET, UNIX
        return SOCKET, f"family {int(family)}, type {int(kind)}, protocol {int(protocol)}"

    def _connects(self, args: tuple[Any, ...]) -> Verdict:
        address = args[1]
        if not isinstance(address, tuple) or len(address) < 2:
            return None if self._permits("connect") else (CONNECT, _text(address))
        if self._permits("connect") and address[1] in self._ports:
            return None
        return CONNECT, f"{_text(address[0])}:{address[1]}"

    def _binds(self, args: tuple[Any, ...]) -> Verdict:
        return None if self._permits("bind") else (BIND, _text(args[1]))

    def _resolves(self, host: object, port: object) -> Verdict:
        """The verdict on finding the address of a name, which needs the network. Numeric addresses do not."""
        name = _text(host) if host else ""
        if self._ports or not name or _is_number(name):
            return None
        try:
            port = socket.getservbyname(port) if isinstance(port, str) and not port.isdigit() else port
        except OSError:
            port = None
        return RESOLVE, f"{name}:{port}" if port else name

    def _forks(self, _: object) -> Verdict:
        return None if self._permits("clone", _SIGCHLD) else (FORK, "")

    def _starts(self, program: object) -> Verdict:
        is_possible = self._permits("clone", _SIGCHLD) and self._permits("execve")
        return None if is_possible else (EXEC, _text(program))

    def _becomes(self, program: object) -> Verdict:
        return None if self._permits("execve") else (EXEC, _text(program))

    def _kills(self, pid: int) -> Verdict:
        return None if self._permits("kill", pid & _WORD) else (KILL, str(pid))


class _Paths:
    """Paths, each with everything below it. Their links are followed at the first question, which most models never
    lead to: there are some fifty.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = tuple(paths)
        self._real: tuple[set[str], tuple[str, ...]] | None = None

    def __contains__(self, path: str) -> bool:
        if self._real is None:
            real = {os.path.realpath(each) for each in self._paths}
            self._real = real, tuple(f"{each.rstrip('/')}/" for each in real)
        exactly, below = self._real
        return path in exactly or path.startswith(below)


def _real(path: object) -> str | None:
    """Return the path without links; None for a descriptor, or the working directory."""
    if path is None or isinstance(path, int):
        return None
    return os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]


def _is_there(path: str) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # behind a closed folder: refused all the same
        return True
    return True


def _text(value: object) -> str:
    if isinstance(value, (bytes, os.PathLike)):
        value = os.fsdecode(value)
    return value if isinstance(value, str) else repr(value)


def _is_number(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return True
    return False


def _wraps_descriptor() -> bool:
    """Tell if the new socket object is for an existing descriptor, as each socket of a pair is.

    The event does not say so, but the caller's frame, a method of Python's class, has the argument.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("moonpool.stub.sandbox"):
        frame = frame.f_back
    return frame is not None and frame.f_locals.get("fileno") is not None
