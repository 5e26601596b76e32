"""Request line and headers of a message, parsed by httptools."""

from __future__ import annotations

from collections import defaultdict
from http import HTTPStatus
from typing import TYPE_CHECKING

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from moonpool.ipc.memo import Memo

if TYPE_CHECKING:
    from collections.abc import Sequence

# Clients repeat themselves: what they send before the body is the same bytes every time. Longer heads
# and those of other clients' making are parsed as they come.
_MEMORABLE_BYTES = 2048
# The header that says how much of a body is JSON; without it, all is.
HEADER_LENGTH = b"inference-header-content-length"
_VERSIONS = ("1.0", "1.1")
# Headers that decide where a request ends, whose it is and how it is read.
_SINGLE = frozenset(
    (
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        HEADER_LENGTH,
        b"origin",
        b"sec-fetch-dest",
        b"sec-fetch-mode",
        b"sec-fetch-site",
        b"transfer-encoding",
    )
)

Headers = tuple[tuple[bytes, bytes], ...]
JSON: Headers = ((b"Content-Type", b"application/json"),)
TEXT: Headers = ((b"Content-Type", b"text/plain"),)


class BadMessage(Exception):
    """What cannot be answered in any other way than with this status, and the end of the connection."""

    def __init__(self, status: int, text: str, headers: Headers = JSON) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = headers


class Head:
    """What a message says before its body. The same object may stand for many messages: do not change it."""

    __slots__ = (
        "content_length",
        "expects_continue",
        "forwarded",
        "headers",
        "is_chunked",
        "keeps_alive",
        "method",
        "plan",
        "raw_headers",
        "target",
        "version",
    )

    def __init__(
        self, method: str, target: bytes, version: str, raw: Sequence[tuple[bytes, bytes]]
    ) -> None:
        self.method = method
        self.target = target
        self.version = version
        self.raw_headers = raw
        # By lower-case name; the values of one name are a list, as HTTP has it.
        self.headers = dict(raw)
        if len(self.headers) != len(raw):
            self.headers = _joined(raw)
        self.content_length = int(self.headers.get(b"content-length", b"0"))
        self.is_chunked = b"transfer-encoding" in self.headers
        self.expects_continue = self.headers.get(b"expect", b"").lower() == b"100-continue"
        self.keeps_alive = True
        # What whoever handles such requests has worked out for all of them.
        self.plan: object = None
        # What the server was told to hand on to models, as parameters.
        self.forwarded: dict[str, str] = {}


class HeadParser:
    """Takes a head in pieces; `head` is there once all of it is."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self._parser = HttpRequestParser(self)
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []

    def on_url(self, piece: bytes) -> None:
        """Called by httptools."""
        self._target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by httptools."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Called by httptools."""
        parser = self._parser
        method = parser.get_method().decode()
        self.head = Head(method, self._target, parser.get_http_version(), self._headers)
        self.head.keeps_alive = parser.should_keep_alive()

    def feed(self, piece: bytes) -> None:
        """Take what must not go beyond the head. Raises `BadMessage`."""
        try:
            self._parser.feed_data(piece)
        except HttpParserUpgrade:
            # Nothing else is spoken here; a server may go on as if nobody had asked.
            if self.head is not None and self.head.method == "CONNECT":
                raise BadMessage(HTTPStatus.METHOD_NOT_ALLOWED, "this is no proxy") from None
        except HttpParserError as error:
            raise BadMessage(HTTPStatus.BAD_REQUEST, f"malformed request: {error}") from error

    def finish(self) -> Head:
        """The head, of which everything has been fed. Raises `BadMessage`."""
        head = self.head
        # The two refer to each other, and would wait for the collector.
        del self._parser
        if head is None:
            raise BadMessage(HTTPStatus.BAD_REQUEST, "malformed request: no request line")
        if head.version not in _VERSIONS:
            raise BadMessage(
                HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, f"HTTP/{head.version} is not spoken here"
            )
        if len(head.headers) != len(head.raw_headers):
            _check_repeated(head)
        encoding = head.headers.get(b"transfer-encoding")
        if encoding is not None and encoding.lower() != b"chunked":
            raise BadMessage(
                HTTPStatus.NOT_IMPLEMENTED,
                f"unknown transfer encoding '{encoding.decode('latin-1')}'",
            )
        if encoding is not None and head.version == "1.0":
            # A proxy that speaks HTTP/1.0 passes the header on without understanding it.
            raise BadMessage(HTTPStatus.BAD_REQUEST, "malformed request: chunks in HTTP/1.0")
        return head


def _joined(raw: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    values: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for name, value in raw:
        values[name].append(value)
    return {name: b", ".join(given) for name, given in values.items()}


def _check_repeated(head: Head) -> None:
    """Raise `BadMessage` for a header that stands twice and may stand only once.

    A proxy before this server may use the other one.
    """
    seen = set()
    for name, _ in head.raw_headers:
        if name in seen and name in _SINGLE:
            raise BadMessage(
                HTTPStatus.BAD_REQUEST, f"malformed request: two headers '{name.decode()}'"
            )
        seen.add(name)


class Heads:
    """The heads of a server's clients. For one thread."""

    def __init__(self) -> None:
        self._known: Memo[bytes, Head] = Memo(1024)

    def read(self, raw: bytes, parser: HeadParser | None) -> Head:
        """The head in these bytes, which end with its empty line. Raises `BadMessage`.

        `parser` has had all of it but the end where it came in pieces.
        """
        head = self._known.get(raw)
        if head is not None:
            return head
        if parser is None:
            parser = HeadParser()
            parser.feed(raw)
        head = parser.finish()
        if len(raw) <= _MEMORABLE_BYTES:
            self._known.keep(raw, head)
        return head
