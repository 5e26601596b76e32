"""Reads an archive in a process that may do nothing else, and writes its members to a pipe.

    python -I -S .../stub/programs/archive.py ARCHIVE_FD PIPE_FD PARENT_PID MEMORY_BYTES CPU_S

The libraries that read archives trust them with memory and time, and decompressors are written in C. So this process
takes all rights from itself before it reads the first byte: it opens no file, has no network, starts nothing, and ends
at its limits of memory and time. The runtime (`runtime/repository/archive.py`) believes nothing that comes through the
pipe: it checks each member, counts the bytes, and writes the files.

A message is a letter, the length of what follows, and that: `m` and a member as JSON (name, kind, mode, link), then its
content as any number of `d`; at the end one `.`, or `e` and the text of an error.
"""

from __future__ import annotations

# Also what the libraries import later: the process opens no file then.
import bz2  # noqa: F401
import encodings.cp437  # noqa: F401
import gzip  # noqa: F401
import json
import lzma  # noqa: F401
import os
import resource
import stat
import struct
import sys
import tarfile
import types
import zipfile
from collections.abc import Iterator
from typing import IO, Any, Optional

_MESSAGE = struct.Struct("<cI")
_CHUNK_BYTES = 1 << 18
_MOST_LINK_BYTES = 4096
_ENCRYPTED, _UTF_8, _UNIX = 1, 1 << 11, 3
_MIB = 1 << 20
# A member, and its content if it is a file.
_Member = tuple[tuple[str, str, int, str], Optional[IO[bytes]]]


class _Refused(Exception):
    """The archive is readable, and yet nothing that is unpacked here."""


def main() -> None:
    """Confine this process, then read the archive that the arguments name."""
    archive_fd, pipe_fd, parent_pid, memory_bytes, cpu_s = map(int, sys.argv[1:])
    with open(pipe_fd, "wb", _MIB) as pipe:
        try:
            _confine(parent_pid, memory_bytes, cpu_s)
            with open(archive_fd, "rb") as archive:
                for member, content in _members(archive):
                    _send(pipe, b"m", json.dumps(member).encode())
                    while content is not None and (chunk := content.read(_CHUNK_BYTES)):
                        _send(pipe, b"d", chunk)
            _send(pipe, b".")
        except BrokenPipeError:
            os._exit(1)
        except BaseException as error:
            _send(pipe, b"e", _in_words(error, memory_bytes).encode(errors="replace"))


def _confine(parent_pid: int, memory_bytes: int, cpu_s: int) -> None:
    stub = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    package = types.ModuleType("moonpool")
    package.__path__ = [os.path.dirname(stub)]
    sys.modules["moonpool"] = package
    from moonpool.ipc.policy import BEST_EFFORT, Policy
    from moonpool.stub.sandbox import layers
    from moonpool.stub.sandbox.identity import die_with
    from moonpool.stub.sandbox.outcome import SandboxRefused

    die_with(parent_pid)
    # At the second limit it gets a signal that says less.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    limits = {"memory_bytes": memory_bytes, "file_bytes": 0, "tasks": 1}
    try:
        layers.apply(Policy(level=BEST_EFFORT, limits=limits))
    except SandboxRefused as refused:
        raise _Refused(f"cannot be read, as nothing confines the process that would: {refused}") from refused


def _send(pipe: IO[bytes], kind: bytes, data: bytes = b"") -> None:
    pipe.write(_MESSAGE.pack(kind, len(data)))
    pipe.write(data)


def _in_words(error: BaseException, memory_bytes: int) -> str:
    if isinstance(error, _Refused):
        return str(error)
    if isinstance(error, MemoryError):
        return (
            f"needs more than {memory_bytes // _MIB} MiB of memory to be unpacked; pack it with smaller headers and a"
            " smaller dictionary, as xz -9 has"
        )
    if isinstance(error, RecursionError):
        return "has more extended headers than any real archive"
    words = " ".join(str(error).split()) or type(error).__name__
    return f"is not a .tar, .tar.gz, .tar.bz2, .tar.xz or .zip file, or a damaged one ({words})"


# Formats that packers write and that are not read here, by their first bytes.
_UNREAD = ((b"\x28\xb5\x2f\xfd", "zstd"), (b"hsqs", "SquashFS"))


def _members(archive: IO[bytes]) -> Iterator[_Member]:
    start = archive.read(4)
    archive.seek(0)
    for magic, form in _UNREAD:
        if start.startswith(magic):
            raise _Refused(f"is packed with {form}, which cannot be read; pack it as .tar.gz")
    return _of_zip(archive) if start.startswith(b"PK") else _of_tar(archive)


class _Header(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            # `tarfile` takes a damaged header for the end, unless it is the first one.
            if any(buf):
                raise tarfile.ReadError(str(error)) from None
            raise


def _of_tar(archive: IO[bytes]) -> Iterator[_Member]:
    # The types of `tarfile` name neither its list of members nor the maps of sparse files.
    tar: Any
    with tarfile.open(fileobj=archive, mode="r:*", tarinfo=_Header, encoding="utf-8") as tar:
        while (info := tar.next()) is not None:
            # It would keep all of them.
            tar.members.clear()
            if info.issparse():
                # GNU tar fills the map in a header with empty parts.
                info.sparse = [span for span in info.sparse if span[1]]
                _check_map(info.sparse, info.size)
            content = tar.extractfile(info) if info.isfile() else None
            yield (info.name, _kind_of(info), info.mode, info.linkname), content


def _kind_of(info: tarfile.TarInfo) -> str:
    kinds = {
        "file": info.isfile(),
        "directory": info.isdir(),
        "symlink": info.issym(),
        "hardlink": info.islnk(),
        "device": info.isdev(),
    }
    return next((kind for kind, is_it in kinds.items() if is_it), "special file")


def _check_map(spans: list[tuple[int, int]], size_bytes: int) -> None:
    """Raise ValueError unless the parts of a sparse file that hold data follow one another, and lie in it."""
    end = 0
    for start, size in spans:
        if start < end or size < 0:
            raise ValueError("invalid map of a sparse file")
        end = start + size
    if end > size_bytes:
        raise ValueError("invalid map of a sparse file")


def _of_zip(archive: IO[bytes]) -> Iterator[_Member]:
    with zipfile.ZipFile(archive) as packed:
        for info in packed.infolist():
            name = _name_of(info)
            if name.endswith("/"):
                yield (name, "directory", 0, ""), None
                continue
            if info.flag_bits & _ENCRYPTED:
                raise _Refused(f"'{name[:200]}' is encrypted")
            try:
                content = packed.open(info)
            except NotImplementedError:
                what = f"'{name[:200]}' is compressed by method {info.compress_type}"
                raise _Refused(f"{what}; pack the environment with deflate, as zip does by default") from None
            mode = info.external_attr >> 16
            with content:
                if stat.S_ISLNK(mode):
                    if info.file_size > _MOST_LINK_BYTES:
                        raise _Refused(f"'{name[:200]}' is a link that is too long")
                    yield (name, "symlink", 0, os.fsdecode(content.read())), None
                elif stat.S_IFMT(mode) in (0, stat.S_IFREG):
                    # Archives from systems without modes have none.
                    yield (name, "file", mode & 0o777 or 0o644, ""), content
                else:
                    yield (name, "special file", 0, ""), None


def _name_of(info: zipfile.ZipInfo) -> str:
    # Info-ZIP on Unix writes the bytes of names as they are, and does not mark them as UTF-8.
    if info.create_system == _UNIX and not info.flag_bits & _UTF_8:
        return info.filename.encode("cp437").decode("utf-8", "surrogateescape")
    return info.filename


if __name__ == "__main__":
    main()
