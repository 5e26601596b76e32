"""Lists and reads the files of one repository in the cloud, through fsspec.

A store is not trusted. Its names become paths on this machine, so a name that no plain file can have is refused before
anything is written. Sizes are checked against what comes. A store may also be slow, or gone: every question to it has a
deadline, and is asked again where that may help.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol

from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.extras import how_to_install
from moonpool.runtime.process.files import DEEPEST, RepositoryError
from moonpool.runtime.repository.cloud_address import CloudAddress, without_secrets

_log = RuntimeLog("moonpool")

# The bounds of one model.
MOST_FILES = 100_000
MOST_BYTES = 1 << 40
_LONGEST_NAME, _LONGEST_PATH = 255, 1024
# The most bytes of one question, and the time for its answer. A slower connection is one that does not work.
CHUNK_BYTES = 16 << 20
_ANSWER_S = 60.0
# The times that a question is asked, and the pauses before the second and the third time.
_PAUSES_S = (0.5, 2.0)

# The names under which file systems have what changes with a file's content, and its time.
_TAGS = ("ETag", "blob_id", "md5Hash", "generation", "etag")
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")


class CloudFile(NamedTuple):
    """One file of a model: its path below the model's folder, its size, and the store's word for its content."""

    path: str
    size_bytes: int
    tag: str
    # The time of its last change. It differs if a file is put there again with the same content.
    time: str


class CloudListing(NamedTuple):
    """All files of a model, and its folders, of which a store may have empty ones. Both are sorted."""

    files: tuple[CloudFile, ...]
    folders: tuple[str, ...]

    @property
    def contents(self) -> list[tuple[str, int, str]]:
        """Return path, size and tag of all files. A file that is put there again unchanged has the same ones."""
        return [(file.path, file.size_bytes, file.tag) for file in self.files]

    @property
    def size_bytes(self) -> int:
        """Return the size of all files together."""
        return sum(file.size_bytes for file in self.files)


class Store(Protocol):
    """The files of models, as `CloudCopies` lists and reads them. `url` is for logs and errors."""

    url: str

    def listing(self, name: str, stop: threading.Event) -> CloudListing: ...

    def read(
        self, name: str, file: CloudFile, write: Callable[[bytes], object], stop: threading.Event, start: int = 0
    ) -> bool: ...

    def sha256(self, file: CloudFile) -> str | None: ...

    def close(self) -> None: ...


class CloudStore:
    """The files below one address. Any thread may call any method; all of them wait for the network."""

    def __init__(self, address: CloudAddress) -> None:
        """Raise `RepositoryError` if the package for the scheme is missing, or does not take the address."""
        self.url = address.url
        self._address = address
        try:
            self._files: Any = _file_system(address)
        except ModuleNotFoundError as error:
            raise RepositoryError(
                f"{address.url}: {address.scheme}:// needs the package {address.service.package} (the extra 'cloud'), "
                "and there "
                f"is no {error.name}: {how_to_install('cloud', address.service.package)}"
            ) from error
        except Exception as error:  # libraries for credentials raise errors of their own
            self._fails(self.url, error)
        self._path = address.path

    def close(self) -> None:
        """Close the connections. Later questions are refused."""
        # Its own finalizer closes them: each library has another way.
        self._files = None

    def models(self, stop: threading.Event) -> list[str]:
        """List the names of the folders, sorted. Raises `RepositoryError`."""
        found = self._ask("ls", self.url, stop, self._path, detail=True)
        names = {str(each["name"]).rstrip("/").rpartition("/")[2] for each in found if each.get("type") == "directory"}
        return sorted(names - {"", ".", ".."})

    def listing(self, name: str, stop: threading.Event) -> CloudListing:
        """List the files of a model. Raises `RepositoryError`, with NOT_FOUND if there are none."""
        url, path = f"{self.url}/{name}", f"{self._path}/{name}"
        found = self._ask("find", url, stop, path, detail=True, withdirs=True)
        listing = checked_listing(path, found)
        if not listing.files:
            raise RepositoryError(f"no model '{name}' in the repository {self.url}", "NOT_FOUND")
        return listing

    def read(
        self, name: str, file: CloudFile, write: Callable[[bytes], object], stop: threading.Event, start: int = 0
    ) -> bool:
        """Read a file from the byte `start` on, piece by piece. Returns False if it is not what it was listed as.

        Raises `RepositoryError`.
        """
        url, path = f"{self.url}/{name}/{file.path}", f"{self._path}/{name}/{file.path}"
        for begin in range(start, file.size_bytes, CHUNK_BYTES):
            end = min(begin + CHUNK_BYTES, file.size_bytes)
            try:
                piece = self._ask("cat_file", url, stop, path, start=begin, end=end)
            except RepositoryError as error:
                if error.code == "NOT_FOUND":
                    return False
                raise
            if len(piece) != end - begin:
                return False
            write(piece)
        return True

    def sha256(self, file: CloudFile) -> str | None:  # noqa: ARG002 - as of a store that knows it
        """Return the hash that a file's content must have; None for a store that does not say it."""
        return None

    def _ask(self, method: str, url: str, stop: threading.Event, *arguments: Any, **options: Any) -> Any:
        """Ask the file system, again if that may help, until `stop` is set."""
        for pause_s in (*_PAUSES_S, None):
            files = self._files
            if files is None:
                raise RepositoryError(f"{url} is not read any more: the runtime was closed")
            if stop.is_set():
                raise RepositoryError(f"{url} is not read any more: the load was given up")
            try:
                return _call(files, method, *arguments, **options)
            except Exception as error:  # each library has errors of its own
                if pause_s is None or _is_final(error):
                    self._fails(url, error)
                _log.info("%s could not be read, and is tried again: %s", url, self._text(error))
                stop.wait(pause_s)
        raise RepositoryError(f"{url} was not read")

    def _fails(self, url: str, error: Exception) -> NoReturn:
        if isinstance(error, FileNotFoundError):
            raise RepositoryError(f"there is nothing at {url}", "NOT_FOUND") from None
        what = f"{url} cannot be read: {self._text(error)}"
        if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
            names = ", ".join(self._address.secrets)
            what = f"{what}; credentials come from {names}"
        # Not from the error: a traceback would show its whole text.
        raise RepositoryError(what, "UNAVAILABLE") from None

    def _text(self, error: Exception) -> str:
        if isinstance(error, TimeoutError) and not str(error):
            return f"no answer within {_ANSWER_S:g} s"
        text = without_secrets(str(error), self._address, os.environ)
        return f"{type(error).__name__}: {text}"[:500]


def _call(files: Any, method: str, *arguments: Any, **options: Any) -> Any:
    if method != "cat_file":
        files.invalidate_cache()
    if not files.async_impl:
        # Their libraries have time limits of their own.
        return getattr(files, method)(*arguments, **options)
    from fsspec.asyn import sync

    coroutine = getattr(files, f"_{method}")
    return sync(files.loop, coroutine, *arguments, timeout=_ANSWER_S, **options)


def _file_system(address: CloudAddress) -> Any:
    import fsspec

    options = dict(address.options)
    if "managed_identity" in options:
        identity = importlib.import_module("azure.identity.aio")
        client = options.pop("managed_identity")
        options["credential"] = identity.ManagedIdentityCredential(client_id=client or None)
    # The file systems of fsspec share their instances and listings in a process. Another repository may have other
    # credentials, and a poll must see what is there now.
    options |= {"skip_instance_cache": True, "use_listings_cache": False}
    protocol = "az" if address.scheme == "as" else address.scheme
    # The class itself first: fsspec has words of its own for a package that is missing.
    importlib.import_module(address.service.package)
    return fsspec.filesystem(protocol, **options)


def _is_final(error: Exception) -> bool:
    """Return True if asking again would only take longer."""
    kinds = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
    programming = (TypeError, ValueError, AttributeError, NotImplementedError)
    return isinstance(error, (*kinds, *programming)) or "Credential" in type(error).__name__


def checked_listing(base: str, found: Mapping[str, Mapping[str, Any]]) -> CloudListing:
    """Return the files and folders below `base`, by their paths there. Raises `RepositoryError` for names no file can
    have.
    """
    files: dict[str, CloudFile] = {}
    folders: set[str] = set()
    for facts in found.values():
        name = str(facts["name"])
        # A store that has no folders may have an object with a slash at its end for an empty one.
        is_folder = facts.get("type") == "directory" or (name.endswith("/") and not facts.get("size"))
        if name.rstrip("/") == base.rstrip("/"):
            continue
        path = checked_path(base, name.removesuffix("/") if is_folder else name)
        if is_folder:
            folders.add(path)
        else:
            files[path] = _file(path, facts)
        folders.update(_parents(path))
        if len(files) + len(folders) > MOST_FILES:
            raise RepositoryError(f"{base} has more than {MOST_FILES:,} files and folders")
    if both := sorted(folders.intersection(files)):
        raise RepositoryError(f"{base} has a file and a folder of the same name, {both[0]!r:.200}")
    listing = CloudListing(tuple(files[path] for path in sorted(files)), tuple(sorted(folders)))
    if listing.size_bytes > MOST_BYTES:
        raise RepositoryError(f"{base} has more than {MOST_BYTES >> 30} GiB")
    return listing


def checked_path(base: str, name: str) -> str:
    """Return the path below `base`. It leads nowhere else, on no machine. Raises `RepositoryError`."""
    path = name.removeprefix(f"{base}/")
    parts = path.split("/")
    try:
        longest, size = max(len(part.encode()) for part in parts), len(path.encode())
    except UnicodeEncodeError:
        longest = size = _LONGEST_PATH + 1
    if (
        not name.startswith(f"{base}/")
        or any(part in ("", ".", "..") for part in parts)
        or "\0" in path
        or longest > _LONGEST_NAME
        or size > _LONGEST_PATH
        or len(parts) > DEEPEST
    ):
        raise RepositoryError(f"{base} has an object {name[:200]!r}, which no file can be named")
    return path


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def _file(path: str, facts: Mapping[str, Any]) -> CloudFile:
    size_bytes = facts.get("size")
    tag = next((str(facts[key]) for key in _TAGS if facts.get(key)), "")
    time = next((str(facts[key]) for key in _TIMES if facts.get(key)), "")
    if not isinstance(size_bytes, int) or size_bytes < 0 or not (tag or time):
        raise RepositoryError(f"the store does not say the size and the time of {path!r:.200}")
    return CloudFile(path, size_bytes, tag or time, time)
