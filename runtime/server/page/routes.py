"""The HTTP routes of the page: `/`, and the data that it asks for every second."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from concurrent.futures import Executor
from pathlib import Path

import orjson

from moonpool.runtime.server.http.head import JSON, Headers
from moonpool.runtime.server.http.routes import Route, RouteReply, RouteRequest
from moonpool.runtime.server.page.overview import Overview

PAGE = "/"
"""The path of the page. A link on any site may open it, since reading it changes nothing."""
_FILE = Path(__file__).with_name("page.html")
_NUMBER = re.compile(r"[0-9]{1,15}")


def routes(overview: Overview, executor: Executor) -> list[Route]:
    """Return the routes `/` and `/v2/moonpool/overview`. `executor` makes the overview."""
    page = _FILE.read_text()
    policy = (b"Content-Security-Policy", _policy(page).encode())
    shown = RouteReply(200, (policy, *_HEADERS), page.encode())

    async def show_page(_: RouteRequest) -> RouteReply:
        return shown

    async def show_overview(request: RouteRequest) -> RouteReply:
        since = request.query("since")
        if since is not None and not _NUMBER.fullmatch(since):
            error = {"error": "since must be the number of samples that are known: 0 or more"}
            return _json(_encoded(error), 400)
        number = None if since is None else int(since)

        def tell() -> bytes:
            return _encoded(overview.snapshot(number))

        # An overview reads from /proc, which takes longer with every process.
        return _json(await asyncio.get_running_loop().run_in_executor(executor, tell))

    return [
        Route(path, {"GET": endpoint, "HEAD": endpoint})
        for path, endpoint in ((PAGE, show_page), ("/v2/moonpool/overview", show_overview))
    ]


_HEADERS: Headers = (
    (b"Cache-Control", b"no-cache"),
    (b"Cross-Origin-Opener-Policy", b"same-origin"),
    (b"Referrer-Policy", b"no-referrer"),
    (b"X-Content-Type-Options", b"nosniff"),
    (b"X-Frame-Options", b"DENY"),
    (b"Content-Type", b"text/html; charset=utf-8"),
)


def _policy(page: str) -> str:
    """Return a policy that allows the page its own script and style, and requests to its own origin."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hashes(page, 'script')}",
            f"style-src {_hashes(page, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _hashes(page: str, tag: str) -> str:
    found = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = (hashlib.sha256(text.encode()).digest() for text in found)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def _encoded(shown: object) -> bytes:
    try:
        return orjson.dumps(shown)
    except TypeError:
        # Names of files and texts of models may contain bytes that are no UTF-8, which orjson refuses.
        return json.dumps(shown, separators=(",", ":")).encode()


def _json(text: bytes, status: int = 200) -> RouteReply:
    headers = ((b"Cache-Control", b"no-store"), (b"X-Content-Type-Options", b"nosniff"), *JSON)
    return RouteReply(status, headers, text)
