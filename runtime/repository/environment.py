"""The interpreter that runs a model, its environment variables, and the cache of environments that came packed.

Below the sandbox `best-effort`, the interpreter of an environment is a program like any other: a person who may choose a model's
environment may run programs.

Theory of operation. Each packed environment is unpacked once for all models and runtimes of a user, below the hash of its
archive:

    <root>/<sha256>         the environment; it appears by a rename, so it is complete or absent
    <root>/<sha256>.lock    locked shared by those who use it, exclusively by one who removes it; its
                            time is that of the last use
    <root>/<sha256>.making  locked exclusively by one who unpacks or removes it
    <root>/.<sha256>.*      one that is being made or removed; the next process removes what a killed one left

The locks are flocks of open files, so the kernel drops them when a process dies, in any way. There are two because a use
lasts: the second of two processes that come to unpack an environment waits for the first to finish unpacking, not for the
first to end using it.

`acquire` takes the shared lock first and looks for the directory second. The order matters: a process that removes an environment
holds that lock exclusively, so a directory that is seen under it stays. Without a directory it takes `.making`, looks
again, unpacks, and begins anew. A lock file may itself be removed between its opening and its locking. `_lock` compares the
inode under the path with its own, and a lock on a removed file does not count.

The archive may change while it is read. What is unpacked is a private copy that was hashed while it was made, so an
environment always has the content of its name. `_guard` in a lease lets two threads release it at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.process.files import open_file
from moonpool.runtime.repository.archive_member import SIZE_LIMIT_BYTES

MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter, and the variables that its processes need beside the usual ones.

    A packed environment stays unpacked until `release`. The processes must have ended by then.
    """

    python: Path
    variables: Mapping[str, str]
    root: Path | None = None
    _release: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def release(self) -> None:
        """Allow the cache to remove the environment, as no process uses it any more. A second call does nothing."""
        if self._release is not None:
            self._release()


def resolve(
    execution_env_path: str | None,
    model_directory: Path,
    *,
    cache: EnvironmentCache | None = None,
    inherited: Mapping[str, str] | None = None,
) -> Environment:
    """Return the environment that `EXECUTION_ENV_PATH` names, by default moonpool's own interpreter.

    PATH and LD_LIBRARY_PATH are put before those of `inherited`, by default this process's. Unpacking may take minutes, so do
    not call this in an event loop. Raises `BadEnvironment`.
    """
    if execution_env_path is None:
        return _own_interpreter()
    path = _existing(execution_env_path, model_directory)
    base = os.environ if inherited is None else inherited
    if path.is_dir():
        return _described(path, base, path)
    lease = (cache or EnvironmentCache()).acquire(path)
    try:
        return _described(_top(lease.path), base, path, lease.release)
    except BaseException:
        lease.release()
        raise


def _own_interpreter() -> Environment:
    if not sys.executable:
        raise BadEnvironment(
            "this Python does not know its interpreter (sys.executable is empty);"
            " name one by EXECUTION_ENV_PATH"
        )
    return Environment(Path(sys.executable), {})


def expanded(text: str, model_directory: Path) -> Path:
    """Return the absolute path that `EXECUTION_ENV_PATH` names, even if nothing is there. Links are not followed."""
    return Path(os.path.abspath(_in_full(text, model_directory)))


def _in_full(text: str, model_directory: Path) -> str:
    if text.startswith(MODEL_DIRECTORY):
        return str(model_directory) + text.removeprefix(MODEL_DIRECTORY)
    return text


def _existing(text: str, model_directory: Path) -> Path:
    path = expanded(text, model_directory)
    try:
        path.stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadEnvironment(
            f"Failed to get the canonical path for {_in_full(text, model_directory)}. ({reason}) EXECUTION_ENV_PATH must name"
            " an environment's directory or a packed environment (.tar, .tar.gz, .zip)."
        ) from None
    return path


def _top(root: Path) -> Path:
    """Return the top of an unpacked environment: the root, or the only directory in it."""
    if not (root / "bin").is_dir():
        inner = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
        if len(inner) == 1 and (inner[0] / "bin").is_dir():
            return inner[0]
    return root


def _described(
    root: Path,
    inherited: Mapping[str, str],
    shown: Path,
    release: Callable[[], None] | None = None,
) -> Environment:
    python = _interpreter(root, shown)
    # An empty entry in LD_LIBRARY_PATH would mean the current directory.
    libraries = [str(root / "lib"), inherited.get("LD_LIBRARY_PATH", "")]
    variables = {
        "PATH": f"{root / 'bin'}:{inherited.get('PATH') or _DEFAULT_PATH}",
        "LD_LIBRARY_PATH": ":".join(part for part in libraries if part),
    }
    if (root / "conda-meta").is_dir():
        variables["CONDA_PREFIX"] = str(root)
    else:
        variables |= {"VIRTUAL_ENV": str(root), "VIRTUAL_ENV_PROMPT": shown.name}
    return Environment(python, variables, root, release)


def _interpreter(root: Path, shown: Path) -> Path:
    for name in ("python", "python3"):
        python = root / "bin" / name
        if os.path.isfile(python) and os.access(python, os.X_OK):
            return python
        if os.path.exists(python):
            raise BadEnvironment(f"the environment {shown}: bin/{name} is no program")
        if os.path.islink(python):
            raise BadEnvironment(
                f"the environment {shown}: bin/{name} leads to {os.path.realpath(python)}, which is"
                " not there. Virtual environments need the Python they were made with; make this"
                " one again here, or pack a conda environment with conda-pack."
            )
    raise BadEnvironment(
        f"the environment {shown} has no bin/python. EXECUTION_ENV_PATH must name the directory of"
        " a virtual or conda environment, or one packed as .tar, .tar.gz or .zip."
    )


_log = logging.getLogger("moonpool")

# Long enough for a job that runs once a week, short enough for a disk on which archives change daily.
KEEP_UNUSED_S = 8 * 24 * 3600.0
_CHUNK_BYTES = 1 << 20


def default_root() -> Path:
    """Return `$XDG_CACHE_HOME/moonpool/environments`, by default below `~/.cache`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    base = Path(configured) if configured.startswith("/") else Path.home() / ".cache"
    return base / "moonpool" / "environments"


class EnvironmentLease:
    """Keeps an unpacked environment in place until it is released. Any thread may release it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        self._guard = threading.Lock()

    def release(self) -> None:
        """Allow the environment to be removed. A second call does nothing."""
        with self._guard:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.utime(descriptor)
            os.close(descriptor)


class EnvironmentCache:
    """The unpacked environments below one directory, for any number of threads and processes."""

    def __init__(
        self, root: Path | None = None, *, size_limit_bytes: int = SIZE_LIMIT_BYTES
    ) -> None:
        self.root = default_root() if root is None else root
        self._size_limit_bytes = size_limit_bytes

    def acquire(self, archive: Path) -> EnvironmentLease:
        """Return a lease of the unpacked environment of an archive, and unpack it if nobody has.

        Before unpacking, environments that nobody has used for `KEEP_UNUSED_S` are removed. Blocks while another thread or
        process unpacks the same archive. Raises `BadEnvironment`.
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
        """Remove environments that are not used and were not used for so long. Return their paths."""
        if not self.root.is_dir():
            return []
        locks = sorted(self.root.glob("*.lock"))
        return [self.root / lock.stem for lock in locks if self._remove(lock, older_than_s)]

    def _remove(self, lock: Path, older_than_s: float) -> bool:
        # Neither lock is waited for: an environment that is used or made now is not removed. The files of both locks go
        # last, while the locks are held. A process that has one of them open then finds by its inode that it is removed.
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

    def _lease(self, digest: str) -> EnvironmentLease | None:
        descriptor = _lock(self.root / f"{digest}.lock", fcntl.LOCK_SH)
        path = self.root / digest
        if descriptor is None:
            return None
        # Looked at once, as another process may put it there at any moment.
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            os.close(descriptor)
            return None
        if stat.S_ISDIR(mode):
            os.utime(descriptor)
            return EnvironmentLease(path, descriptor)
        os.close(descriptor)
        raise BadEnvironment(f"{path}, where it is to be unpacked, is no directory: remove it")

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
        # Few models have a packed environment, and decompressors take long to import.
        from moonpool.runtime.repository.archive import unpack

        # The process that made these held the lock that this one has now, so it has died.
        for stale in self.root.glob(f".{digest}.*"):
            shutil.rmtree(stale, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{digest}.", dir=self.root))
        try:
            partial.chmod(0o755)
            # The archive may be changed at any time. So a private copy is unpacked, which is hashed while it is made.
            with tempfile.TemporaryFile(dir=self.root) as copy:
                if self._digest(archive, copy) != digest:
                    raise BadEnvironment("it was changed while it was read: try again")
                unpack(copy, partial, self._size_limit_bytes)
            partial.rename(self.root / digest)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _discard(self, path: Path) -> None:
        # The rename comes first: nobody may find an environment that is removed in part.
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
            # Interpreters are started from here, so nobody else may put one in place.
            raise BadEnvironment(
                f"the cache {self.root} must belong to this user and be writable by nobody else"
            )


def _opened(archive: Path) -> IO[bytes]:
    try:
        return open_file(archive)
    except OSError as error:
        raise BadEnvironment(f"it cannot be read: {error.strerror}") from error


def _lock(path: Path, operation: int) -> int | None:
    """Open and lock a lock file; None if it is taken (LOCK_NB) or was just removed."""
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
