"""Lists and reads the files of one revision of a model on the Hugging Face Hub, or on a mirror of it.

The Hub is not trusted, and a mirror even less. Each answer has a bound and a deadline. A revision is resolved to a
commit once, and whatever is read of it must have the hash that the commit's list of files says: SHA-256 for large
files, the hash of git's blob for small ones. So it does not matter which host a file comes from.

`huggingface_hub` says where the Hub is, who asks and how connections are made, so its variables and its login work as
its users know them. It does not fetch the files: version 2.4 names a file on disk by a header of the answer, writes as
much as comes, compares no hash, and throws away what it has of a broken file. What it has fetched before is read from
its cache. Offline, that is the second place where a commit is looked for, after the lists in moonpool's own cache.

Theory of operation. Threads that come first at the same time wait for the one that asks the Hub for the revision, as
they all must get the same commit: `_lock` is held meanwhile. Afterwards nothing here changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urljoin

from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.extras import how_to_install
from moonpool.runtime.process.files import RepositoryError, parsed_json, read_file
from moonpool.runtime.repository.cloud_address import CONNECT_S, READ_S, CloudAddress, without_secrets
from moonpool.runtime.repository.cloud_store import MOST_FILES, CloudFile, CloudListing, checked_listing, checked_path
from moonpool.runtime.version import VERSION

_log = RuntimeLog("moonpool")

# The bounds of an answer of the Hub that is no file, and of a list of files in pages, each of which has a thousand on
# the Hub itself. A list in moonpool's cache is whole.
_MOST_ANSWER_BYTES, _MOST_PAGES, _MOST_LIST_BYTES = 16 << 20, 200, 32 << 20
# What an answer's arrays and objects, and all of its values, are at most: a file has two objects, with ten values. The
# shortest are three bytes in an answer, and take thirty times as much here.
_MOST_OBJECTS, _MOST_VALUES = 2 * MOST_FILES, 10 * MOST_FILES
_ANSWER_S = 60.0
# So much of a file must come in that time.
_LEAST_BYTES, _LEAST_S = 1 << 20, 60.0
_PIECE_BYTES = 1 << 20
_PAUSES_S = (0.5, 2.0)
_COMMIT = re.compile("[0-9a-f]{40}")
_OID = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


class HubAnswer(Exception):
    """An answer of the Hub with another status than 200 or 206."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"HTTP status {status}{code and f', {code}'}")
        self.status = status


class _Broken(Exception):
    """An answer that asking again will not mend."""


class HubStore:
    """The files of one model at one address, `hf://owner/model@revision`. Any thread may call any method."""

    def __init__(self, address: CloudAddress, lists: Path) -> None:
        """Keep lists of commits in the folder `lists`. Raises `RepositoryError` without the package."""
        try:
            from huggingface_hub import constants, get_session, get_token
        except ImportError as error:
            raise RepositoryError(
                f"{address.url}: hf:// needs the package huggingface_hub from version 1 on: "
                f"{how_to_install('cloud', 'huggingface_hub')}"
            ) from error
        repo, _, revision = address.path.partition("@")
        # The address without a revision.
        self.url = f"hf://{repo}"
        self._address = address
        self._lists = lists
        self._session: Callable[[], Any] = get_session
        token = address.options.get("token") or (None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token())
        self._headers = {"User-Agent": f"moonpool/{VERSION}"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self.endpoint = constants.ENDPOINT
        self._is_offline = bool(constants.HF_HUB_OFFLINE)
        self.repo, self._revision = repo, revision.replace("%2F", "/") or "main"
        if any(part in ("", ".", "..") for part in self._revision.split("/")):
            raise self._refusal("a part of the revision is empty, '.' or '..'")
        # Where `huggingface_hub` has what it fetched.
        self._known = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
        self._lock = threading.Lock()
        self._found: tuple[str, CloudListing] | None = None

    def find(self, stop: threading.Event) -> tuple[str, CloudListing]:
        """Return the commit and its files. Asks once, so the revision stays what it was at first.

        The tags of the files are their hashes. Raises `RepositoryError`.
        """
        with self._lock:
            if self._found is None:
                self._found = self._find_offline() if self._is_offline else self._find(stop)
            return self._found

    def _find(self, stop: threading.Event) -> tuple[str, CloudListing]:
        api = f"{self.endpoint}/api/models/{self.repo}"
        commit = self._revision
        if not _COMMIT.fullmatch(commit):
            named, _ = self._json(f"{api}/revision/{quote(self._revision, safe='')}", stop)
            commit = str(named.get("sha")) if isinstance(named, dict) else ""
            if not _COMMIT.fullmatch(commit):
                raise self._refusal(f"the Hub names no commit for the revision {self._revision!r:.80}")
            self._write(self._list_name(self._revision), commit.encode())
        facts: dict[str, dict[str, Any]] = {}
        count = 0
        page = f"{api}/tree/{commit}?recursive=true"
        for _ in range(_MOST_PAGES):
            found, following = self._json(page, stop)
            if not isinstance(found, list):
                raise self._refusal("the Hub's answer is not a list of files")
            count += len(found)
            if count > 2 * MOST_FILES:
                raise self._refusal(f"the Hub lists more than {MOST_FILES:,} files and folders")
            # Page by page, since of an entry no more is kept than this.
            self._read_page(found, facts)
            if following is None:
                listing = checked_listing(self.repo, facts)
                self._write(self._list_name(commit), _text_of(listing))
                return commit, listing
            page = following
        raise self._refusal(f"the Hub's list of files has more than {_MOST_PAGES} pages")

    def _read_page(self, entries: list[Any], facts: dict[str, dict[str, Any]]) -> None:
        """Add the files of a page of the list, whose names and sizes are checked then as those of any store."""
        for each in entries:
            if not isinstance(each, dict) or not isinstance(path := each.get("path"), str):
                raise self._refusal("the Hub's list of files has an entry without a path")
            if each.get("type") == "directory":
                continue
            checked_path(self.repo, name := f"{self.repo}/{path}")
            if path in facts:
                raise self._refusal(f"the Hub lists {path!r:.200} twice")
            lfs = each.get("lfs")
            oid, size = (lfs.get("oid"), lfs.get("size")) if isinstance(lfs, dict) else (each.get("oid"), None)
            if not isinstance(oid, str) or not _OID.fullmatch(oid):
                raise self._refusal(f"the Hub says no hash of {path!r:.200}")
            if size is not None and size != each.get("size"):
                raise self._refusal(f"the Hub says two sizes of {path!r:.200}")
            facts[path] = {"name": name, "size": each.get("size"), "ETag": oid}

    # Lists in the cache

    def _list_name(self, revision: str) -> str:
        # The end tells it from small files, whose names are the hashes of what somebody chose.
        return hashlib.sha256(repr((self.endpoint, self.repo, revision)).encode()).hexdigest() + ".list"

    def _write(self, name: str, text: bytes) -> None:
        """Keep a text for those who are offline."""
        with contextlib.suppress(OSError):
            self._lists.mkdir(parents=True, exist_ok=True, mode=0o700)
            made = self._lists / f"{name}.{os.getpid()}-{threading.get_ident()}"
            made.write_bytes(text)
            os.replace(made, self._lists / name)

    @staticmethod
    def _is_own(folder: Path) -> bool:
        try:
            facts = folder.stat()
        except OSError:
            return False
        return facts.st_uid == os.geteuid() and not facts.st_mode & 0o022

    def _find_offline(self) -> tuple[str, CloudListing]:
        commit = self._revision
        if not _COMMIT.fullmatch(commit):
            commit = ""
            files = [self._lists / self._list_name(self._revision)] if self._is_own(self._lists) else []
            for file in (*files, self._known / "refs" / self._revision):
                with contextlib.suppress(OSError, ValueError):
                    commit = commit or read_file(file, 100).decode().strip()
        if _COMMIT.fullmatch(commit):
            with contextlib.suppress(OSError, ValueError):
                if not self._is_own(self._lists):
                    raise FileNotFoundError
                listing = _listing_in(parsed_json(read_file(self._lists / self._list_name(commit), _MOST_LIST_BYTES)))
                return commit, listing
            if known := self._known_listing(commit):
                return commit, known
        raise self._refusal(
            f"HF_HUB_OFFLINE is set, and neither moonpool's cache nor {self._known} has its revision "
            f"{self._revision!r:.80}",
            "NOT_FOUND",
        )

    def _known_listing(self, commit: str) -> CloudListing | None:
        """Return the files that `huggingface_hub` has of a commit. Each is a link to a content named by its hash."""
        folder = self._known / "snapshots" / commit
        facts = {}
        for file in folder.rglob("*"):
            oid = os.path.basename(os.path.realpath(file))
            if file.is_file() and _OID.fullmatch(oid):
                path = file.relative_to(folder).as_posix()
                facts[path] = {"name": f"{self.repo}/{path}", "size": file.stat().st_size, "ETag": oid}
        return checked_listing(self.repo, facts) if facts else None

    # Content

    def listing(self, name: str, stop: threading.Event) -> CloudListing:  # noqa: ARG002 - as of any store
        """Return the files of the commit. Raises `RepositoryError`."""
        return self.find(stop)[1]

    def sha256(self, file: CloudFile) -> str | None:
        """Return the hash of a file's content, if the Hub says that one."""
        return file.tag if len(file.tag) == 64 else None

    def close(self) -> None:
        """Do nothing: `huggingface_hub` owns the connections."""

    def read_text(self, file: CloudFile, most_bytes: int, stop: threading.Event) -> bytes:
        """Return the content of a small file. Raises `RepositoryError`."""
        if file.size_bytes > most_bytes:
            raise self._refusal(f"{file.path} has {file.size_bytes:,} bytes, and {most_bytes:,} is the most")
        pieces: list[bytes] = []
        self.read("", file, pieces.append, stop)
        text = b"".join(pieces)
        if self.sha256(file) is not None:
            self._check(file, hashlib.sha256(text))
        self._write(file.tag, text)
        return text

    def _check(self, file: CloudFile, digest: hashlib._Hash) -> None:
        if digest.hexdigest() != file.tag:
            what = f"the content of {file.path} has the hash {digest.hexdigest()}, and the Hub's list says {file.tag}"
            raise self._refusal(what)

    def read(
        self,
        name: str,  # noqa: ARG002 - as of any store
        file: CloudFile,
        write: Callable[[bytes], object],
        stop: threading.Event,
        start: int = 0,
    ) -> bool:
        """Read a file from the byte `start` on, piece by piece. Whoever reads a file with a `sha256` compares it.

        Raises `RepositoryError`, also if the file is another one.
        """
        if self.sha256(file) is not None:
            self._read(file, write, stop, start)
            return True
        digest = hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)

        def write_and_hash(piece: bytes) -> None:
            digest.update(piece)
            write(piece)

        self._read(file, write_and_hash, stop, 0)
        self._check(file, digest)
        return True

    def _read(self, file: CloudFile, write: Callable[[bytes], object], stop: threading.Event, start: int) -> None:
        if self._read_known(file, write, start):
            return
        if self._is_offline:
            raise self._refusal(f"HF_HUB_OFFLINE is set, and {file.path} is in no cache", "NOT_FOUND")
        commit, _ = self.find(stop)
        url = f"{self.endpoint}/{self.repo}/resolve/{commit}/{quote(file.path)}"
        at, tries, tried_at = start, 0, start
        while at < file.size_bytes:
            try:
                for piece in self._pieces(url, file, at, stop):
                    write(piece)
                    at += len(piece)
            except Exception as error:  # the library for HTTP has errors of its own
                if at - tried_at >= _LEAST_BYTES:
                    tries, tried_at = 0, at
                if tries == len(_PAUSES_S) or _is_final(error):
                    self._fails(file.path, error)
                _log.info("%s/%s broke off at %d bytes: %s", self.url, file.path, at, self._text(error))
                stop.wait(_PAUSES_S[tries])
                tries += 1

    def _read_known(self, file: CloudFile, write: Callable[[bytes], object], start: int) -> bool:
        """Read a file from one of the caches, in which it is named by its hash. Returns False if it is not there."""
        for folder in (self._lists, self._known / "blobs"):
            with contextlib.suppress(OSError):
                descriptor = os.open(folder / file.tag, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                with open(descriptor, "rb") as source:
                    facts = os.fstat(descriptor)
                    if stat.S_ISREG(facts.st_mode) and facts.st_size == file.size_bytes:
                        source.seek(start)
                        for piece in iter(partial(source.read, _PIECE_BYTES), b""):
                            write(piece)
                        return True
        return False

    def _pieces(self, url: str, file: CloudFile, at: int, stop: threading.Event) -> Iterator[bytes]:
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={at}-"} if at else {})
        with self._get(url, headers, stop) as answer:
            # A server may send the whole file in place of its rest.
            passed = at if answer.status_code == 200 else 0
            left = file.size_bytes - at
            for piece in self._bounded(answer.iter_raw(), stop):
                known, passed = passed, max(0, passed - len(piece))
                rest = piece[known:]
                left -= len(rest)
                if left < 0:
                    raise _Broken(f"the Hub sends more than the {file.size_bytes:,} bytes that it lists")
                if rest:
                    yield rest
            if left:
                raise EOFError(f"it ended {left:,} bytes before its end")

    @staticmethod
    def _bounded(pieces: Iterator[bytes], stop: threading.Event) -> Iterator[bytes]:
        """Pass pieces on as long as enough of them come in time. Raises TimeoutError."""
        begin_s, count = time.monotonic(), 0
        for piece in pieces:
            if stop.is_set():
                raise _Broken("the load was given up")
            count += len(piece)
            now_s = time.monotonic()
            if count >= _LEAST_BYTES:
                begin_s, count = now_s, 0
            elif now_s - begin_s > _LEAST_S:
                raise TimeoutError(f"{count:,} bytes came in {_LEAST_S:g} s")
            yield piece

    @contextlib.contextmanager
    def _get(self, url: str, headers: Mapping[str, str], stop: threading.Event) -> Iterator[Any]:
        """Ask for an address, and yield the answer once its head is there. Raises `HubAnswer` and `_Broken`."""
        if stop.is_set():
            raise _Broken("the load was given up")
        timeout = (CONNECT_S, READ_S, READ_S, CONNECT_S)
        with self._session().stream("GET", url, headers={**self._headers, **headers}, timeout=timeout) as answer:
            if answer.status_code not in (200, 206):
                raise HubAnswer(answer.status_code, str(answer.headers.get("X-Error-Code", ""))[:60])
            yield answer

    def _json(self, url: str, stop: threading.Event) -> tuple[Any, str | None]:
        """Return an answer in JSON, and the address of the next page. Raises `RepositoryError`."""
        for pause_s in (*_PAUSES_S, None):
            try:
                with self._get(url, {"Accept-Encoding": "identity"}, stop) as answer:
                    text, begin_s = bytearray(), time.monotonic()
                    for piece in answer.iter_raw():
                        text += piece
                        if len(text) > _MOST_ANSWER_BYTES:
                            raise _Broken(f"the answer has more than {_MOST_ANSWER_BYTES >> 20} MiB")
                        if time.monotonic() - begin_s > _ANSWER_S:
                            raise _Broken(f"no answer within {_ANSWER_S:g} s")
                    return _parsed(text), self._next(url, answer)
            except Exception as error:  # the library for HTTP has errors of its own
                if pause_s is None or _is_final(error):
                    self._fails("", error)
                _log.info("%s could not be read, and is tried again: %s", self.url, self._text(error))
                stop.wait(pause_s)
        raise RepositoryError(f"{self.url} was not read")

    def _next(self, url: str, answer: Any) -> str | None:
        """Return the address of the next page. The token goes there, so it must be the Hub's own."""
        link = answer.links.get("next", {}).get("url")
        if link is None:
            return None
        found = urljoin(url, str(link))
        if not found.startswith(f"{self.endpoint}/api/"):
            raise _Broken(f"the next page of the list is on another host, {found!r:.100}")
        return found

    # Errors

    def _refusal(self, what: str, code: str = "INVALID_ARG") -> RepositoryError:
        return RepositoryError(f"{self._address.url}: {what}", code)

    def _fails(self, path: str, error: Exception) -> NoReturn:
        what = f"{path} cannot be read: " * bool(path) + self._text(error)
        code = "UNAVAILABLE"
        if isinstance(error, HubAnswer) and error.status in (401, 403, 404):
            what = f"{self.endpoint} has nothing there for this user ({what}); a private or gated model needs HF_TOKEN"
            code = "NOT_FOUND"
        # Not from the error: a traceback would show its whole text.
        raise RepositoryError(f"{self._address.url}: {what}", code) from None

    def _text(self, error: Exception) -> str:
        text = without_secrets(str(error), self._address, os.environ)
        named = isinstance(error, (HubAnswer, _Broken, EOFError, TimeoutError))
        return (text if named and text else f"{type(error).__name__}: {text}")[:500]


def _is_final(error: Exception) -> bool:
    if isinstance(error, HubAnswer):
        return error.status < 500 and error.status not in (408, 429)
    return isinstance(error, (_Broken, ValueError, TypeError, AttributeError))


def _parsed(text: bytearray) -> Any:
    """Return the value of an answer in JSON. Raises `_Broken` for one that would take much more memory than its
    text.
    """
    if text.count(b"{") + text.count(b"[") > _MOST_OBJECTS or text.count(b",") > _MOST_VALUES:
        raise _Broken(f"the answer has more than {_MOST_OBJECTS:,} arrays and objects, or {_MOST_VALUES:,} values")
    return parsed_json(text)


def _text_of(listing: CloudListing) -> bytes:
    """Return a listing as JSON."""
    return json.dumps([[file.path, file.size_bytes, file.tag] for file in listing.files]).encode()


def _listing_in(value: Any) -> CloudListing:
    """Return the listing that `_text_of` has written. Raises ValueError."""
    try:
        facts = {path: {"name": f"m/{path}", "size": size, "ETag": tag} for path, size, tag in value}
        return checked_listing("m", facts)
    except (TypeError, RepositoryError) as error:
        raise ValueError(str(error)) from error
