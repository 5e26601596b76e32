"""Copies of models in the cache: complete or absent, made once, and made again where something has changed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.runtime.repository.buckets import Bucket, bucket

from moonpool.runtime.process.files import RepositoryError
from moonpool.runtime.repository import cloud_copies
from moonpool.runtime.repository.cloud_address import read_address
from moonpool.runtime.repository.cloud_copies import CloudCopies
from moonpool.runtime.repository.cloud_store import CloudListing, CloudStore
from moonpool.runtime.repository.folder_cache import KEEP_UNUSED_S

__all__ = ["bucket"]

TIMEOUT_S = 60.0
FILES = {"config.pbtxt": b"config", "1/model.py": b"one", "1/weights": b"w" * 1000, "2/": b""}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "moonpool" / "repositories"


@pytest.fixture
def copies(bucket: Bucket) -> CloudCopies:
    bucket.put("b/r/m", FILES)
    return CloudCopies("s3://b/r", {})


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


WHOLE = {path: each for path, each in FILES.items() if not path.endswith("/")}


@pytest.mark.promise(
    "Repositories in the cloud",
    "A model is copied once. As long as its files have the same ETags, each later load takes the copy that is there, "
    "in every process of the user.",
)
def test_a_model_is_copied_once(copies: CloudCopies, bucket: Bucket) -> None:
    first = copies.acquire("m")
    assert content(first.path / "m") == WHOLE
    assert sorted(path.name for path in (first.path / "m").iterdir()) == ["1", "2", "config.pbtxt"]
    read = len(bucket.reads)

    second = copies.acquire("m")
    elsewhere = CloudCopies("s3://b/r", {}).acquire("m")

    assert first.path == second.path == elsewhere.path
    assert len(bucket.reads) == read == len(WHOLE)
    assert bucket.lists == 4  # before and after the copy, and once each for the others


@pytest.mark.promise("Repositories in the cloud", "Of a changed model, only the files that have changed are copied.")
def test_only_changed_files_are_copied(copies: CloudCopies, bucket: Bucket) -> None:
    first = copies.acquire("m")
    bucket.reads.clear()
    bucket.objects["b/r/m/config.pbtxt"] = b"another"
    bucket.objects["b/r/m/1/label"] = b"w" * 1000
    second = copies.acquire("m")

    assert second.path != first.path
    assert content(first.path / "m") == WHOLE
    assert content(second.path / "m") == WHOLE | {"config.pbtxt": b"another", "1/label": b"w" * 1000}
    assert sorted(bucket.reads) == ["b/r/m/1/label", "b/r/m/config.pbtxt"]
    # What has the same content is there once.
    inodes = {
        (folder.path / "m" / path).stat().st_ino
        for folder, path in [(first, "1/weights"), (second, "1/weights"), (second, "1/label")]
    }
    assert len(inodes) == 1


@pytest.mark.promise("Repositories in the cloud", "No other user may look into the cache.")
def test_the_cache_is_private(copies: CloudCopies, root: Path) -> None:
    lease = copies.acquire("m")
    for folder in (root, root / "models", root / "files", root / "known"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # The user of a contained instance may read it, wherever it is shown to it.
    assert stat.S_IMODE((lease.path / "m").stat().st_mode) == 0o755
    assert stat.S_IMODE((lease.path / "m" / "config.pbtxt").stat().st_mode) == 0o444


def test_a_cache_that_others_may_write_into_is_refused(copies: CloudCopies, root: Path) -> None:
    root.mkdir(parents=True)
    root.chmod(0o777)
    with pytest.raises(RepositoryError, match="must belong to this user, and no other user may write to it"):
        copies.acquire("m")


def test_a_folder_for_the_copies_can_be_named(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("b/m", FILES)
    named = {"TRITON_AWS_MOUNT_DIRECTORY": str(tmp_path / "disk")}
    lease = CloudCopies("s3://b", named).acquire("m")
    assert lease.path.is_relative_to(tmp_path / "disk" / "moonpool")


@pytest.mark.promise(
    "Repositories in the cloud",
    "A model whose files change while they are copied is copied anew; if they change each time, its load fails.",
)
@pytest.mark.parametrize("change", ["content", "size", "gone", "more", "time"])
def test_a_model_that_changes_meanwhile_is_copied_anew(copies: CloudCopies, bucket: Bucket, change: str) -> None:
    times = [1]
    bucket.facts = lambda content: {"ETag": str(hash(content)), "LastModified": times[0]}
    changes: dict[str, Callable[[], object]] = {
        "content": lambda: bucket.objects.update({"b/r/m/1/model.py": b"two"}),
        "size": lambda: bucket.objects.update({"b/r/m/1/model.py": b"t"}),
        "gone": lambda: bucket.objects.pop("b/r/m/1/weights", None),
        "more": lambda: bucket.objects.update({"b/r/m/1/more": b"m"}),
        "time": lambda: times.append(times.pop() + 1),
    }

    def once(_: str) -> None:
        bucket.before_read = lambda _: None
        changes[change]()

    bucket.before_read = once
    lease = copies.acquire("m")

    expected = {name.removeprefix("b/r/m/"): each for name, each in bucket.objects.items() if not name.endswith("/")}
    assert content(lease.path / "m") == expected


def test_a_model_that_changes_all_the_time_is_refused(copies: CloudCopies, bucket: Bucket, root: Path) -> None:
    def change(_: str) -> None:
        bucket.objects["b/r/m/1/model.py"] += b"!"

    bucket.before_read = change
    with pytest.raises(RepositoryError, match="was changed each of 3 times while it was copied"):
        copies.acquire("m")
    assert [path for path in (root / "models").iterdir() if path.is_dir()] == []


def test_what_changed_after_it_was_read_is_not_remembered(copies: CloudCopies, bucket: Bucket) -> None:
    """A tag must not stand for the content that the file had before it got this tag."""
    path, old, new = "b/r/m/1/model.py", b"one", b"two"
    bucket.objects[path] = old

    def flip(name: str) -> None:
        # Listed with the old tag, read with the new content, and listed with the old tag again.
        if name == path:
            bucket.objects[path] = new

    def back(name: str) -> None:
        flip(name)
        if len(bucket.reads) >= len(WHOLE):
            bucket.objects[path] = old

    bucket.facts = lambda each: {"ETag": str(hash(each)), "LastModified": len(bucket.reads)}
    bucket.before_read = back
    with pytest.raises(RepositoryError, match="was changed each of 3 times"):
        copies.acquire("m")
    bucket.before_read = lambda _: None
    bucket.facts = lambda each: {"ETag": str(hash(each)), "LastModified": 0}
    bucket.objects[path] = old

    assert content(copies.acquire("m").path / "m")["1/model.py"] == old


@pytest.mark.promise("Repositories in the cloud", "Nothing that is half a copy is ever loaded.")
def test_a_copy_that_failed_leaves_nothing(copies: CloudCopies, bucket: Bucket, root: Path) -> None:
    def fail(name: str) -> None:
        if name.endswith("weights"):
            raise PermissionError("not yours")

    bucket.before_read = fail
    with pytest.raises(RepositoryError, match=r"m/1/weights cannot be read: .*not yours"):
        copies.acquire("m")
    assert [path for path in (root / "models").iterdir() if path.is_dir()] == []
    assert list((root / "known").iterdir()) == []
    bucket.before_read = lambda _: None
    assert content(copies.acquire("m").path / "m") == WHOLE


class Writing(NamedTuple):
    """A way in which a model changes a file of its own folder."""

    name: str
    act: Callable[[Path], object]


def overwrite(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(b"x" * path.stat().st_size)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


WRITINGS = [Writing("written", overwrite), Writing("removed", os.unlink), Writing("linked", link)]


@pytest.mark.promise(
    "Repositories in the cloud",
    "A copy that somebody has written to is not loaded by another process: it is made again.",
)
@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("writing", WRITINGS, ids=lambda each: each.name)
def test_a_copy_that_was_written_to_is_made_again(
    copies: CloudCopies, writing: Writing, is_used: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lease = copies.acquire("m")
    writing.act(lease.path / "m" / "1" / "weights")
    if not is_used:
        lease.release()

    again = CloudCopies("s3://b/r", {}).acquire("m")

    assert content(again.path / "m") == WHOLE
    assert (again.path != lease.path) == is_used
    assert "was written to: it is made again" in caplog.text
    lease.release()


def age(path: Path) -> None:
    """Let a copy be one that was used long ago."""
    long_ago = time.time() - KEEP_UNUSED_S - 1
    os.utime(path.with_name(f"{path.name}.lock"), (long_ago, long_ago))


@pytest.mark.promise("Repositories in the cloud", "Copies that nobody uses do not pile up.")
def test_copies_that_were_long_unused_are_removed_with_their_contents(
    copies: CloudCopies, bucket: Bucket, root: Path
) -> None:
    old = copies.acquire("m")
    old.release()
    age(old.path)
    bucket.put("b/r/other", {"1/model.py": b"other"})

    new = copies.acquire("other")

    assert not old.path.exists()
    assert [path.read_bytes() for path in (root / "files").iterdir()] == [b"other"]
    assert len(list((root / "known").iterdir())) == 1
    assert content(new.path / "other") == {"1/model.py": b"other"}


def test_a_copy_in_use_stays_and_one_that_is_forgotten_goes(copies: CloudCopies, bucket: Bucket) -> None:
    leases = [copies.acquire("m")]
    path = leases[0].path
    for name in ("one", "two"):
        age(path)
        bucket.put(f"b/r/{name}", FILES)
        copies.acquire(name)
        assert path.exists() == (name == "one")
        leases.clear()


class Disk(NamedTuple):
    """A full disk, in the words of `shutil.disk_usage`."""

    free: int


@pytest.mark.promise(
    "Repositories in the cloud",
    "Without room on the disk, copies that nobody uses are removed first; if that is not enough, the load fails.",
)
def test_a_model_without_room_is_refused_before_it_is_copied(
    copies: CloudCopies, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused = copies.acquire("m")
    unused.release()
    bucket.put("b/r/big", {"1/model.py": b"x" * 10_000})
    bucket.reads.clear()
    monkeypatch.setattr(cloud_copies, "_SPARE_BYTES", 100)
    free = {True: 10_000, False: 10_100}

    def usage(_: object) -> Disk:
        return Disk(free[unused.path.exists() or free[False] == 0])

    monkeypatch.setattr("shutil.disk_usage", usage)
    lease = copies.acquire("big")
    assert not unused.path.exists()
    lease.release()
    free[True], free[False] = 9_000, 0
    bucket.reads.clear()
    bucket.objects["b/r/big/1/model.py"] += b"y"
    with pytest.raises(RepositoryError, match=r"needs 10,001 bytes in .*, which has 9,000 left"):
        copies.acquire("big")
    assert bucket.reads == []


def test_threads_that_come_at_once_copy_once(bucket: Bucket) -> None:
    bucket.put("b/r/m", FILES)
    others = [CloudCopies("s3://b/r", {}) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        leases = list(pool.map(lambda each: each.acquire("m"), others))
    assert len({lease.path for lease in leases}) == 1
    assert sorted(bucket.reads) == sorted(f"b/r/m/{path}" for path in WHOLE)


def test_a_copy_that_is_given_up_ends_and_the_next_one_does_not(copies: CloudCopies, bucket: Bucket) -> None:
    reading = threading.Event()

    def fail(_: str) -> None:
        reading.set()
        copies.give_up()
        raise OSError("slow")

    bucket.before_read = fail
    with pytest.raises(RepositoryError, match="the load was given up"):
        copies.acquire("m")
    assert reading.is_set()
    bucket.before_read = lambda _: None
    assert content(copies.acquire("m").path / "m") == WHOLE


def test_a_wait_for_a_process_that_copies_the_model_is_given_up(copies: CloudCopies) -> None:
    lease = copies.acquire("m")
    lease.release()
    shutil.rmtree(lease.path)
    listed = threading.Event()

    class Store(CloudStore):
        def listing(self, name: str, stop: threading.Event) -> CloudListing:
            try:
                return super().listing(name, stop)
            finally:
                listed.set()

    copies = copies.of(Store(read_address("s3://b/r", {})))
    making = os.open(f"{lease.path}.making", os.O_RDWR | os.O_CREAT, 0o600)
    with ThreadPoolExecutor(1) as pool:
        try:
            fcntl.flock(making, fcntl.LOCK_EX)
            loading = pool.submit(copies.acquire, "m")
            assert listed.wait(TIMEOUT_S)
            copies.give_up()
            with pytest.raises(RepositoryError, match=f"makes {lease.path} was given up"):
                loading.result(TIMEOUT_S)
        finally:
            os.close(making)
    assert content(copies.acquire("m").path / "m") == WHOLE


def test_a_lock_that_the_machine_refuses_leaves_no_descriptor(
    copies: CloudCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int, __: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    copies.acquire("m").release()
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RepositoryError, match="No locks available"):
        copies.acquire("m")
    with pytest.raises(OSError, match="No locks available"):
        copies._cache.remove_unused()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_missing_model_is_not_found(copies: CloudCopies) -> None:
    with pytest.raises(RepositoryError, match="no model 'none' in the repository s3://b/r") as raised:
        copies.acquire("none")
    assert raised.value.code == "NOT_FOUND"


def test_a_cache_that_cannot_be_written_says_so(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("b/r/m", FILES)
    (tmp_path / "file").touch()
    with pytest.raises(RepositoryError, match=r"cannot be copied to .*XDG_CACHE_HOME names another"):
        CloudCopies("s3://b/r", {}, tmp_path / "file" / "below").acquire("m")
