"""Unpacked environments on disk, each once, under the hash of its archive.

    <root>/<sha256>         the environment; appears by rename, so it is whole or not there
    <root>/<sha256>.lock    held shared by whoever uses it, exclusively by whoever removes it; its
                            time is that of the last use
    <root>/<sha256>.making  held exclusively by whoever unpacks or removes it
    <root>/.<sha256>.*      one being made or removed; what a killed process left, the next removes

The locks belong to open files, so the kernel drops them when a process dies, however it dies.
There are two because a use lasts: one that came to unpack it and was second must not wait until
the first has used it.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from moonpool.runtime.environment_archive import SIZE_LIMIT_BYTES, unpack
from moonpool.runtime.environment_error import BadEnvironment
from moonpool.runtime.repository_files import open_file

_log = logging.getLogger("moonpool")

# Long enough for what is started once a week, short enough for a disk on which archives change daily.
KEEP_UNUSED_S = 8 * 24 * 3600.0
_CHUNK_BYTES = 1 << 20


def default_root() -> Path:
    """`$XDG_CACHE_HOME/moonpool/environments`, or below `~/.cache`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative ones ignored.
    base = Path(configured) if configured.startswith("/") else Path.home() / ".cache"
    return base / "moonpool" / "environments"


class Lease:
    """Keeps an unpacked environment in place until it is released; any thread may release it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        self._guard = threading.Lock()

    def release(self) -> None:
        """Let go; a second call does nothing."""
        with self._guard:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.utime(descriptor)
            os.close(descriptor)


class EnvironmentCache:
    """The unpacked environments below one directory; for any number of threads and processes."""

    def __init__(
        self, root: Path | None = None, *, size_limit_bytes: int = SIZE_LIMIT_BYTES
    ) -> None:
        self.root = default_root() if root is None else root
        self._size_limit_bytes = size_limit_bytes

    def acquire(self, archive: Path) -> Lease:
        """The unpacked environment of an archive; unpacks it if nobody has.

        Whoever unpacks one removes those that nobody has used for `KEEP_UNUSED_S`.  Blocks while
        another thread or process unpacks the same one.  Raises BadEnvironment.
        """
        try:
            self._make_root()
            with _opened(archive) as stream:
                digest = self._digest(stream)
                while True:
                    lease = self._lease(digest)
                    if lease is not None:
                        return lease
                    self._unpack_once(digest, stream)
        except BadEnvironment as error:
            raise BadEnvironment(f"the packed environment {archive}: {error}") from error
        except OSError as error:
            what = f"cannot unpack {archive} into {self.root}: {error}"
            raise BadEnvironment(f"{what}; XDG_CACHE_HOME names another place") from error

    def remove_unused(self, older_than_s: float = 0.0) -> list[Path]:
        """Remove environments that nobody uses and nobody has used for so long; their paths."""
        if not self.root.is_dir():
            return []
        locks = sorted(self.root.glob("*.lock"))
        return [self.root / lock.stem for lock in locks if self._remove(lock, older_than_s)]

    def _remove(self, lock: Path, older_than_s: float) -> bool:
        using = _lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if using is None:
            return False
        making = None
        try:
            if time.time() - os.fstat(using).st_mtime < older_than_s:
                return False
            marker = lock.with_suffix(".making")
            making = _lock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
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

    def _lease(self, digest: str) -> Lease | None:
        descriptor = _lock(self.root / f"{digest}.lock", fcntl.LOCK_SH)
        path = self.root / digest
        if descriptor is None:
            return None
        if path.is_dir() and not path.is_symlink():
            os.utime(descriptor)
            return Lease(path, descriptor)
        os.close(descriptor)
        if os.path.lexists(path):
            raise BadEnvironment(f"{path}, where it is to be unpacked, is no directory: remove it")
        return None

    def _digest(self, archive: IO[bytes], copy: IO[bytes] | None = None) -> str:
        """Hash an archive from its beginning, and write the same bytes to `copy`."""
        if archive.seek(0, os.SEEK_END) > self._size_limit_bytes:
            raise BadEnvironment(f"it is larger than {self._size_limit_bytes:,} bytes")
        archive.seek(0)
        digest, left_bytes = hashlib.sha256(), self._size_limit_bytes
        while chunk := archive.read(_CHUNK_BYTES):
            left_bytes -= len(chunk)
            if left_bytes < 0:
                raise BadEnvironment("it grows while it is read")
            digest.update(chunk)
            if copy is not None:
                copy.write(chunk)
        return digest.hexdigest()

    def _unpack_once(self, digest: str, archive: IO[bytes]) -> None:
        descriptor = _lock(self.root / f"{digest}.making", fcntl.LOCK_EX)
        if descriptor is None:
            return
        try:
            if not (self.root / digest).exists():
                self._make_room()
                self._unpack(digest, archive)
        finally:
            os.close(descriptor)

    def _make_room(self) -> None:
        try:
            self.remove_unused(KEEP_UNUSED_S)
        except OSError as error:
            _log.warning("cannot remove unused environments from %s: %s", self.root, error)

    def _unpack(self, digest: str, archive: IO[bytes]) -> None:
        # Whoever made these held the lock that is now ours, and died.
        for stale in self.root.glob(f".{digest}.*"):
            shutil.rmtree(stale, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{digest}.", dir=self.root))
        try:
            partial.chmod(0o755)
            # Somebody may change the archive at any time. So a private copy is unpacked, which was hashed while it was made.
            with tempfile.TemporaryFile(dir=self.root) as copy:
                if self._digest(archive, copy) != digest:
                    raise BadEnvironment("it was changed while it was read: try again")
                unpack(copy, partial, self._size_limit_bytes)
            partial.rename(self.root / digest)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _discard(self, path: Path) -> None:
        # Out of sight first: a half-removed environment must not be found.
        doomed = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=self.root))
        if path.is_dir():
            path.rename(doomed / "environment")
        for leftover in self.root.glob(f".{path.name}.*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _make_root(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True, mode=0o755)
        info = self.root.stat()
        foreign = info.st_uid != os.geteuid()
        if foreign or stat.S_IMODE(info.st_mode) & 0o022:
            # Interpreters are started from here: nobody else may put any in place.
            raise BadEnvironment(
                f"the cache {self.root} must belong to this user and be writable by nobody else"
            )


def _opened(archive: Path) -> IO[bytes]:
    try:
        return open_file(archive)
    except OSError as error:
        raise BadEnvironment(f"it cannot be read: {error.strerror}") from error


def _lock(path: Path, operation: int) -> int | None:
    """An open lock file, locked; None where it is taken (LOCK_NB) or was just removed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, operation)
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
