"""Several processes and one cache: unpacking, deaths meanwhile, and removal."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.repository import folder_cache
from moonpool.runtime.repository.environment import EnvironmentCache
from moonpool.runtime.repository.folder_cache import KEEP_UNUSED_S, FolderLease

FILES = 50
# The program unpacks an archive. After a given number of files it says so and stands still.
UNPACK = """
import pathlib, sys, threading
from moonpool.runtime.repository import archive as archive, environment as cache
root, packed, stop_after = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
write, written = archive.Unpacker._write, []
def counted(self, *arguments):
    write(self, *arguments)
    written.append(1)
    if len(written) == stop_after:
        print("half", flush=True)
        threading.Event().wait()
archive.Unpacker._write = counted
lease = cache.EnvironmentCache(root).acquire(packed)
print(len(written), lease.path, flush=True)
sys.stdin.read()
"""


def pack(path: Path, word: str = "") -> Path:
    with tarfile.open(path, "w") as tar:
        for number in range(FILES):
            content = f"{number} {word}".encode()
            info = tarfile.TarInfo(f"lib/file{number}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


class Unpacking:
    """Start another process that wants the environment."""

    def __init__(self, root: Path, packed: Path, stop_after: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", UNPACK, str(root), str(packed), str(stop_after)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        stdout = self._process.stdout
        return stdout.readline().strip() if stdout else ""

    def kill(self) -> None:
        with self._process as process:
            process.kill()


@pytest.fixture
def processes() -> Iterator[list[Unpacking]]:
    started: list[Unpacking] = []
    yield started
    for process in started:
        process.kill()


@pytest.fixture
def cache(tmp_path: Path) -> EnvironmentCache:
    return EnvironmentCache(tmp_path / "cache")


@pytest.mark.promise("Environments", "A packed environment is unpacked once …")
def test_a_half_unpacked_environment_of_a_killed_process_is_not_used(
    cache: EnvironmentCache, tmp_path: Path, processes: list[Unpacking]
) -> None:
    packed = pack(tmp_path / "env.tar")
    first = Unpacking(cache.root, packed, stop_after=FILES // 2)
    processes.append(first)
    assert first.line() == "half"
    (partial,) = (path for path in cache.root.iterdir() if path.is_dir())
    second = Unpacking(cache.root, packed)
    processes.append(second)
    first.kill()

    count, _, path = second.line().partition(" ")

    assert int(count) == FILES
    assert len(list(Path(path, "lib").iterdir())) == FILES
    assert not partial.exists()


@pytest.mark.promise("Environments", "A packed environment is unpacked once …")
def test_runtimes_that_start_together_unpack_once(
    cache: EnvironmentCache, tmp_path: Path, processes: list[Unpacking]
) -> None:
    packed = pack(tmp_path / "env.tar")
    processes += [Unpacking(cache.root, packed) for _ in range(4)]

    lines = [process.line().split() for process in processes]

    assert sorted(int(count) for count, _ in lines) == [0, 0, 0, FILES]
    assert len({path for _, path in lines}) == 1


@pytest.mark.promise("Environments", "Unpacked environments that nobody uses do not pile up.")
def test_unpacking_removes_environments_that_were_long_unused(cache: EnvironmentCache, tmp_path: Path) -> None:
    used, old, recent = (cache.acquire(pack(tmp_path / f"{word}.tar", word)) for word in ("used", "old", "recent"))
    old.release()
    recent.release()
    long_ago = time.time() - KEEP_UNUSED_S - 1
    for lease in (used, old):
        os.utime(lease.path.with_name(f"{lease.path.name}.lock"), (long_ago, long_ago))

    new = cache.acquire(pack(tmp_path / "new.tar", "new"))

    assert not old.path.exists()
    assert used.path.is_dir()
    assert recent.path.is_dir()
    used.release()
    new.release()


def pack_one(name: str, content: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


class Swapping(EnvironmentCache):
    """Change the archive in the moment after its hash was taken."""

    archive: Path
    foreign: bytes

    def lease(self, *arguments: Any) -> FolderLease:
        self.archive.write_bytes(self.foreign)
        return super().lease(*arguments)


@pytest.mark.promise(
    "Environments",
    "An unpacked environment has the content of the hash that it lies under, even if the archive is changed meanwhile.",
)
def test_an_unpacked_environment_has_the_content_of_its_hash(tmp_path: Path) -> None:
    good, foreign = pack_one("lib/it", b"good"), pack_one("lib/it", b"evil")
    packed = tmp_path / "env.tar"
    packed.write_bytes(good)
    swapping = Swapping(tmp_path / "cache")
    swapping.archive, swapping.foreign = packed, foreign

    with pytest.raises(BadEnvironment, match="it was changed while it was read"):
        swapping.acquire(packed)

    packed.write_bytes(good)
    lease = EnvironmentCache(tmp_path / "cache").acquire(packed)
    try:
        assert (lease.path / "lib" / "it").read_bytes() == b"good"
    finally:
        lease.release()


@pytest.mark.promise(
    "Environments",
    "A runtime that waits for another process to make an environment stops waiting when it is closed, and some hours "
    "later at the latest.",
)
@pytest.mark.parametrize("how", ["stopped", "late"])
def test_nobody_waits_for_another_process_for_ever(
    cache: EnvironmentCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    packed, stop = pack(tmp_path / "env.tar"), threading.Event()
    cache.acquire(packed).release()
    cache.remove_unused()
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    with (cache.root / f"{digest}.making").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        if how == "stopped":
            stop.set()
            words = "the wait for another process .* was given up"
        else:
            monkeypatch.setattr(folder_cache, "WAIT_S", 0.0)
            words = r"another process has had .*\.making, in the cache of environments, for 0 s"
        with pytest.raises(BadEnvironment, match=words):
            cache.acquire(packed, stop)
    monkeypatch.undo()
    cache.acquire(packed, threading.Event()).release()


def test_folders_are_listed_while_another_process_removes_them(
    cache: EnvironmentCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.acquire(pack(tmp_path / "one.tar", "one")).release()
    cache.acquire(pack(tmp_path / "two.tar", "two")).release()
    present = sorted(each.path for each in cache.folders())
    lock_now = folder_cache.lock_now

    def remove_first(path: Path) -> int | None:
        if path.stem == present[0].name:
            path.unlink()
            return None
        return lock_now(path)

    monkeypatch.setattr(folder_cache, "lock_now", remove_first)
    assert [each.path for each in cache.folders()] == present
    # Without its lock, the first one is none of the cache's any more.
    assert [each.path for each in cache.folders()] == present[1:]


@pytest.mark.promise("Environments", "An archive that is no regular …")
@pytest.mark.parametrize("word", ["file", "link"])
def test_a_place_that_is_taken_by_no_directory_is_named(cache: EnvironmentCache, tmp_path: Path, word: str) -> None:
    packed = pack(tmp_path / "env.tar")
    lease = cache.acquire(packed)
    lease.release()
    cache.remove_unused()
    place = lease.path
    if word == "file":
        place.touch()
    else:
        place.symlink_to(tmp_path)

    with pytest.raises(BadEnvironment, match=f"{place}.* is not a directory: remove it"):
        cache.acquire(packed)
    place.unlink()
    cache.acquire(packed).release()


@pytest.mark.promise(
    "Environments", "An archive that is no regular file, or whose place in the cache is taken, is an error."
)
def test_an_archive_that_is_no_file_is_not_waited_for(cache: EnvironmentCache, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "env.tar")
    with pytest.raises(BadEnvironment, match=r"env\.tar: it cannot be read: it is a named pipe"):
        cache.acquire(tmp_path / "env.tar")
    with (tmp_path / "huge.tar").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadEnvironment, match="it is larger than 1,000,000 bytes"):
        EnvironmentCache(cache.root, size_limit_bytes=1_000_000).acquire(tmp_path / "huge.tar")
