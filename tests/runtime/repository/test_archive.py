"""Malicious archives are refused, and nothing is written outside of the directory."""

from __future__ import annotations

import io
import lzma
import os
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.runtime.repository.unpacking import unpack

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.repository import archive as environment_archive


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


def zip_of(*members: tuple[str, int, bytes]) -> io.BytesIO:
    """Make a zip of names with their modes and contents."""
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w") as packed:
        warnings.filterwarnings("ignore", "Duplicate name")
        for name, mode, content in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            packed.writestr(info, content)
    return stream


def entry(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.promise(
    "Environments", "A malicious archive is refused, and nothing is written outside of the environment."
)
@pytest.mark.promise(
    "Environments",
    "The memory, disk and time that an archive takes are bounded, whatever its headers, names, maps, dictionaries and "
    "directories say. It is read in a process that may do nothing else.",
)
@pytest.mark.promise("Environments", "In an archive a later file …")
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
            (lambda: tar_of(entry("h", tarfile.LNKTYPE, "later")), "is not a file that came before it"),
            (lambda: tar_of(entry("l", tarfile.SYMTYPE, "a"), entry("h", tarfile.LNKTYPE, "l")),
             "is not a file that came before it"),
            (lambda: tar_of(entry("l", tarfile.SYMTYPE, "."), ("l/x", b"")), "is below 'l', a symlink"),
            (lambda: tar_of(("f", b""), ("f/x", b"")), "is below 'f', a file"),
            (lambda: tar_of(entry("bin/python", tarfile.SYMTYPE, "/etc"), ("bin/python/x", b"")),
             "is below 'bin/python', a symlink"),
            (lambda: tar_of(entry("bin/python", tarfile.SYMTYPE, "/x"), ("bin/./python", b"")),
             "is in the archive twice"),
            (lambda: tar_of(("f", b""), entry("f", tarfile.DIRTYPE)), "twice, as a file and as a directory"),
            (lambda: tar_of(("f", b""), entry("f", tarfile.SYMTYPE, "g")), "twice, as a file and as a symlink"),
            (lambda: tar_of(("f", b""), entry("f", tarfile.CHRTYPE)), "twice, as a file and as a device"),
            (lambda: tar_of(("f", b""), ("f", b"new"), ("f/x", b"")), "is below 'f', a file"),
            (lambda: tar_of(entry("d", tarfile.DIRTYPE), ("d", b"")), "twice, as a directory and as a file"),
            (lambda: tar_of(("d/x", b""), ("d", b"")), "twice, as a directory and as a file"),
            (lambda: tar_of(("d/x", b""), entry("d", tarfile.SYMTYPE, "e")), "twice, as a directory and as a symlink"),
            (lambda: tar_of(("f", b""), ("d/x", b""), entry("d", tarfile.LNKTYPE, "f")),
             "twice, as a directory and as a hardlink"),
            (lambda: tar_of(entry("l", tarfile.SYMTYPE, "f"), ("l", b"")), "twice, as a symlink and as a file"),
            (lambda: tar_of(("f", b""), entry("l", tarfile.SYMTYPE, "f"), entry("l", tarfile.LNKTYPE, "f")),
             "twice, as a symlink and as a hardlink"),
            (lambda: tar_of(entry("l", tarfile.SYMTYPE, "d"), entry("l", tarfile.DIRTYPE), ("l/x", b"")),
             "twice, as a symlink and as a directory"),
            (lambda: tar_of(entry("l", tarfile.SYMTYPE, "a"), entry("l", tarfile.SYMTYPE, "b")),
             "twice, as different links"),
            (lambda: tar_of(entry("l", tarfile.SYMTYPE, "a"), entry("l", tarfile.SYMTYPE, "/etc")),
             "Path is absolute: 'l' links"),
            (lambda: tar_of(entry("l", tarfile.SYMTYPE, "."), entry("l", tarfile.SYMTYPE, "."), ("l/x", b"")),
             "is below 'l', a symlink"),
            (lambda: tar_of(("f", b""), entry("f", tarfile.LNKTYPE, "f")), "is not a file that came before it"),
            (lambda: zip_of(("f", 0o100644, b""), ("f", 0o120777, b"/etc")), "twice, as a file and as a symlink"),
            (lambda: zip_of(("l", 0o120777, b"f"), ("l", 0o100644, b"")), "twice, as a symlink and as a file"),
            (lambda: zip_of(("d/", 0o040755, b""), ("d", 0o120777, b"f")), "twice, as a directory and as a symlink"),
            (lambda: io.BytesIO(b"\x28\xb5\x2f\xfd zstd"), "is packed with zstd, which cannot be read; pack it as"),
            (lambda: io.BytesIO(b"hsqs"), "is packed with SquashFS, which cannot be read"),
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

        with pytest.raises(BadEnvironment, match="needs more than 512 MiB of memory to be unpacked"):
            unpack(stream, tmp_path)

    def test_too_many_members_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        """A billion of these blocks compress to a small file, and reading them takes hours."""
        monkeypatch.setattr(environment_archive, "MEMBER_LIMIT", 2)

        with pytest.raises(BadEnvironment, match=what):
            unpack(io.BytesIO(block.tobuf(tarfile.GNU_FORMAT) * 2000), tmp_path)

    def test_many_streams_of_xz_have_an_end(self, tmp_path: Path) -> None:
        with pytest.raises(BadEnvironment, match="or a damaged one"):
            unpack(io.BytesIO(lzma.compress(b"") * 10_000), tmp_path)

    def test_a_path_too_deep_to_be_removed_again_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(BadEnvironment, match="lies deeper than 128 directories"):
            unpack(tar_of(("d/" * 2000 + "f", b"")), tmp_path)

        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("name", ["d" * 256, "d/" * 2048 + "f"])
    def test_a_name_too_long_for_file_systems_is_refused_in_a_few_words(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(BadEnvironment, match=r"^'.{60}\.\.\.' is longer than file systems allow$"):
            unpack(tar_of((name, b"")), tmp_path)

    def test_no_program_gets_more_rights_than_it_needs(self, tmp_path: Path) -> None:
        info = entry("suid", tarfile.REGTYPE)
        info.mode = 0o6777

        unpack(tar_of(info), tmp_path)

        assert (tmp_path / "suid").stat().st_mode & 0o7777 == 0o755


@pytest.mark.promise(
    "Environments",
    "In an archive a later file replaces an earlier file and changes no other name of it. "
    "Nothing replaces a link or a folder, and no link replaces a file.",
)
class TestMembersThatComeTwice:
    @pytest.mark.parametrize(
        "archive",
        [
            lambda: tar_of(("f", b"old, and longer"), ("d/g", b""), ("./f", b"new")),
            lambda: zip_of(("f", 0o100644, b"old, and longer"), ("f", 0o100644, b"new")),
        ],
    )
    def test_the_later_file_replaces_the_earlier_one(self, tmp_path: Path, archive: Callable[[], io.BytesIO]) -> None:
        unpack(archive(), tmp_path)

        assert (tmp_path / "f").read_bytes() == b"new"

    def test_other_names_of_the_earlier_file_keep_its_content(self, tmp_path: Path) -> None:
        """Writing into a file would change it under another name, too."""
        hard = entry("h", tarfile.LNKTYPE, "f")

        unpack(tar_of(("f", b"old"), hard, ("f", b"new")), tmp_path)

        assert (tmp_path / "h").read_bytes() == b"old"
        assert (tmp_path / "f").read_bytes() == b"new"

    def test_a_name_of_two_is_replaced_alone(self, tmp_path: Path) -> None:
        hard = entry("h", tarfile.LNKTYPE, "f")

        unpack(tar_of(("f", b"old"), hard, ("h", b"new")), tmp_path)

        assert (tmp_path / "f").read_bytes() == b"old"
        assert (tmp_path / "h").read_bytes() == b"new"

    def test_links_and_folders_may_come_again_as_they_were(self, tmp_path: Path) -> None:
        """`tar --append` writes a whole tree again."""
        tree: list[tarfile.TarInfo | tuple[str, bytes]] = [
            entry("d", tarfile.DIRTYPE),
            ("d/f", b"content"),
            entry("d/h", tarfile.LNKTYPE, "d/f"),
            entry("l", tarfile.SYMTYPE, "d/f"),
        ]

        unpack(tar_of(*tree, *tree), tmp_path)

        assert (tmp_path / "l").read_bytes() == b"content"
        assert (tmp_path / "d" / "h").samefile(tmp_path / "d" / "f")

    def test_a_link_that_comes_again_is_not_written_through(self, tmp_path: Path) -> None:
        target = tmp_path / "target"
        target.mkdir()
        (tmp_path / "outside").write_bytes(b"untouched")
        link = entry("bin/python", tarfile.SYMTYPE, str(tmp_path / "outside"))

        with pytest.raises(BadEnvironment, match="twice, as a symlink and as a file"):
            unpack(tar_of(link, link, ("bin/python", b"written")), target)

        assert (tmp_path / "outside").read_bytes() == b"untouched"

    def test_the_new_file_has_its_own_rights(self, tmp_path: Path) -> None:
        program, text = entry("f", tarfile.REGTYPE), entry("f", tarfile.REGTYPE)
        program.mode, text.mode = 0o755, 0o4644

        unpack(tar_of(program, text), tmp_path)

        assert (tmp_path / "f").stat().st_mode & 0o7777 == 0o644

    def test_replaced_files_still_count(self, tmp_path: Path) -> None:
        """Otherwise an archive could write to the disk without end."""
        members = [("f", bytes(1000))] * 5

        with pytest.raises(BadEnvironment, match="holds more than the limit of 3,000 bytes"):
            unpack(tar_of(*members), tmp_path, size_limit_bytes=3000)
