"""Archives that mean harm: refused, and nothing written outside of where they are unpacked."""

from __future__ import annotations

import io
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from moonpool.runtime import environment_archive
from moonpool.runtime.environment_archive import unpack
from moonpool.runtime.environment_error import BadEnvironment


def tar_of(*members: tarfile.TarInfo | tuple[str, bytes]) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for member in members:
            if isinstance(member, tuple):
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
            else:
                tar.addfile(member)
    return stream


def entry(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


class Pieces(io.BytesIO):
    """Knows the largest piece that was read of it."""

    largest = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.largest = max(self.largest, len(data))
        return data


class TestHostileArchives:
    @pytest.mark.parametrize(
        ("archive", "what"),
        [
            (lambda: tar_of(("../x", b"")), r"Path contains '\.\.': '\.\./x'"),
            (lambda: tar_of(("a/../../x", b"")), r"Path contains '\.\.'"),
            (lambda: tar_of(("/etc/x", b"")), "Path is absolute: '/etc/x'"),
            (lambda: tar_of(entry("l", tarfile.SYMTYPE, "/etc")), "Path is absolute: 'l' links"),
            (lambda: tar_of(entry("a/l", tarfile.SYMTYPE, "../../x")), r"Path contains '\.\.' and"),
            (lambda: tar_of(entry("l", tarfile.SYMTYPE, "..")), r"Path contains '\.\.' and"),
            (lambda: tar_of(entry("h", tarfile.LNKTYPE, "/etc/passwd")), "Path is absolute"),
            (lambda: tar_of(entry("h", tarfile.LNKTYPE, "../x")), r"Path contains '\.\.'"),
            (lambda: tar_of(entry("h", tarfile.LNKTYPE, "later")), "is no file that came before it"),
            (lambda: tar_of(entry("l", tarfile.SYMTYPE, "a"), entry("h", tarfile.LNKTYPE, "l")),
             "is no file that came before it"),
            (lambda: tar_of(entry("l", tarfile.SYMTYPE, "."), ("l/x", b"")), "is below 'l', a symlink"),
            (lambda: tar_of(("f", b""), ("f/x", b"")), "is below 'f', a file"),
            (lambda: tar_of(entry("bin/python", tarfile.SYMTYPE, "/etc"), ("bin/python/x", b"")),
             "is below 'bin/python', a symlink"),
            (lambda: tar_of(entry("bin/python", tarfile.SYMTYPE, "/x"), ("bin/./python", b"")),
             "is in the archive twice"),
            (lambda: tar_of(("f", b""), ("f", b"")), "'f' is in the archive twice"),
            (lambda: tar_of(entry("d", tarfile.CHRTYPE)), "'d' is a device, not a file"),
            (lambda: tar_of(entry("d", tarfile.BLKTYPE)), "'d' is a device"),
            (lambda: tar_of(entry("d", tarfile.FIFOTYPE)), "'d' is a device"),
            (lambda: io.BytesIO(b"no archive at all"), "is not a .tar, .tar.gz"),
            (lambda: io.BytesIO(b""), "is not a .tar, .tar.gz"),
            (lambda: io.BytesIO(b"\x1f\x8bno gzip"), "is not a .tar, .tar.gz"),
            (lambda: io.BytesIO(b"BZh9no bzip2"), "is not a .tar, .tar.gz"),
            (lambda: io.BytesIO(b"\xfd7zXZ\0no xz"), "is not a .tar, .tar.gz"),
            (lambda: io.BytesIO(b"PK\3\4no zip"), "is not a .tar, .tar.gz"),
            (lambda: io.BytesIO(tar_of(("f", b"x" * 9999)).getvalue()[:2000]), "or a damaged one"),
        ],
    )  # fmt: skip
    def test_it_is_refused_and_nothing_is_written_outside(
        self, tmp_path: Path, archive: Callable[[], io.BytesIO], what: str
    ) -> None:
        target = tmp_path / "in" / "target"
        target.mkdir(parents=True)

        with pytest.raises(BadEnvironment, match=what):
            unpack(archive(), target)

        assert os.listdir(tmp_path) == ["in"]
        assert os.listdir(tmp_path / "in") == ["target"]

    def test_more_than_the_limit_is_not_written(self, tmp_path: Path) -> None:
        with pytest.raises(BadEnvironment, match="holds more than the limit of 3,000,000 bytes"):
            unpack(tar_of(("f", bytes(4_000_000))), tmp_path, size_limit_bytes=3_000_000)

        assert (tmp_path / "f").stat().st_size <= 3_000_000

    def test_a_header_that_says_it_is_huge_is_not_read(self, tmp_path: Path) -> None:
        header = tarfile.TarInfo("pax")
        header.type, header.size = tarfile.XHDTYPE, 1 << 40
        stream = io.BytesIO(header.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20))

        with pytest.raises(BadEnvironment, match="has a header of a size that no real archive has"):
            unpack(stream, tmp_path)

    def test_too_many_members_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(environment_archive, "MEMBER_LIMIT", 2)

        with pytest.raises(BadEnvironment, match="has more than 2 members"):
            unpack(tar_of(*((f"f{i}", b"") for i in range(5))), tmp_path)

    @pytest.mark.parametrize(
        ("block", "what"),
        [
            (entry("d", tarfile.DIRTYPE), "has more than 2 members"),
            (entry("pax", tarfile.XHDTYPE), "has more extended headers than any real archive"),
            (entry("long", tarfile.GNUTYPE_LONGNAME), "has more extended headers than any"),
        ],
    )
    def test_headers_that_hold_nothing_have_an_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: tarfile.TarInfo, what: str
    ) -> None:
        """Compressed, a billion of them are a small file, and reading them takes hours."""
        monkeypatch.setattr(environment_archive, "MEMBER_LIMIT", 2)

        with pytest.raises(BadEnvironment, match=what):
            unpack(io.BytesIO(block.tobuf(tarfile.GNU_FORMAT) * 5), tmp_path)

    def test_what_follows_a_stream_of_xz_is_not_copied_for_each_that_follows(
        self, tmp_path: Path
    ) -> None:
        packed = Pieces(lzma.compress(b"") * 10_000)

        with pytest.raises(BadEnvironment, match="unexpected end of data"):
            unpack(packed, tmp_path)

        assert packed.largest <= 64 << 10

    def test_a_path_too_deep_to_be_removed_again_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(BadEnvironment, match="lies deeper than 128 directories"):
            unpack(tar_of(("d/" * 5000 + "f", b"")), tmp_path)

        assert os.listdir(tmp_path) == []

    def test_no_program_gets_more_rights_than_it_needs(self, tmp_path: Path) -> None:
        info = entry("suid", tarfile.REGTYPE)
        info.mode = 0o6777

        unpack(tar_of(info), tmp_path)

        assert (tmp_path / "suid").stat().st_mode & 0o7777 == 0o755
