"""A Hub on this machine, which may lie. Its files are in memory."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

_LARGE = (".safetensors", ".bin", ".model")


def blob_hash(content: bytes) -> str:
    """Return the hash that git has of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub:
    """Repositories by name, each with its commits, and the revisions that name these."""

    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], dict[str, bytes]] = {}
        self.revisions: dict[tuple[str, str], str] = {}
        # The paths of all questions, in order.
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        # Changes an entry of a list of files.
        self.listed: Callable[[dict[str, Any]], dict[str, Any]] = lambda entry: entry
        # More entries of a list of files.
        self.more: list[dict[str, Any]] = []
        # Answers in place of the Hub where it returns True.
        self.instead: Callable[[BaseHTTPRequestHandler, str], bool] = lambda _, __: False
        self.url = ""

    def put(self, repo: str, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Make a commit, which the revision names then. Returns its hash."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[repo, commit] = dict(files)
        self.revisions[repo, revision] = commit
        return commit

    @property
    def fetched(self) -> list[str]:
        """Return the files that were asked for."""
        return [path.split("/resolve/")[1].partition("/")[2] for path in self.asked if "/resolve/" in path]

    def entry(self, path: str, content: bytes) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "file", "oid": blob_hash(content), "size": len(content), "path": path}
        if path.endswith(_LARGE):
            oid = hashlib.sha256(content).hexdigest()
            found["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
        return self.listed(found)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append(path)
        hub.headers.append(dict(self.headers))
        if hub.instead(self, path):
            return
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4], "/".join(parts[5:]))
        elif len(parts) < 5:
            self.answer(404, b"")
        else:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _api(self, repo: str, what: str, revision: str) -> None:
        commit = revision if (repo, revision) in self.hub.commits else self.hub.revisions.get((repo, revision))
        if commit is None:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif what == "revision":
            files = [{"rfilename": path} for path in self.hub.commits[repo, commit]]
            self.answer(200, json.dumps({"id": repo, "sha": commit, "siblings": files}).encode())
        else:
            found = [self.hub.entry(*each) for each in self.hub.commits[repo, commit].items()]
            self.answer(200, json.dumps([*found, *self.hub.more]).encode())

    def _file(self, repo: str, commit: str, path: str) -> None:
        content = self.hub.commits.get((repo, commit), {}).get(path)
        if content is None:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        begin = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        facts = {"ETag": f'"{blob_hash(content)}"', "X-Repo-Commit": commit}
        self.answer(206 if begin else 200, content[begin:], facts)

    def answer(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def running() -> Iterator[Hub]:
    """Serve a Hub on loopback."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
