"""The interpreter that runs a model, its environment variables, and the cache of environments that came packed or as a
list.

Below the sandbox `best-effort`, the interpreter of an environment is a program like any other: a person who may choose
a model's environment may run programs.

Each packed environment is unpacked once for all models and runtimes of a user, into a folder below the hash of its
archive. The archive may change while it is read. What is unpacked is a private copy that was hashed while it was made,
so an environment always has the content of its name. One that is built from a list of packages lies below the hash of
the list.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import IO

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.process.files import open_file
from moonpool.runtime.repository.archive import SIZE_LIMIT_BYTES, unpack
from moonpool.runtime.repository.folder_cache import FolderCache, FolderLease, cache_root

MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
# The ends of the names of lists of packages: a script with a block, requirements, a project, a lock.
_LISTS = (".py", ".txt", ".toml", ".lock")
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
    only_wheels: bool = False,
    stop: Event | None = None,
) -> Environment:
    """Return the environment that `EXECUTION_ENV_PATH` names, by default moonpool's own interpreter.

    PATH and LD_LIBRARY_PATH are put before those of this process. With `only_wheels`, nothing
    of a list is compiled, as that runs code of its packages. Unpacking and building may take minutes, so do not call
    this in an event loop. They fail soon after `stop` is set. Raises `BadEnvironment`.
    """
    if execution_env_path is None:
        return _own_interpreter()
    path = _existing(execution_env_path, model_directory)
    if path.is_dir():
        return _described(path, path)
    cache = cache or EnvironmentCache()
    is_list = path.suffix in _LISTS
    lease = cache.build(path, only_wheels=only_wheels, stop=stop) if is_list else cache.acquire(path, stop)
    try:
        return _described(_top(lease.path), path, lease.release)
    except BaseException:
        lease.release()
        raise


def _own_interpreter() -> Environment:
    if not sys.executable:
        raise BadEnvironment(
            "this Python does not know its interpreter (sys.executable is empty); name one by EXECUTION_ENV_PATH"
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
        failure = BadEnvironment(
            f"Failed to get the canonical path for {_in_full(text, model_directory)}. ({reason}) EXECUTION_ENV_PATH "
            "must name"
            " an environment's directory, a packed environment (.tar, .tar.gz, .zip) or a list of packages."
        )
        # Another interpreter is no replacement: it has other packages.
        failure.instead = {}
        raise failure from None
    return path


def _top(root: Path) -> Path:
    """Return the top of an unpacked environment: the root, or the only directory in it."""
    if not (root / "bin").is_dir():
        inner = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
        if len(inner) == 1 and (inner[0] / "bin").is_dir():
            return inner[0]
    return root


def _described(root: Path, shown: Path, release: Callable[[], None] | None = None) -> Environment:
    python = _interpreter(root, shown)
    # An empty entry in LD_LIBRARY_PATH would mean the current directory.
    libraries = [str(root / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    variables = {
        "PATH": f"{root / 'bin'}:{os.environ.get('PATH') or _DEFAULT_PATH}",
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
            raise BadEnvironment(f"the environment {shown}: bin/{name} is not a program")
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


_CHUNK_BYTES = 1 << 20


class EnvironmentCache(FolderCache):
    """The unpacked environments below one directory, for any number of threads and processes."""

    refusal = BadEnvironment
    contents = "environments"

    def __init__(
        self, root: Path | None = None, *, size_limit_bytes: int = SIZE_LIMIT_BYTES, shows_progress: bool = False
    ) -> None:
        """With `shows_progress`, the tools that build environments write to this program's stderr."""
        super().__init__(cache_root() / "environments" if root is None else root)
        self._size_limit_bytes = size_limit_bytes
        self._shows_progress = shows_progress

    def acquire(self, archive: Path, stop: Event | None = None) -> FolderLease:
        """Return a lease of the unpacked environment of an archive, and unpack it if nobody has.

        Before unpacking, environments that nobody has used for `KEEP_UNUSED_S` are removed. Blocks while another thread
        or process unpacks the same archive, until `stop` is set. Raises `BadEnvironment`.
        """
        try:
            with _opened(archive) as stream:
                digest = self._digest(stream)
                return self.lease(digest, lambda folder: self._unpack(digest, stream, folder, stop), stop)
        except BadEnvironment as error:
            raise BadEnvironment(f"the packed environment {archive}: {error}") from error
        except OSError as error:
            what = f"cannot unpack {archive} into {self.root}: {error}"
            raise BadEnvironment(f"{what}; XDG_CACHE_HOME names another place") from error

    def build(self, path: Path, *, only_wheels: bool = False, stop: Event | None = None) -> FolderLease:
        """Return a lease of the environment of a list of packages, and build it if nobody has. Otherwise as `acquire`.

        If `stop` is set, the tool that builds is ended.
        """
        # Few models have a list.
        from moonpool.runtime.repository.environment_builder import Builder
        from moonpool.runtime.repository.package_list import read_list

        wanted = read_list(path)
        digest = wanted.digest(only_wheels=only_wheels)

        def fill(folder: Path) -> None:
            folder.chmod(0o755)
            builder = Builder(wanted, folder, stop or Event(), only_wheels, self._shows_progress)
            builder.build(self.root / digest)

        try:
            return self.lease(digest, fill, stop)
        except OSError as error:
            what = f"cannot build the environment of {path} in {self.root}: {error}"
            raise BadEnvironment(f"{what}; XDG_CACHE_HOME names another place") from error

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

    def _unpack(self, digest: str, archive: IO[bytes], folder: Path, stop: Event | None) -> None:
        folder.chmod(0o755)
        # The archive may be changed at any time. So a private copy is unpacked, which is hashed while it is made.
        with tempfile.TemporaryFile(dir=self.root) as copy:
            if self._digest(archive, copy) != digest:
                raise BadEnvironment("it was changed while it was read: try again")
            unpack(copy, folder, self._size_limit_bytes, stop)


def _opened(archive: Path) -> IO[bytes]:
    try:
        return open_file(archive)
    except OSError as error:
        raise BadEnvironment(f"it cannot be read: {error.strerror}") from error
