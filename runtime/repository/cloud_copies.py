"""Copies of models from a repository in the cloud, in a cache on disk that all runtimes of a user share.

    <root>/files/<sha256>       the content of a file, as a file that only its owner may read
    <root>/known/<digest>       a link to the content that a store's tag (an ETag) stands for
    <root>/partial/<sha256>     the beginning of a content whose store says its hash, for the next try
    <root>/models/<digest>/NAME the folder of a model, of hard links to contents, made and removed by `folder_cache`

Theory of operation. A model is listed, copied and listed again. Only if both listings are equal, the folder gets its
name, so nobody finds one that is half a copy, or half of one upload and half of the next. Otherwise all begins anew. A
tag is remembered for a file that both listings have, as only then the tag stands for what was read.

The digest of a folder is that of the listing it was made from: an unchanged model is found by one question to the
store. A content is linked into a folder before it lies in `files`, and one that no folder links to is removed.
`os.link` finds a content or does not, so a process may remove one while another one looks for it.

A model below the sandbox `strict` runs as the user who owns the cache, and may write into its folder by mistake. The
contents belong to other folders, too. So each content has a time that was computed from its hash. One with another time
was written to: it is fetched again, and so is a folder that has it (`_is_intact`). Each process looks at each folder
once.

Several threads copy the files of one model. They take them from one queue, and `failed` ends all of them with the first
error. `_stop` is another event for each generation of loads: those that began before `give_up` end, and later ones do
not.

Where a store says the hash of a file's content, the content of another model may be it, and a copy that broke off goes
on where it ended, in this process or the next one. Whoever writes a partial content holds a lock on it; a second reader
reads the file apart. A content with another hash is removed, and the load fails.

Copies tell `WATCHERS` how far they are, on their own threads.

fsspec can copy a folder itself (`get`), and does not keep what users of this have. It writes as many bytes as a store
sends, whatever it listed, has no deadline for a part of a file, and may begin a broken file anew. Its libraries report
progress in different ways, so no callback could bound or end a copy with all of them. And the hash of each file would
take another reading of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import shutil
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.files import RepositoryError
from moonpool.runtime.process.parallel import in_parallel
from moonpool.runtime.repository.cloud_address import read_address
from moonpool.runtime.repository.cloud_store import CloudFile, CloudListing, CloudStore, Store
from moonpool.runtime.repository.folder_cache import FolderCache, FolderLease, cache_root, lock_now

_log = RuntimeLog("moonpool")

_THREADS = 4
# The times that a model is copied anew because its files changed meanwhile, or that its copy on disk was changed.
_TRIES = 3
# What a copy leaves of the disk.
_SPARE_BYTES = 64 << 20
_READ_BYTES = 1 << 20


class _Changed(Exception):
    """The files of a model were changed while they were copied."""


class _ModelFolders(FolderCache):
    """The folders of models, and their contents beside them."""

    refusal = RepositoryError
    contents = "models"
    mode = 0o700

    def __init__(self, root: Path) -> None:
        super().__init__(root / "models")
        self.files, self.known, self.partial = root / "files", root / "known", root / "partial"

    def _make_root(self) -> None:
        for folder in (self.root.parent, self.files, self.known, self.partial):
            self.make_private(folder)
        super()._make_root()

    def remove_unused(self, older_than_s: float = 0.0) -> list[Path]:
        removed = super().remove_unused(older_than_s)
        for entry in _entries(self.files):
            with contextlib.suppress(FileNotFoundError):  # another process does the same
                if entry.stat(follow_symlinks=False).st_nlink == 1:
                    os.unlink(entry.path)
        for entry in _entries(self.known):
            if not os.path.exists(entry.path):
                Path(entry.path).unlink(missing_ok=True)
        for entry in _entries(self.partial):
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_mtime <= time.time() - older_than_s:
                    self._remove_partial(entry.path)
        return removed

    def _remove_partial(self, path: str) -> None:
        descriptor = lock_now(Path(path))
        if descriptor is not None:
            os.unlink(path)
            os.close(descriptor)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


class CopyWatcher(Protocol):
    """Shows how far copies are."""

    def copying(self, what: str, copied_bytes: int, all_bytes: int) -> None:
        """Take the state of a copy. At its end, whatever that is, both numbers are 0."""


# Displays of this process.
WATCHERS: weakref.WeakSet[CopyWatcher] = weakref.WeakSet()
_TOLD_EACH_S, _LOGGED_EACH_S = 0.1, 10.0


class _Copying:
    """Counts how far the copy of one model is. For any thread."""

    def __init__(self, what: str, all_bytes: int) -> None:
        self._what, self._all_bytes = what, all_bytes
        self._lock = threading.Lock()
        self._copied_bytes = 0
        self._begin_s = self._logged_s = time.monotonic()
        self._told_s = 0.0

    def add(self, count: int) -> None:
        """Note that so many bytes more are there."""
        with self._lock:
            self._copied_bytes += count
            now_s = time.monotonic()
            if now_s - self._told_s < _TOLD_EACH_S and self._copied_bytes < self._all_bytes:
                return
            self._told_s = now_s
            if now_s - self._logged_s > _LOGGED_EACH_S:
                self._logged_s = now_s
                rate = self._copied_bytes / (now_s - self._begin_s)
                shown = f"{self._copied_bytes:,} of {self._all_bytes:,} bytes, {rate:,.0f} a second"
                _log.info("%s is being copied: %s", self._what, shown)
            self._tell(self._copied_bytes, self._all_bytes)

    def end(self) -> None:
        with self._lock:
            self._tell(0, 0)

    def _tell(self, copied_bytes: int, all_bytes: int) -> None:
        for watcher in list(WATCHERS):
            watcher.copying(self._what, copied_bytes, all_bytes)


class CloudCopies:
    """The models at one address, as folders on this disk. Any thread may call any method. All but `give_up` wait for
    the network.
    """

    def __init__(
        self, url: str, environment: Mapping[str, str], root: Path | None = None, store: Store | None = None
    ) -> None:
        """`environment` has the credentials. `root` is the cache's, by default that of the user, and `store` what is
        at the address.

        Raises `RepositoryError` for a wrong address, or without the package for its scheme.
        """
        address = read_address(url, environment)
        self.url, self.secrets = address.url, address.secrets
        self._identity = repr((address.url, address.options.get("endpoint_url")))
        self._store: Store = CloudStore(address) if store is None else store
        if root is None:
            named = environment.get(address.service.folder, "")
            root = (Path(named) / "moonpool" if named else cache_root()) / "repositories"
        self._cache = _ModelFolders(root)
        self._intact: set[str] = set()
        self._stop = threading.Event()

    def of(self, store: Store) -> CloudCopies:
        """Return the copies of models that this store lists and reads. `give_up` of either is for both."""
        made = copy(self)
        made._store = store
        return made

    @property
    def stop(self) -> threading.Event:
        """Return what the next call of `give_up` sets."""
        return self._stop

    def give_up(self) -> None:
        """Have the copies that are being made now fail soon."""
        stop, self._stop = self._stop, threading.Event()
        stop.set()

    def close(self) -> None:
        """Close the connections. Leases stay."""
        self.give_up()
        self._store.close()

    def acquire(self, name: str) -> FolderLease:
        """Return a lease of a folder in which the folder `name` is a copy of the model. Raises `RepositoryError`.

        Nothing is copied if the copy that is there is still the model.
        """
        stop = self._stop
        for _ in range(_TRIES):
            listing = self._store.listing(name, stop)
            try:
                return self._lease(name, listing, stop)
            except _Changed:
                _log.info("%s/%s was changed while it was copied, and is copied anew", self.url, name)
            except OSError as error:
                raise RepositoryError(
                    f"{self.url}/{name} cannot be copied to {self._cache.root}: {error}; XDG_CACHE_HOME names another "
                    "place"
                ) from error
        raise RepositoryError(
            f"{self.url}/{name} was changed each of {_TRIES} times while it was copied; load it when the upload is "
            "complete",
            "UNAVAILABLE",
        )

    def _lease(self, name: str, listing: CloudListing, stop: threading.Event) -> FolderLease:
        make = partial(self._copy, name, listing, stop)
        number = 0
        for _ in range(_TRIES):
            digest = _digest(self._identity, name, listing.contents, listing.folders, number)
            lease = self._cache.lease(digest, make, stop)
            if digest in self._intact or self._is_intact(lease.path, name, listing):
                self._intact.add(digest)
                return lease
            _log.warning("the copy %s of %s/%s was written to: it is made again", lease.path, self.url, name)
            lease.release()
            if not self._cache.remove(digest):
                # It is in use, so another one takes its place.
                number += 1
        raise RepositoryError(f"the copies of {self.url}/{name} in {self._cache.root} are written to all the time")

    def _is_intact(self, folder: Path, name: str, listing: CloudListing) -> bool:
        try:
            return all(
                _is_content(folder / name / file.path, _hash_in(self._known(name, file)), file.size_bytes)
                for file in listing.files
            )
        except OSError:
            return False

    def _found(self, name: str, file: CloudFile) -> Path:
        """Return the path of a file's content, or of a link to it, if it is there."""
        expected = self._store.sha256(file)
        return self._cache.files / expected if expected else self._known(name, file)

    def _known(self, name: str, file: CloudFile) -> Path:
        """Return the path of the link to the content that a file's tag stands for."""
        return self._cache.known / _digest(self._identity, name, file.path, file.tag, file.size_bytes)

    # Copy

    def _copy(self, name: str, listing: CloudListing, stop: threading.Event, partial_: Path) -> None:
        """Copy a model into a new folder. Raises `_Changed` if it is not the one that was listed any more."""
        folder = partial_ / name
        for path in ("", *listing.folders):
            (folder / path).mkdir()
            (folder / path).chmod(0o755)
        self._check_room(name, listing)
        copying = _Copying(f"{self.url}/{name}", listing.size_bytes)
        try:
            hashes = self._place_all(name, listing, folder, stop, copying)
        finally:
            copying.end()
        after = self._store.listing(name, stop)
        for file in set(after.files).intersection(hashes):
            self._remember(self._known(name, file), hashes[file])
        if after != listing:
            raise _Changed
        for path in ("", *listing.folders):
            _sync(folder / path)
        _sync(partial_)

    def _place_all(
        self, name: str, listing: CloudListing, folder: Path, stop: threading.Event, copying: _Copying
    ) -> dict[CloudFile, str]:
        """Put all files into their places. Returns their hashes."""
        waiting: queue.SimpleQueue[CloudFile] = queue.SimpleQueue()
        for file in listing.files:
            waiting.put(file)
        failed, hashes = threading.Event(), dict[CloudFile, str]()

        def work(_: int) -> None:
            while not failed.is_set():
                try:
                    file = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    hashes[file] = self._place(name, file, folder / file.path, stop, copying)
                except BaseException:
                    failed.set()
                    raise

        in_parallel(work, range(min(_THREADS, len(listing.files))), "moonpool-copy", self.give_up)
        return hashes

    def _check_room(self, name: str, listing: CloudListing) -> None:
        """Raise `RepositoryError` unless the disk has room for all files. Removes copies that nobody uses if it has
        not.
        """
        for remove in (self._cache.remove_unused, None):
            missing = [file for file in listing.files if not self._found(name, file).exists()]
            wanted = sum(file.size_bytes for file in missing)
            free = shutil.disk_usage(self._cache.root).free
            if not wanted or wanted + _SPARE_BYTES <= free:
                return
            if remove is not None:
                remove()
        raise RepositoryError(
            f"{self.url}/{name} needs {wanted:,} bytes in {self._cache.root}, which has {free:,} left; XDG_CACHE_HOME "
            "names another place"
        )

    def _place(self, name: str, file: CloudFile, path: Path, stop: threading.Event, copying: _Copying) -> str:
        """Put a file into its place, from the contents that are there or from the store. Returns its hash."""
        with contextlib.suppress(OSError):
            known = self._found(name, file)
            digest = self._store.sha256(file) or _hash_in(known)
            if _is_content(known, digest, file.size_bytes, follows=True):
                os.link(self._cache.files / digest, path)
                copying.add(file.size_bytes)
                return digest
        digest = self._fetch(name, file, path, stop, copying)
        content = self._cache.files / digest
        if not _is_content(content, digest, file.size_bytes):
            content.unlink(missing_ok=True)
        try:
            os.link(path, content)
        except FileExistsError:
            # Another model has it, too. Now it is there once.
            self._link(content, path)
        return digest

    def _link(self, content: Path, path: Path) -> None:
        with tempfile.TemporaryDirectory(dir=path.parent) as beside, contextlib.suppress(OSError):
            os.link(content, f"{beside}/link")
            os.replace(f"{beside}/link", path)

    def _fetch(self, name: str, file: CloudFile, path: Path, stop: threading.Event, copying: _Copying) -> str:
        expected = self._store.sha256(file)
        partial_ = self._cache.partial / expected if expected else path
        descriptor = lock_now(partial_) if expected else None
        if descriptor is None:
            # The folder is new and private, so nothing is in the place of the file.
            partial_ = path
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        with open(descriptor, "r+b") as target:
            try:
                digest = self._read_checked(name, file, target, expected, stop, copying)
            except BaseException:
                target.flush()
                if os.fstat(descriptor).st_size >= file.size_bytes:
                    # It is wrong, so no later try may go on with it.
                    partial_.unlink()
                raise
            # The user of a contained instance reads it, too. Other users do not reach the folder.
            os.fchmod(descriptor, 0o444)
            time_s = _time_of(digest)
            os.utime(descriptor, (time_s, time_s))
            os.fsync(descriptor)
            if partial_ != path:
                os.rename(partial_, path)
        return digest

    def _read_checked(
        self,
        name: str,
        file: CloudFile,
        target: BinaryIO,
        expected: str | None,
        stop: threading.Event,
        copying: _Copying,
    ) -> str:
        """Read what is missing of a file. Returns the hash of all of it. Raises `RepositoryError` for a wrong one."""
        was_begun = os.fstat(target.fileno()).st_size > 0
        digest = self._read(name, file, target, stop, copying)
        if expected and digest != expected and was_begun:
            # What was there before may have been wrong, so all of it is read once more.
            target.truncate(0)
            digest = self._read(name, file, target, stop, copying)
        target.flush()
        if expected and digest != expected:
            raise RepositoryError(
                f"{self.url}/{name}: the content of {file.path} has the SHA-256 {digest}, and the list of files says "
                f"{expected}"
            )
        return digest

    def _read(self, name: str, file: CloudFile, target: BinaryIO, stop: threading.Event, copying: _Copying) -> str:
        """Read what is missing of a file. Returns the hash of all of it."""
        digest, there = _begun(target, file.size_bytes)
        copying.add(there)

        def write(piece: bytes) -> None:
            digest.update(piece)
            target.write(piece)
            copying.add(len(piece))

        if not self._store.read(name, file, write, stop, there):
            raise _Changed
        return digest.hexdigest()

    def _remember(self, known: Path, digest: str) -> None:
        with contextlib.suppress(OSError):
            if _hash_in(known) == digest:
                return
        known.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):  # another process remembers the same
            os.symlink(f"../files/{digest}", known)


def _begun(target: BinaryIO, most_bytes: int) -> tuple[hashlib._Hash, int]:
    """Read what there is of a file, and truncate one that is too long. Returns its hash so far, and its size."""
    digest, size = hashlib.sha256(), os.fstat(target.fileno()).st_size
    target.seek(0)
    if size > most_bytes:
        target.truncate(0)
        size = 0
    while piece := target.read(_READ_BYTES):
        digest.update(piece)
    return digest, size


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode(errors="surrogatepass")).hexdigest()


def _hash_in(known: Path) -> str:
    return os.path.basename(os.readlink(known))


def _time_of(digest: str) -> int:
    """Return the time that a content has: it depends on its hash, and on nothing else."""
    # From 2001 on: archives cannot have files from before 1980.
    return 1_000_000_000 + int(digest[:7], 16)


def _is_content(path: Path, digest: str, size_bytes: int, *, follows: bool = False) -> bool:
    """Return True if this file has the size of the content, and nobody has written to it since it was put there."""
    try:
        facts = os.stat(path, follow_symlinks=follows)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_size == size_bytes and facts.st_mtime_ns == _time_of(digest) * 10**9


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
