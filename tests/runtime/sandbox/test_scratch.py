"""Folders in which contained models may write."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moonpool.runtime.sandbox import scratch


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


def test_what_a_killed_runtime_left_is_removed_by_the_next(place: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
        left = place / f"moonpool-scratch-{ended.pid}-abc"
    left.mkdir()
    (left / "file").touch()
    others = [place / f"moonpool-scratch-{os.getpid()}-abc", place / "moonpool-scratch-mine-abc"]
    for other in others:
        other.mkdir()

    scratch.remove(scratch.make(None))

    assert not left.exists()
    assert all(other.exists() for other in others)
