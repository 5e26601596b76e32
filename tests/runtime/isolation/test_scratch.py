"""Folders in which contained models may write."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moonpool.runtime.isolation import scratch

pytestmark = pytest.mark.promise(
    "Layers of the sandbox",
    "Scratch folders are removed however deep they are. After a killed runtime, only its "
    "own folders are removed, and no link is followed.",
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_its_users_alone(place: Path) -> None:
    folder = Path(scratch.make(None))

    assert folder.parent == place
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.stat().st_uid == os.geteuid()
    scratch.remove(str(folder))


def test_it_goes_with_all_that_is_in_it_and_nothing_else(place: Path) -> None:
    kept = place / "kept"
    kept.mkdir()
    (kept / "file").touch()
    folder = Path(scratch.make(None))
    closed = folder / "a" / "closed"
    closed.mkdir(parents=True)
    (closed / "file").touch()
    (folder / "link").symlink_to(kept)
    closed.chmod(0)
    (folder / "a").chmod(0o500)

    scratch.remove(str(folder))

    assert not folder.exists()
    assert (kept / "file").exists()


def test_it_goes_however_deep_its_folders_are(place: Path) -> None:
    folder = scratch.make(None)
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=fd)
        os.mknod("file", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)

    scratch.remove(folder)

    assert not list(place.iterdir())


AS_A_POD = """
import os, subprocess, sys, tempfile
from pathlib import Path
from moonpool.runtime.isolation import scratch, users
tempfile.tempdir = sys.argv[1]
folder = scratch.make(users.FIRST)
closed = "mkdir -p a/b && touch a/b/file && chmod 0 a/b a && ln -s / link"
subprocess.run(["sh", "-c", closed], cwd=folder, user=users.FIRST, group=users.FIRST, check=True)
scratch.remove(folder)
print(os.listdir(sys.argv[1]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to other users")
def test_it_goes_where_root_may_not_remove_what_others_own(place: Path) -> None:
    place.chmod(0o1777)
    rights = "-all,+chown,+dac_override,+kill,+setgid,+setuid"
    command = ["setpriv", f"--bounding-set={rights}", sys.executable, "-c", AS_A_POD, str(place)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)

    assert done.stdout == "[]\n", done.stderr


def test_a_folder_that_cannot_be_removed_is_logged(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = scratch.make(None)

    def refuse(path: str) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        scratch.remove(folder)

    assert f"cannot remove the scratch folder {folder}" in caplog.text
    scratch.remove(folder)
    assert not list(place.iterdir())


def left_by_a_killed_runtime(place: Path) -> Path:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    return place / f"{scratch.prefix_of(ended.pid)}abc"


def test_a_link_that_is_named_like_what_was_left_leads_nowhere(place: Path) -> None:
    """Others may write where folders for temporary files are."""
    victim = place / "victim"
    (victim / "below").mkdir(parents=True)
    for folder in (victim / "below", victim):
        folder.chmod(0o755)
    link = left_by_a_killed_runtime(place)
    link.symlink_to(victim)

    scratch.remove(scratch.make(None))

    assert link.is_symlink()
    assert [each.stat().st_mode & 0o777 for each in (victim, victim / "below")] == [0o755, 0o755]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of others")
def test_a_folder_of_somebody_else_that_is_named_so_stays(place: Path) -> None:
    theirs = left_by_a_killed_runtime(place)
    theirs.mkdir()
    os.chown(theirs, 1234, 1234)

    scratch.remove(scratch.make(None))

    assert theirs.exists()
    theirs.rmdir()


def test_folders_of_a_killed_runtime_are_removed_by_the_next(place: Path) -> None:
    left = left_by_a_killed_runtime(place)
    left.mkdir()
    (left / "file").touch()
    gone = left.name.rpartition(".")[2]
    # Of a runtime that runs, of somebody else, and of another PID namespace, where the number may be taken.
    names = [f"{scratch.prefix_of(os.getpid())}abc", "moonpool-scratch-mine-abc", f"moonpool-scratch-1.{gone}"]
    others = [place / name for name in names]
    for other in others:
        other.mkdir()

    scratch.remove(scratch.make(None))

    assert not left.exists()
    assert all(other.exists() for other in others)
