"""The page as a browser gets it, `page.html` with headers that confine it, and the data that it asks for every
second.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import orjson

PAGE = "/"
"""The path of the page. A link on any site may open it, since reading it changes nothing."""
_FILE = Path(__file__).with_name("page.html")
Headers = tuple[tuple[bytes, bytes], ...]


def page() -> tuple[Headers, bytes]:
    text = _FILE.read_text()
    policy = (b"Content-Security-Policy", _policy(text).encode())
    return (policy, *_HEADERS), text.encode()


def encoded(shown: object) -> bytes:
    """Return an overview, or an error in its place, as JSON."""
    try:
        return orjson.dumps(shown)
    except TypeError:
        # Names of files and texts of models may contain bytes that are no UTF-8, which orjson refuses.
        return json.dumps(shown, separators=(",", ":")).encode()


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
