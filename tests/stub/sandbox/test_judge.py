"""The verdicts on acts of a model, without a sandbox: what is refused, and by which name and text it is counted."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from moonpool.ipc.denials import BIND, CONNECT, EXEC, FORK, KILL, OPEN, RESOLVE, SOCKET, TCP, WRITE
from moonpool.ipc.policy import Policy
from moonpool.stub.sandbox.judge import Judge

FREE = None


def verdict(event: str, *args: object, **granted: Any) -> object:
    return Judge(Policy(**granted), ["landlock", "seccomp"]).events[event](args)


BOTH = {"syscalls": ["fork", "execve"]}


@pytest.mark.parametrize(
    ("event", "args", "granted", "expected"),
    [
        ("os.fork", (), {}, (FORK, "")),
        ("os.fork", (), {"syscalls": ["fork"]}, FREE),
        ("subprocess.Popen", ("ls",), {}, (EXEC, "ls")),
        ("subprocess.Popen", ("ls",), {"syscalls": ["fork"]}, (EXEC, "ls")),
        ("os.posix_spawn", ("ls",), {"syscalls": ["execve"]}, (EXEC, "ls")),
        ("os.system", ("ls",), BOTH, FREE),
        ("os.exec", ("ls",), {}, (EXEC, "ls")),
        ("os.exec", ("ls",), {"syscalls": ["execve"]}, FREE),
        ("os.kill", (os.getpid(), 9), {}, FREE),
        ("os.kill", (-1, 9), {}, (KILL, "-1")),
        ("os.killpg", (5, 9), {}, (KILL, "-5")),
        ("socket.__new__", (None, socket.AF_INET, socket.SOCK_STREAM, 0), {}, (SOCKET, TCP)),
        ("socket.__new__", (None, socket.AF_INET, socket.SOCK_STREAM, 0), {"ports": [443]}, FREE),
        ("socket.__new__", (None, socket.AF_INET, socket.SOCK_DGRAM, 0), {},
         (SOCKET, "family 2, type 2, protocol 0")),
        ("socket.connect", (None, ("10.0.0.1", 443)), {}, (CONNECT, "10.0.0.1:443")),
        ("socket.connect", (None, ("10.0.0.1", 443)), {"ports": [443]}, FREE),
        ("socket.connect", (None, ("10.0.0.1", 80)), {"ports": [443]}, (CONNECT, "10.0.0.1:80")),
        ("socket.bind", (None, ("", 80)), {"ports": [443]}, (BIND, "('', 80)")),
        ("socket.getaddrinfo", ("a.b", 443), {}, (RESOLVE, "a.b:443")),
        ("socket.getaddrinfo", ("a.b", "443"), {}, (RESOLVE, "a.b:443")),
        ("socket.gethostbyname", ("a.b",), {}, (RESOLVE, "a.b")),
        ("socket.gethostbyname", ("10.0.0.1",), {}, FREE),
    ],
)  # fmt: skip
def test_calls_are_judged_by_what_was_granted(
    event: str, args: tuple[Any, ...], granted: dict[str, Any], expected: object
) -> None:
    assert verdict(event, *args, **granted) == expected


def test_a_socket_of_an_existing_descriptor_is_not_refused() -> None:
    # As in the constructor of Python's class, which calls what the event is of.
    def made(fileno: int | None) -> object:
        args = (None, socket.AF_UNIX, socket.SOCK_DGRAM, 0)
        return Judge(Policy(), ["seccomp"]).events["socket.__new__"](args) and (fileno, "refused")

    assert made(3) is FREE
    assert made(None) == (None, "refused")


def test_files_are_judged_by_what_was_granted(tmp_path: Path) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    for path in (file, other):
        path.touch()

    def opens(mode: str | None, flags: int, **granted: Any) -> object:
        return verdict("open", str(file), mode, flags, **granted)

    written = os.O_WRONLY | os.O_CREAT
    assert opens("r", os.O_RDONLY) == (OPEN, str(file))
    for mode, flags in (("w", written), ("r+", os.O_RDWR), ("a", 0), (None, os.O_WRONLY)):
        assert opens(mode, flags) == (WRITE, str(file))
    # A file that is not there cannot be read. It could be made.
    missing = str(tmp_path / "missing")
    assert verdict("open", missing, "r", os.O_RDONLY) is FREE
    assert verdict("open", missing, None, os.O_CREAT) == (WRITE, missing)
    assert verdict("open", missing, "w", 0) == (WRITE, missing)
    assert verdict("open", missing, "r+", os.O_RDWR) is FREE
    for event, args in (
        ("os.mkdir", (missing, 0o777, -1)),
        ("os.rename", (str(file), missing, -1, -1)),
        ("os.link", (str(file), missing, -1, -1)),
        ("os.symlink", (str(file), missing, -1)),
    ):
        granted: dict[str, Any] = {"granted": [(str(file), True)]}
        assert verdict(event, *args, **granted) == (WRITE, missing)
        assert verdict(event, *args, scratch=str(tmp_path)) is FREE
    for writes in (False, True):
        granted = {"granted": [(str(file), writes)]}
        assert opens("r", os.O_RDONLY, **granted) is FREE
        assert opens("w", written, **granted) == (FREE if writes else (WRITE, str(file)))
        assert verdict("open", str(other), "r", 0, **granted) == (OPEN, str(other))
    assert verdict("os.listdir", str(tmp_path)) == (OPEN, str(tmp_path))
    assert verdict("os.rmdir", str(tmp_path), -1) == (WRITE, str(tmp_path))
    scratch = {"scratch": str(tmp_path)}
    assert opens("w", written, **scratch) is FREE
    assert verdict("os.remove", str(file), -1, **scratch) is FREE
    assert verdict("os.remove", str(file), -1) == (WRITE, str(file))
