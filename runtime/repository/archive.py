"""Unpacks a packed environment into an empty directory, and writes nothing outside of it.

Two processes do it. A confined one (`stub/programs/archive.py`) reads the archive with Python's own libraries, and
sends its members through a pipe. This one believes nothing of it. Every member is checked before it is written: no
absolute paths, no `..`, nothing but directories, regular files and links, no member below a link. Nothing is ever
written through a link, so the target of a link cannot move a write. Targets are checked all the same, so that no
environment reaches out of itself by accident.

A member may come twice, as packers write it (venv-pack writes `pyvenv.cfg` twice), if it does not change the kind of
its name: a file replaces a file, a directory or a link comes again as it was. A file is replaced by a new one under its
name and never written into, as it may have other names by hard links, which keep the old content.

A few bytes of an archive can ask for endless memory, disk or time, in a header, in a dictionary size, in zeros that
compress a thousand times. The kernel limits the memory and the time of the process that reads. Here the members, the
bytes of their names and the bytes on the disk are counted, and each has a limit.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import select
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import IO

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.process.child import SpawnedProcess, exit_in_words
from moonpool.runtime.process.files import parsed_json
from moonpool.runtime.process.spawner import spawn
from moonpool.runtime.process.terminal import harmless

SIZE_LIMIT_BYTES = 64 << 30
MEMBER_LIMIT = 500_000
# The names of members and of the directories above them. All of them are kept until the end.
NAMES_LIMIT_BYTES = 64 << 20
# The address space of the process that reads. The libraries keep the directory of a zip, and xz -9 needs 65 MiB.
MEMORY_BYTES = 512 << 20
# The processor's time and the time of a clock that it may take. Large environments come from slow disks.
MOST_S = 3600
# An archive may unpack to so many times its own size, and any archive to so many bytes.
_MOST_TIMES = 100
_ALWAYS_BYTES = 1 << 30
# Functions that remove directories recurse.
_DEPTH_LIMIT = 128
# The limits of Linux. Errors quote names, so an archive must not choose how long these are.
_NAME_LIMIT, _STEP_LIMIT = 4096, 255
_READER = str(Path(__file__).resolve().parents[2] / "stub" / "programs" / "archive.py")
_MESSAGE = struct.Struct("<cI")
_LARGEST_MESSAGE = 1 << 20
_BUFFER_BYTES = 1 << 20
_SHOWN = 500
# The interval in which a load that waits for the process looks whether it is wanted still.
_LOOK_S = 0.1
_END_S = 5.0

# In a virtual environment this link leads to the interpreter that made it, by an absolute path.
_INTERPRETER = re.compile(r"(?:[^/]+/)?bin/python[0-9.]*")


@dataclass(frozen=True, slots=True)
class Member:
    """An entry of an archive. `kind` is "directory", "file", "symlink", "hardlink" or a word for a kind that is
    refused.
    """

    name: str
    kind: str
    mode: int = 0o755
    link: str = ""


class Unpacker:
    """Writes members below a directory that is empty at the start."""

    def __init__(self, target: Path, size_limit_bytes: int = SIZE_LIMIT_BYTES) -> None:
        self._target = target
        self._left_bytes = size_limit_bytes
        self._limit_bytes = size_limit_bytes
        self._kinds: dict[str, str] = {"": "directory"}
        self._names_left_bytes = NAMES_LIMIT_BYTES
        self._count = 0

    def add(self, member: Member, content: Iterable[bytes]) -> None:
        """Write one member. Raises `BadEnvironment` for one that is not allowed."""
        self._count += 1
        name = self._checked_name(member)
        if not name:
            return
        path = self._target / name
        if member.kind == "directory":
            path.mkdir(exist_ok=True)
        elif member.kind == "file":
            self._remove_known(name)
            self._write(path, member.mode, content)
        elif member.kind == "symlink":
            self._link(name, member)
        elif member.kind == "hardlink":
            file = self._target / self._linked_file(name, member)
            self._remove_known(name)
            path.hardlink_to(file)
        else:
            raise BadEnvironment(f"'{member.name}' is a {member.kind}, not a file, directory or link")
        self._note(name, _kept_kind(member))

    def _remove_known(self, name: str) -> None:
        """Remove a file of this archive that another one replaces.

        A name that exists but is not known stays: the file system takes two names for one, and creating the file fails.
        """
        if name in self._kinds:
            (self._target / name).unlink()

    def _note(self, name: str, kind: str) -> None:
        self._names_left_bytes -= len(name)
        if self._names_left_bytes < 0:
            raise BadEnvironment(f"the names in the archive have more than {NAMES_LIMIT_BYTES:,} bytes")
        self._kinds[name] = kind

    def _checked_name(self, member: Member) -> str:
        name = _relative(member.name)
        known = self._kinds.get(name, kind := _kept_kind(member))
        if known != kind:
            both = f"as a {known} and as a {member.kind}"
            raise BadEnvironment(f"'{member.name}' is in the archive twice, {both}")
        if max(self._count, len(self._kinds)) > MEMBER_LIMIT:
            raise BadEnvironment(f"the archive has more than {MEMBER_LIMIT} members")
        self._make_parents(posixpath.dirname(name), member.name)
        return name

    def _make_parents(self, parent: str, shown: str) -> None:
        missing = []
        while parent not in self._kinds:
            missing.append(parent)
            parent = posixpath.dirname(parent)
        if self._kinds[parent] != "directory":
            raise BadEnvironment(f"'{shown}' is below '{parent}', a {self._kinds[parent]}")
        for directory in reversed(missing):
            (self._target / directory).mkdir()
            self._note(directory, "directory")

    def _write(self, path: Path, mode: int, content: Iterable[bytes]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        # Never set-uid or writable by others, always readable and writable by the owner.
        descriptor = os.open(path, flags, (mode & 0o755) | 0o600)
        with open(descriptor, "wb", 0) as stream:
            for chunk in content:
                self._left_bytes -= len(chunk)
                if self._left_bytes < 0:
                    limit = f"{self._limit_bytes:,} bytes"
                    raise BadEnvironment(f"the archive holds more than the limit of {limit}")
                stream.write(chunk)

    def _link(self, name: str, member: Member) -> None:
        self._check_link(name, member)
        path = self._target / name
        if name not in self._kinds:
            path.symlink_to(member.link)
        elif os.readlink(path) != member.link:
            raise BadEnvironment(f"'{member.name}' is in the archive twice, as different links")

    def _check_link(self, name: str, member: Member) -> None:
        if _INTERPRETER.fullmatch(name):
            return
        link = f"'{member.name}' links to '{member.link}'"
        if member.link.startswith("/"):
            raise BadEnvironment(f"Path is absolute: {link}")
        reached = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.link))
        if not member.link or reached == ".." or reached.startswith("../"):
            raise BadEnvironment(f"Path contains '..' and leaves the environment: {link}")

    def _linked_file(self, name: str, member: Member) -> str:
        target = _relative(member.link)
        if self._kinds.get(target) != "file" or target == name:
            link = f"'{member.name}' links to '{member.link}'"
            raise BadEnvironment(f"{link}, which is not a file that came before it")
        return target


def unpack(
    archive: IO[bytes], target: Path, size_limit_bytes: int = SIZE_LIMIT_BYTES, stop: Event | None = None
) -> None:
    """Unpack a tar (plain, gz, bz2 or xz) or zip file into an empty directory.

    Raises `BadEnvironment` without the archive's path, which the caller adds, also soon after `stop` is set, and
    `OSError` from the disk. The caller removes what was unpacked until then.
    """
    packed_bytes = archive.seek(0, os.SEEK_END)
    archive.seek(0)
    # Environments compress to a tenth of their size, not to a thousandth.
    most_bytes = max(_ALWAYS_BYTES, packed_bytes * _MOST_TIMES)
    unpacker = Unpacker(target, min(size_limit_bytes, most_bytes))
    with _reading(archive) as (process, pipe):
        try:
            write_members(pipe, unpacker, stop or Event())
        except EOFError:
            code = process.wait(_END_S)
            how = "closed its pipe" if code is None else exit_in_words(code)
            raise BadEnvironment(f"the process that reads it ended too early ({how})") from None


def write_members(pipe: int, unpacker: Unpacker, stop: Event) -> None:
    """Write the members that come through a pipe. Raises EOFError if it ends before the last one, `BadEnvironment` and
    OSError.
    """
    messages = _Messages(pipe, stop)
    try:
        for member in messages.members():
            unpacker.add(member, messages.content())
    except ValueError as error:  # names that no file can have, among others
        raise BadEnvironment(f"has a member that cannot be written ({error})") from error


@contextlib.contextmanager
def _reading(archive: IO[bytes]) -> Iterator[tuple[SpawnedProcess, int]]:
    """Start the process that reads an archive, and end it after the block. Yields it, and the pipe from it."""
    pipe, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            numbers = (archive.fileno(), theirs, os.getpid(), MEMORY_BYTES, MOST_S)
            with open(os.devnull, "wb") as nowhere:
                started = spawn(
                    [sys.executable, "-I", "-S", _READER, *map(str, numbers)],
                    environment={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                    folder="/",
                    output_fd=nowhere.fileno(),
                    fds=numbers[:2],
                )
        finally:
            os.close(theirs)
        process = SpawnedProcess(started)
        try:
            yield process, pipe
        finally:
            process.kill()
            process.wait(_END_S)
            process.close()
    finally:
        os.close(pipe)


class _Pipe(io.RawIOBase):
    """A pipe whose reader gives up when it is stopped, or after `MOST_S`."""

    def __init__(self, fd: int, stop: Event) -> None:
        self._fd = fd
        self._stop = stop
        self._end_s = time.monotonic() + MOST_S
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._poll.poll(_LOOK_S * 1000):
            if time.monotonic() > self._end_s:
                raise BadEnvironment(f"cannot be unpacked in {MOST_S} s")
            if self._stop.is_set():
                raise BadEnvironment("it was not unpacked, as the load was given up")
        return os.readv(self._fd, [buffer])


class _Messages:
    """The messages of the process. Raises EOFError if it ends without the last one, and ValueError."""

    def __init__(self, fd: int, stop: Event) -> None:
        self._stream = io.BufferedReader(_Pipe(fd, stop), _BUFFER_BYTES)
        self._next: tuple[bytes, bytes] | None = None

    def members(self) -> Iterator[Member]:
        """Yield each member. Its content has been read when the next one is asked for."""
        while (message := self._taken())[0] == b"m":
            fields = parsed_json(message[1])
            if not isinstance(fields, list) or [*map(type, fields)] != [str, str, int, str]:
                raise ValueError("it is none")
            yield Member(*fields)
        if message[0] == b"e":
            raise BadEnvironment(harmless(message[1].decode(errors="replace"))[:_SHOWN])
        if message[0] != b".":
            raise ValueError("it is none")

    def content(self) -> Iterator[bytes]:
        """Yield the content of the member that came last."""
        while (message := self._taken())[0] == b"d":
            yield message[1]
        self._next = message

    def _taken(self) -> tuple[bytes, bytes]:
        if (message := self._next) is not None:
            self._next = None
            return message
        kind, size = _MESSAGE.unpack(self._exactly(_MESSAGE.size))
        if size > _LARGEST_MESSAGE:
            raise ValueError("a message that is too long")
        return kind, self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) < size:
            raise EOFError
        return data


def _kept_kind(member: Member) -> str:
    """Return the kind of entry that a member makes on the disk. A hard link is a file like any other."""
    return "file" if member.kind == "hardlink" else member.kind


def _relative(name: str) -> str:
    """Return a member's name without `.` steps; "" is the root of the archive."""
    if len(name) > _NAME_LIMIT or any(len(step) > _STEP_LIMIT for step in name.split("/")):
        raise BadEnvironment(f"'{name[:60]}...' is longer than file systems allow")
    if name.startswith("/"):
        raise BadEnvironment(f"Path is absolute: '{name}'")
    steps = [step for step in name.split("/") if step not in ("", ".")]
    if ".." in steps:
        raise BadEnvironment(f"Path contains '..': '{name}'")
    if len(steps) > _DEPTH_LIMIT:
        raise BadEnvironment(f"'{name[:60]}...' lies deeper than {_DEPTH_LIMIT} directories")
    if "\0" in name:
        raise BadEnvironment(f"Path contains a NUL byte: {name!r}")
    return "/".join(steps)
