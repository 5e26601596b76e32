"""Archives of other programs, and archives that grow without end: their contents, and their cost."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.runtime.repository.unpacking import unpack

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.repository import archive as environment_archive

LONG = "/".join(["d" * 60] * 5)
# Each name has its contents, and each link its target.
FILES = {
    "bin/tool": b"#!/bin/sh\n",
    "lib/empty": b"",
    "lib/block": bytes(range(256)) * 2,
    f"{LONG}/deep": b"deep",
    "lib/naïve \N{SNOWMAN}.py": b"x = 1\n" * 300_000,
}
LINKS = {"bin/python": "/usr/bin/python3", "lib/other": "empty", f"{LONG}/link": "deep"}


def add_to(tar: tarfile.TarFile) -> None:
    for name, content in FILES.items():
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(content), 0o755 if name.startswith("bin") else 0o644
        # Only a PAX header can hold such a time.
        info.mtime = 1234567890.5
        tar.addfile(info, io.BytesIO(content))
    for name, target in LINKS.items():
        link = tarfile.TarInfo(name)
        link.type, link.linkname = tarfile.SYMTYPE, target
        tar.addfile(link)
    hard = tarfile.TarInfo("lib/hard")
    hard.type, hard.linkname = tarfile.LNKTYPE, "lib/block"
    tar.addfile(hard)
    folder = tarfile.TarInfo("share")
    folder.type = tarfile.DIRTYPE
    tar.addfile(folder)


def tar_of(kind: int, mode: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode, format=kind) as tar:  # type: ignore[call-overload]
        add_to(tar)
    return stream.getvalue()


def zip_of(method: int) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as packed:
        for name, content in FILES.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o100755 if name.startswith("bin") else 0o100644) << 16
            with packed.open(info, "w", force_zip64=name == "lib/block") as file:
                file.write(content)
        for name, target in LINKS.items():
            link = zipfile.ZipInfo(name)
            link.external_attr = 0o120777 << 16
            packed.writestr(link, target)
        packed.writestr("lib/hard", FILES["lib/block"])
        packed.writestr("share/", "")
    return stream.getvalue()


def of_gnu_tar(form: str) -> Callable[[Path], bytes]:
    def make(folder: Path) -> bytes:
        source = folder / "source"
        source.mkdir()
        unpack(io.BytesIO(tar_of(tarfile.PAX_FORMAT, "w")), source)
        subprocess.run(["tar", f"--format={form}", "-cf", folder / "packed.tar", "-C", source, "."], check=True)
        return (folder / "packed.tar").read_bytes()

    return make


@pytest.mark.promise("Environments", "Archives that venv-pack, conda-pack, GNU tar, …")
@pytest.mark.parametrize(
    "make",
    [
        *(lambda _, k=kind, m=mode: tar_of(k, m)
          for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT) for mode in ("w", "w:gz", "w:bz2", "w:xz")),
        lambda _: lzma.compress(tar_of(tarfile.GNU_FORMAT, "w")[:5120])
        + lzma.compress(tar_of(tarfile.GNU_FORMAT, "w")[5120:]) + bytes(8),
        of_gnu_tar("gnu"), of_gnu_tar("posix"), of_gnu_tar("oldgnu"),
        lambda _: zip_of(zipfile.ZIP_STORED), lambda _: zip_of(zipfile.ZIP_DEFLATED),
    ],
)  # fmt: skip
def test_archives_of_other_programs_are_unpacked(tmp_path: Path, make: Callable[[Path], bytes]) -> None:
    target = tmp_path / "target"
    target.mkdir()
    packed = make(tmp_path)

    unpack(io.BytesIO(packed), target)

    found = {path.relative_to(target).as_posix(): path for path in target.rglob("*")}
    for name, content in FILES.items():
        assert found[name].read_bytes() == content
    for name, link in LINKS.items():
        assert os.readlink(found[name]) == link
    assert found["lib/hard"].read_bytes() == FILES["lib/block"]
    assert os.access(found["bin/tool"], os.X_OK)
    assert not found["lib/block"].stat().st_mode & 0o111
    assert found["share"].is_dir()


MEASURE = """
import io, resource, sys
from pathlib import Path
from moonpool.runtime.repository.archive import unpack
from moonpool.runtime.errors import BadEnvironment
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    with open(sys.argv[1], "rb") as archive:
        unpack(archive, Path(sys.argv[2]))
    print("unpacked")
except BadEnvironment as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def header(kind: bytes, size: int, name: str = "x") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def record(key: bytes, value: bytes) -> bytes:
    length = len(key) + len(value) + 3
    while len(b"%d" % length) + len(key) + len(value) + 3 != length:
        length = len(b"%d" % length) + len(key) + len(value) + 3
    return b"%d %s=%s\n" % (length, key, value)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def pax(data: bytes) -> bytes:
    return header(tarfile.XHDTYPE, len(data)) + padded(data)


def pax_headers(file: io.BufferedIOBase) -> None:
    """Write 300 files with a megabyte of useless headers each: too much for a reader that keeps headers."""
    comment = pax(record(b"comment", bytes(1_000_000)))
    file.writelines(comment + header(tarfile.REGTYPE, 0, f"f{number}") for number in range(300))


def many_records(file: io.BufferedIOBase) -> None:
    """Write global headers of a hundred thousand short records, which a simple reader keeps and copies for each
    member.
    """
    data = b"".join(record(b"k%d" % number, b"") for number in range(80_000))[: 1 << 20]
    data = data[: data.rindex(b"\n") + 1]
    for number in range(20):
        file.write(header(tarfile.XGLTYPE, len(data)) + padded(data))
        file.write(header(tarfile.REGTYPE, 0, f"f{number}"))


def sparse_map(file: io.BufferedIOBase) -> None:
    entries = b"%d\n" % 3_000_000 + b"0\n0\n" * 3_000_000
    sparse = record(b"GNU.sparse.major", b"1") + record(b"GNU.sparse.minor", b"0")
    sparse += record(b"GNU.sparse.name", b"s") + record(b"GNU.sparse.realsize", b"0")
    file.write(pax(sparse) + header(tarfile.REGTYPE, len(padded(entries))) + padded(entries))


def sparse_map_without_end(file: io.BufferedIOBase) -> None:
    """Write a map in GNU's own form, each block of which says that another one follows."""
    block = bytearray(header(b"S", 0))
    block[482] = 1
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    file.write(block)
    span = b"00000077777\0" * 2
    file.writelines(span * 21 + b"\1" + bytes(7) for _ in range(300_000))


def sparse_maps(file: io.BufferedIOBase) -> None:
    """Write five files without content, each with a long map."""
    entries = b"%d\n" % 262_000 + b"0\n0\n" * 262_000
    sparse = record(b"GNU.sparse.major", b"1") + record(b"GNU.sparse.minor", b"0")
    for number in range(5):
        name = record(b"GNU.sparse.name", b"s%d" % number)
        file.write(pax(sparse + name) + header(tarfile.REGTYPE, len(padded(entries))))
        file.write(padded(entries))


def long_names(file: io.BufferedIOBase) -> None:
    """Write names of four thousand bytes, all of them different."""
    for number in range(20_000):
        name = b"/".join([b"n" * 250] * 13 + [b"%0200d" % number])
        file.write(header(b"L", len(name) + 1) + padded(name + b"\0"))
        file.write(header(tarfile.REGTYPE, 0))


def huge_zip_directory(file: io.BufferedIOBase) -> None:
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", *[0] * 6, 0, 0, 0, 60_000, 0, 0, 0, 0, 0, 0)
    entry += b"n" * 60_000
    file.writelines(entry for _ in range(2000))
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2000, 2000, len(entry) * 2000, 0, 0)
    file.write(end)


@pytest.mark.promise("Environments", "The memory, disk and time that an …")
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (pax_headers, "unpacked"),
        (many_records, "unpacked"),
        (sparse_map, "unpacked"),
        (sparse_map_without_end, "needs more than 512 MiB of memory"),
        (sparse_maps, "unpacked"),
        (long_names, "the names in the archive have more than"),
        (huge_zip_directory, "or a damaged one"),
    ],
)
def test_the_memory_for_an_archive_is_limited(
    tmp_path: Path, make: Callable[[io.BufferedIOBase], None], what: str
) -> None:
    """Unpack in a process of its own, whose memory is measured, and that of the process that it reads with."""
    packed = tmp_path / "bomb"
    is_zip = make is huge_zip_directory
    with packed.open("wb") if is_zip else gzip.open(packed, "wb", compresslevel=1) as file:
        if is_zip:
            file.write(b"PK\3\4")
        make(file)
    (tmp_path / "target").mkdir()

    ended = subprocess.run(
        [sys.executable, "-c", MEASURE, str(packed), str(tmp_path / "target")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )

    said, more_kib, reader_kib = ended.stdout.strip().rsplit("\n", 2)
    assert what in said
    assert int(more_kib) < 150 << 10
    assert int(reader_kib) < 512 << 10


def xz_with_a_dictionary_of_gibibytes() -> bytes:
    packed = bytearray(lzma.compress(b"x", lzma.FORMAT_XZ, lzma.CHECK_NONE, preset=0))
    size = (packed[12] + 1) * 4
    # The properties of the one filter: 37 means 1.5 GiB.
    packed[16] = 37
    packed[12 + size - 4 : 12 + size] = zlib.crc32(packed[12 : 12 + size - 4]).to_bytes(4, "little")
    return bytes(packed)


@pytest.mark.promise("Environments", "The memory, disk and time that an …")
def test_memory_for_decompression_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(BadEnvironment, match="needs more than 512 MiB of memory to be unpacked"):
        unpack(io.BytesIO(xz_with_a_dictionary_of_gibibytes()), tmp_path)


@pytest.mark.promise("Environments", "The memory, disk and time that an …")
def test_a_little_archive_has_no_room_for_endless_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_archive, "_ALWAYS_BYTES", 1 << 20)
    packed = io.BytesIO(gzip.compress(header(tarfile.REGTYPE, 64 << 20) + bytes(64 << 20)))

    with pytest.raises(BadEnvironment, match="holds more than the limit of"):
        unpack(packed, tmp_path)

    assert (tmp_path / "x").stat().st_size < 10 << 20


def test_a_zip_that_says_it_has_too_many_members_is_refused_at_once(tmp_path: Path) -> None:
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1 << 40, 1 << 40, 46 << 40, 0)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, 4, 1)

    with pytest.raises(BadEnvironment, match="or a damaged one"):
        unpack(io.BytesIO(b"PK\3\4" + end64 + locator + end), tmp_path)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: data.replace(b"hello", b"hallo"), "Bad CRC-32"),
        (lambda data: data[:40], "File is not a zip file"),
        (lambda data: data.replace(b"PK\1\2", b"PK\1\3"), "Bad magic number for central"),
        (lambda data: data[:4] + b"\xff" * 26 + data[30:], "or a damaged one"),
        (lambda data: data.replace(b"PK\3\4", b"PK\3\5"), "Bad magic number for file header"),
    ],
)
def test_a_damaged_zip_is_refused(tmp_path: Path, change: Callable[[bytes], bytes], what: str) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed:
        packed.writestr("f", b"hello")

    with pytest.raises(BadEnvironment, match=what):
        unpack(io.BytesIO(change(stream.getvalue())), tmp_path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_that_is_packed_in_a_rare_way_is_unpacked(tmp_path: Path, method: int) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as packed:
        packed.writestr("f", b"hello" * 99)

    unpack(stream, tmp_path)

    assert (tmp_path / "f").read_bytes() == b"hello" * 99


@pytest.mark.parametrize(
    ("place", "value", "what"),
    [(10, 9, "is compressed by method 9; pack the environment with deflate"), (8, 1, "encrypted")],
)
def test_a_zip_that_cannot_be_read_says_what_to_do(tmp_path: Path, place: int, value: int, what: str) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed:
        packed.writestr("f", b"hello")
    data = bytearray(stream.getvalue())
    # In the directory, and in the header of the file.
    for at in (data.index(b"PK\1\2") + place, place - 2):
        data[at] = value

    with pytest.raises(BadEnvironment, match=what):
        unpack(io.BytesIO(bytes(data)), tmp_path)


def test_a_damaged_header_is_not_the_end_of_the_archive(tmp_path: Path) -> None:
    first = header(tarfile.REGTYPE, 1, "first") + padded(b"x")
    second = header(tarfile.REGTYPE, 1, "second") + padded(b"x")

    with pytest.raises(BadEnvironment, match="bad checksum"):
        unpack(io.BytesIO(first + second.replace(b"second", b"2econd") + bytes(1024)), tmp_path)


def sparse(stored: bytes, numbers: list[int], whole: int) -> io.BytesIO:
    """Make a tar of one file with holes, which has these spans."""
    lines = b"".join(b"%d\n" % number for number in [len(numbers) // 2, *numbers])
    said = [(b"major", b"1"), (b"minor", b"0"), (b"name", b"s"), (b"realsize", b"%d" % whole)]
    headers = pax(b"".join(record(b"GNU.sparse." + key, value) for key, value in said))
    content = padded(lines) + stored
    return io.BytesIO(headers + header(tarfile.REGTYPE, len(content)) + padded(content))


def test_a_sparse_file_is_written_with_its_holes(tmp_path: Path) -> None:
    unpack(sparse(b"abcd", [2, 3, 7, 1], 10), tmp_path)

    assert (tmp_path / "s").read_bytes() == b"\0\0abc\0\0d\0\0"


@pytest.mark.parametrize(
    ("numbers", "whole"),
    [
        ([2, 3, 4, 1], 10),  # spans overlap
        ([7, 1, 2, 3], 10),  # and go back
        ([2, 3, 7, 1], 7),  # and lie beyond the end
    ],
)
def test_a_map_that_lies_is_refused(tmp_path: Path, numbers: list[int], whole: int) -> None:
    with pytest.raises(BadEnvironment, match="invalid map of a sparse file"):
        unpack(sparse(b"abcd", numbers, whole), tmp_path)


def test_holes_count_as_what_they_take(tmp_path: Path) -> None:
    with pytest.raises(BadEnvironment, match="holds more than the limit of"):
        unpack(sparse(b"", [], 1 << 50), tmp_path, size_limit_bytes=1 << 20)

    assert (tmp_path / "s").stat().st_size <= 1 << 20


def test_content_of_a_sparse_file_is_not_read_by_the_member_after_it(tmp_path: Path) -> None:
    first = sparse(b"abcd", [2, 3, 7, 1], 10).getvalue()

    unpack(io.BytesIO(first + header(tarfile.REGTYPE, 1, "after") + padded(b"x")), tmp_path)

    assert (tmp_path / "after").read_bytes() == b"x"
