"""Folders that are made once for all runtimes of a user: unpacked environments, and copies of models from the cloud.

Theory of operation. Each folder lies below a digest of the thing that it was made from:

    <root>/<digest>         the folder; it appears by a rename, so it is complete or absent
    <root>/<digest>.lock    locked shared by those who use it, exclusively by one who removes it; its
                            time is that of the last use
    <root>/<digest>.making  locked exclusively by one who makes or removes it
    <root>/.<digest>.*      one that is being made or removed; the next process removes what a killed one left

The locks are flocks of open files, so the kernel drops them when a process dies, in any way. There are two because a
use lasts: the second of two processes that come to make a folder waits for the first to finish making it, not for the
first to end using it.

`lease` takes the shared lock first and looks for the folder second. The order matters: a process that removes a folder
holds that lock exclusively, so a folder that is seen under it stays. Without a folder it takes `.making`, looks again,
makes it, and begins anew. A lock file may itself be removed between its opening and its locking. `_locked` compares the
inode under the path with its own, and a lock on a removed file does not count.

A lease that nobody has any more ends by its finalizer. Finalizers run once, also if two threads release a lease
together.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import NamedTuple

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.log import RuntimeLog

_log = RuntimeLog("moonpool")

# Long enough for a job that runs once a week, short enough for a disk on which the originals change daily.
KEEP_UNUSED_S = 8 * 24 * 3600.0
# The most time that a process waits for another one, which may hang. To build an environment of large packages takes
# long.
WAIT_S = 4 * 3600.0
# A process that waits for a lock asks for it so often: the kernel wakes nobody at a time that it is given.
_ASK_S = 0.05


def cache_root() -> Path:
    """Return `$XDG_CACHE_HOME/moonpool`, by default below `~/.cache`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    base = Path(configured) if configured.startswith("/") else Path.home() / ".cache"
    return base / "moonpool"


class CachedFolder(NamedTuple):
    """A folder of a cache, as it is at the moment. `used_s` is the time of its last use, in seconds since the epoch."""

    path: Path
    used_s: float
    is_used: bool


class FolderLease:
    """Keeps a folder of the cache in place until it is released, or forgotten. Any thread may release it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._end = weakref.finalize(self, _end_use, descriptor)
        self._end.atexit = False

    def release(self) -> None:
        """Allow the folder to be removed. A second call does nothing."""
        self._end()


def _end_use(descriptor: int) -> None:
    os.utime(descriptor)
    os.close(descriptor)


class _Turn:
    """Waits for locks that others have, until a time, or until it is stopped."""

    def __init__(self, refusal: type[MoonpoolError], contents: str, end_s: float, stop: Event) -> None:
        self._refusal, self._contents, self._end_s, self._stop = refusal, contents, end_s, stop

    def lock(self, path: Path, operation: int) -> int | None:
        """Open and lock a lock file; None if it was just removed. Raises `refusal` if it is taken until the end, and
        OSError.
        """
        while True:
            with contextlib.suppress(BlockingIOError):
                return _locked(path, operation)
            if self._stop.wait(_ASK_S):
                raise self._refusal(f"the wait for another process that makes {path.with_suffix('')} was given up")
            if time.monotonic() >= self._end_s:
                raise self._refusal(
                    f"another process has had {path}, in the cache of {self._contents}, for {WAIT_S:g} s: end it, or "
                    "wait until it has ended"
                )


class FolderCache:
    """The folders below one directory, for any number of threads and processes. A subclass says how they are made."""

    # The error for a cache that cannot be used.
    refusal: type[MoonpoolError]
    # The word for what the folders are, for the log.
    contents: str
    # The permissions of the directory, in case it has to be made.
    mode = 0o755

    def __init__(self, root: Path) -> None:
        self.root = root

    def lease(self, digest: str, make: Callable[[Path], None], stop: Event | None = None) -> FolderLease:
        """Return a lease of the folder of this digest. If there is none, `make` is called with an empty folder to fill.

        Before that, folders that nobody has used for `KEEP_UNUSED_S` are removed. Blocks while another thread or
        process makes the same folder, until `stop` is set, and for `WAIT_S` at most. Raises `refusal`, OSError and what
        `make` raises.
        """
        self._make_root()
        turn = _Turn(self.refusal, self.contents, time.monotonic() + WAIT_S, stop or Event())
        while True:
            lease = self._lease(digest, turn)
            if lease is not None:
                return lease
            self._make_once(digest, make, turn)

    def folders(self) -> list[CachedFolder]:
        """List the folders that are complete, by their names."""
        found = []
        for lock in sorted(self.root.glob("*.lock")):
            path = self.root / lock.stem
            try:
                used_s = lock.stat().st_mtime
            except FileNotFoundError:
                continue  # another process has removed it meanwhile
            if not path.is_dir():
                continue
            using = lock_now(lock)
            found.append(CachedFolder(path, used_s, using is None))
            if using is not None:
                os.close(using)
        return found

    def remove_unused(self, older_than_s: float = 0.0) -> list[Path]:
        """Remove folders that are not used and were not used for so long. Return their paths."""
        if not self.root.is_dir():
            return []
        removed = []
        for lock in sorted(self.root.glob("*.lock")):
            path = self.root / lock.stem
            # One that could not be made has left its lock.
            was_there = path.is_dir()
            if self._remove(lock, older_than_s) and was_there:
                removed.append(path)
        return removed

    def remove(self, digest: str) -> bool:
        """Remove one folder. Returns False if it is used or made now."""
        return self._remove(self.root / f"{digest}.lock", 0.0)

    def _remove(self, lock: Path, older_than_s: float) -> bool:
        # Neither lock is waited for: a folder that is used or made now is not removed. The files of both locks go last,
        # while the locks are held. A process that has one of them open then finds by its inode that it is removed.
        using = lock_now(lock)
        if using is None:
            return False
        making = None
        try:
            if time.time() - os.fstat(using).st_mtime < older_than_s:
                return False
            marker = lock.with_suffix(".making")
            making = lock_now(marker)
            if making is None:
                return False
            self._discard(self.root / lock.stem)
            marker.unlink()
            lock.unlink()
            return True
        finally:
            os.close(using)
            if making is not None:
                os.close(making)

    def _lease(self, digest: str, turn: _Turn) -> FolderLease | None:
        descriptor = turn.lock(self.root / f"{digest}.lock", fcntl.LOCK_SH)
        path = self.root / digest
        if descriptor is None:
            return None
        with contextlib.ExitStack() as held:
            held.callback(os.close, descriptor)
            # Looked at once, as another process may put it there at any moment.
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                return None
            if not stat.S_ISDIR(mode):
                raise self.refusal(f"{path}, in the cache of {self.contents}, is not a directory: remove it")
            os.utime(descriptor)
            held.pop_all()
        return FolderLease(path, descriptor)

    def _make_once(self, digest: str, make: Callable[[Path], None], turn: _Turn) -> None:
        descriptor = turn.lock(self.root / f"{digest}.making", fcntl.LOCK_EX)
        if descriptor is None:
            return
        try:
            if not (self.root / digest).exists():
                self._make_room()
                self._make(digest, make)
        finally:
            os.close(descriptor)

    def _make_room(self) -> None:
        try:
            self.remove_unused(KEEP_UNUSED_S)
        except OSError as error:
            _log.warning("cannot remove unused %s from %s: %s", self.contents, self.root, error)

    def _make(self, digest: str, make: Callable[[Path], None]) -> None:
        # The process that made these held the lock that this one has now, so it has died.
        for stale in self.root.glob(f".{digest}.*"):
            shutil.rmtree(stale, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{digest}.", dir=self.root))
        try:
            make(partial)
            partial.rename(self.root / digest)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _discard(self, path: Path) -> None:
        # The rename comes first: nobody may find a folder that is removed in part.
        doomed = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=self.root))
        if path.is_dir():
            path.rename(doomed / "folder")
        for leftover in self.root.glob(f".{path.name}.*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _make_root(self) -> None:
        self.make_private(self.root)

    def make_private(self, folder: Path) -> None:
        """Make a folder of the cache, unless it is there. Raises `refusal` if other users may write into it."""
        folder.mkdir(parents=True, exist_ok=True, mode=self.mode)
        info = folder.stat()
        foreign = info.st_uid != os.geteuid()
        if foreign or stat.S_IMODE(info.st_mode) & 0o022:
            # Programs are started from here, so nobody else may put one in place.
            raise self.refusal(f"the cache {folder} must belong to this user, and no other user may write to it")


def lock_now(path: Path) -> int | None:
    """Open a lock file and lock it exclusively; None if it is taken or was just removed. Raises OSError."""
    try:
        return _locked(path, fcntl.LOCK_EX)
    except BlockingIOError:
        return None


def _locked(path: Path, operation: int) -> int | None:
    """Open and lock a lock file; None if it was removed before it was locked. Raises BlockingIOError if it is taken,
    and OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with contextlib.ExitStack() as held:
        held.callback(os.close, descriptor)
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                held.pop_all()
                return descriptor
    return None
