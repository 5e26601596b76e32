"""Archives of the real GNU tar and Info-ZIP, with things that are common in environments and rare elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.repository.archive import unpack

HOLE_BYTES = 1 << 20
DEEP = "/".join(["d" * 60] * 5)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder `env` with hard links, sparse files, links, long names and rights."""
    root = tmp_path_factory.mktemp("tree") / "env"
    for folder in ("bin", "lib/empty", DEEP):
        (root / folder).mkdir(parents=True)
    (root / "bin" / "tool").write_bytes(b"#!/bin/sh\n")
    (root / "bin" / "tool").chmod(0o755)
    (root / "bin" / "python").symlink_to("/usr/bin/python3")
    (root / "lib" / "link").symlink_to("module.py")
    (root / "lib64").symlink_to("lib")
    (root / "lib" / "module.py").write_bytes(b"x = 1\n" * 10_000)
    (root / "lib" / "module.py").chmod(0o644)
    (root / "lib" / "hard.py").hardlink_to(root / "lib" / "module.py")
    (root / "lib" / "na\u00efve \N{SNOWMAN}.py").write_bytes(b"")
    (root / DEEP / "deep").write_bytes(b"deep")
    with (root / "lib" / "holes.bin").open("wb") as file:
        # The file has more spans than fit into the map of one header, and a hole at either end.
        for number in range(1, 101):
            file.seek(number * HOLE_BYTES // 16)
            file.write(b"%d" % number * 1000)
        file.truncate(10 * HOLE_BYTES)
    (root / "lib" / "one_hole.bin").write_bytes(b"")
    os.truncate(root / "lib" / "one_hole.bin", HOLE_BYTES)
    return root


def content_of(root: Path, *, follows: bool = False) -> dict[str, object]:
    """Describe each name of a tree, with its contents."""
    found: dict[str, object] = {}
    for folder, folders, files in os.walk(root, followlinks=follows):
        for name in (*folders, *files):
            path = Path(folder, name)
            said = str(path.relative_to(root))
            if path.is_symlink() and not follows:
                found[said] = os.readlink(path)
            elif path.is_dir():
                found[said] = "a folder"
            else:
                found[said] = (path.read_bytes(), stat.S_IMODE(path.stat().st_mode) & 0o111)
    return found


def packed(tree: Path, folder: Path, command: str) -> Path:
    """Run a command in a shell, beside `env`; return the one archive that it writes."""
    for program in ("zip", "xz", "bzip2", "zstd"):
        if re.search(rf"\b{program}\b", command) and shutil.which(program) is None:
            pytest.skip(f"there is no {program}")
    subprocess.run(["cp", "-a", tree, folder / "env"], check=True)
    subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=folder, check=True)
    (archive,) = folder.glob("packed.*")
    return archive


def unpacked(archive: Path, target: Path) -> Path:
    target.mkdir()
    with archive.open("rb") as file:
        unpack(file, target)
    return target


@pytest.mark.promise("Environments", "Archives that venv-pack, conda-pack, GNU tar, …")
@pytest.mark.parametrize(
    "command",
    [
        "tar -cf packed.tar -C env .",
        "tar -czf packed.tar.gz -C env .",
        "tar --use-compress-program=bzip2 -cf packed.tar.bz2 -C env .",
        "tar --use-compress-program=xz -cf packed.tar.xz -C env .",
        "tar --sparse -cf packed.tar -C env .",
        "tar --format=gnu --sparse -czf packed.tar.gz -C env .",
        "tar --format=oldgnu --sparse -cf packed.tar -C env .",
        "tar --format=posix --sparse -cf packed.tar -C env .",
        "tar --format=posix --sparse --sparse-version=0.0 -cf packed.tar -C env .",
        "tar --format=posix --sparse --sparse-version=0.1 -cf packed.tar -C env .",
        "tar --format=posix --sparse --xattrs --acls -cf packed.tar -C env .",
        "tar --format=posix --pax-option=globexthdr.name=g,comment=c -cf packed.tar -C env .",
        "tar --hard-dereference -cf packed.tar -C env .",
        "tar -cf packed.tar -C env . && tar --append -f packed.tar -C env .",
        "tar -cf packed.tar -C env lib && tar --update -f packed.tar -C env .",
        "tar -cf packed.tar -C env --sort=name --owner=7 --group=7 --numeric-owner .",
        "cd env && zip -qry ../packed.zip .",
        "cd env && zip -qry0 ../packed.zip .",
        "cd env && zip -qry -Z bzip2 ../packed.zip .",
        "export LC_ALL=C; cd env && zip -qry ../packed.zip .",
        "export LC_ALL=C.UTF-8; cd env && zip -qry ../packed.zip .",
    ],
)  # fmt: skip
def test_archives_of_tools_are_unpacked_unchanged(tmp_path: Path, tree: Path, command: str) -> None:
    archive = packed(tree, tmp_path, command)

    target = unpacked(archive, tmp_path / "target")

    assert content_of(target) == content_of(tree)


def test_sparse_files_cost_an_archive_no_more_than_their_content(tmp_path: Path, tree: Path) -> None:
    """Otherwise the tests above would have packed files without holes."""
    archive = packed(tree, tmp_path, "tar --sparse -cf packed.tar -C env .")

    assert archive.stat().st_size < 2 * HOLE_BYTES


def test_hard_links_stay_one_file(tmp_path: Path, tree: Path) -> None:
    archive = packed(tree, tmp_path, "tar -cf packed.tar -C env .")

    target = unpacked(archive, tmp_path / "target")

    assert (target / "lib" / "hard.py").samefile(target / "lib" / "module.py")


@pytest.mark.parametrize(
    "command", ["cd env && zip -qr ../packed.zip .", "cd env && zip -qr - . | cat > ../packed.zip"]
)
def test_zip_without_symlinks_packs_what_they_lead_to(tmp_path: Path, tree: Path, command: str) -> None:
    archive = packed(tree, tmp_path, command)

    target = unpacked(archive, tmp_path / "target")

    assert content_of(target) == content_of(tree, follows=True)


def test_the_archive_of_a_later_state_has_that_state(tmp_path: Path, tree: Path) -> None:
    """`tar --append` adds a member of a name that is there already."""
    command = "tar -cf packed.tar -C env . && echo later > env/bin/tool && tar -rf packed.tar -C env bin/tool"
    archive = packed(tree, tmp_path, command)

    target = unpacked(archive, tmp_path / "target")

    assert (target / "bin" / "tool").read_bytes() == b"later\n"


@pytest.mark.promise(
    "Environments", "An archive of a kind that is not read is refused, and the error says what to use."
)
@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("tar --use-compress-program=zstd -cf packed.tar.zst -C env .",
         "is packed with zstd, which cannot be read; pack it as .tar.gz"),
        ("cd env && zip -qry -P secret ../packed.zip .", "is encrypted"),
        ("mkfifo pipe && tar -cf packed.tar pipe && rm pipe", "'pipe' is a device, not a file"),
    ],
)  # fmt: skip
def test_the_error_about_an_unreadable_archive_says_what_to_do(
    tmp_path: Path, tree: Path, command: str, what: str
) -> None:
    archive = packed(tree, tmp_path, command)

    with pytest.raises(BadEnvironment, match=what):
        unpacked(archive, tmp_path / "target")
