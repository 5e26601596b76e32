"""The page at `/`, and what it asks for every second."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from starlette.requests import Request

    from moonpool.runtime.frontend.overview import Overview

PAGE = "/"
"""The path of the page for people. A link on any site may open it, since reading it does nothing."""
_FILE = Path(__file__).with_name("page.html")
_NUMBER = re.compile(r"[0-9]{1,15}")


def routes(overview: Overview, executor: Executor) -> list[Route]:
    """`/` and `/v2/moonpool/overview`, for the HTTP application."""
    page = _FILE.read_text()
    headers = {"Content-Security-Policy": _policy(page), **_HEADERS}

    async def show_page(_: Request) -> Response:
        return Response(page, media_type="text/html", headers=headers)

    async def show_overview(request: Request) -> Response:
        since = request.query_params.get("since")
        if since is not None and not _NUMBER.fullmatch(since):
            error = {"error": "since must be the number of samples that are known: 0 or more"}
            return _json(_encoded(error), 400)
        number = None if since is None else int(since)

        def tell() -> bytes:
            return _encoded(overview.snapshot(number))

        # It reads from /proc, which takes longer with every process.
        return _json(await asyncio.get_running_loop().run_in_executor(executor, tell))

    return [
        Route(PAGE, show_page, methods=["GET"]),
        Route("/v2/moonpool/overview", show_overview, methods=["GET"]),
    ]


_HEADERS = {
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def _policy(page: str) -> str:
    """Nothing but the page's own script and style, and requests to where it came from."""
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
        # Names of files and the words of models may hold what is no text; that must not make the page go blind.
        return json.dumps(shown, separators=(",", ":")).encode()


def _json(text: bytes, status: int = 200) -> Response:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return Response(text, status, media_type="application/json", headers=headers)
