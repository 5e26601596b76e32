"""Request line and headers of a message, parsed by httptools, and remembered by their bytes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from http import HTTPStatus

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from moonpool.ipc.memo import Memo

# Clients send the same bytes before each body. Longer heads are parsed every time.
_MEMORABLE_BYTES = 2048
# This header says how much of a body is JSON. Without it, all of the body is.
HEADER_LENGTH = b"inference-header-content-length"
_VERSIONS = ("1.0", "1.1")
# The lengths of the body and of its JSON, which differ where heads are alike, as clients write them.
_LENGTHS = re.compile(rb"(\r\n(?:[Ii]nference-[Hh]eader-)?[Cc]ontent-[Ll]ength: )([0-9]{1,15})(?=\r\n)")
_CONTENT_LENGTH_BYTES = len(b"\r\nContent-Length: ")
_LENGTH_NAMES = frozenset(("content-length", "inference-header-content-length"))
_LEADING_NUMBER = re.compile(rb"\s*([+-]?[0-9]{1,20})")
_WHOLE_URL = re.compile(rb"https?://([^/?]*)(.*)", re.IGNORECASE | re.DOTALL)
# Headers that decide where a request ends, who sent it and how it is read.
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

Body = bytes | bytearray | memoryview
Part = bytes | memoryview
Headers = tuple[tuple[bytes, bytes], ...]
JSON: Headers = ((b"Content-Type", b"application/json"),)
TEXT: Headers = ((b"Content-Type", b"text/plain"),)


class BadHttpMessage(Exception):
    """An error that is answered with this status, and ends the connection."""

    def __init__(self, status: int, text: str, headers: Headers = JSON) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = headers


class Head:
    """Request line and headers. One object may serve many messages with the same head, so nobody changes it. Messages
    whose heads differ in lengths alone share all its attributes but these two.
    """

    __slots__ = (
        "content_length",
        "expects_continue",
        "forwarded",
        "has_repeated",
        "header_length",
        "headers",
        "is_chunked",
        "keeps_alive",
        "method",
        "plan",
        "raw_headers",
        "target",
        "version",
    )

    def __init__(self, method: str, target: bytes, version: str, raw: Sequence[tuple[bytes, bytes]]) -> None:
        self.method = method
        self.target = target
        self.version = version
        # As they were sent.
        self.raw_headers = raw
        # By lower-case name, without the two lengths. Several values of one name are joined with commas.
        self.headers = {name.lower(): value for name, value in raw}
        self.has_repeated = len(self.headers) != len(raw)
        if self.has_repeated:
            self.headers = _joined(raw)
        self.content_length = int(self.headers.pop(b"content-length", b"0"))
        # How much of the body is JSON; None for all of it.
        given = self.headers.pop(HEADER_LENGTH, None)
        self.header_length = None if given is None else _leading_number(given)
        self.is_chunked = b"transfer-encoding" in self.headers
        self.expects_continue = self.headers.get(b"expect", b"").lower() == b"100-continue"
        self.keeps_alive = True
        # The handler keeps its decision for all such requests here.
        self.plan: object = None
        # Headers that models get as parameters.
        self.forwarded: dict[str, str] = {}

    @property
    def is_general(self) -> bool:
        """If the handler has decided, and its decision holds for messages that differ in their lengths: no model gets
        them as parameters.
        """
        if self.plan is None:
            return False
        return not self.forwarded or _LENGTH_NAMES.isdisjoint(map(str.lower, self.forwarded))

    def of_lengths(self, content_length: int, header_length: int | None) -> Head:
        """Return the head of a message that differs in these lengths."""
        head = Head.__new__(Head)
        head.method = self.method
        head.target = self.target
        head.version = self.version
        head.raw_headers = self.raw_headers
        head.has_repeated = False
        head.headers = self.headers
        head.content_length = content_length
        head.header_length = header_length
        head.is_chunked = self.is_chunked
        head.expects_continue = self.expects_continue
        head.keeps_alive = self.keeps_alive
        head.plan = self.plan
        head.forwarded = self.forwarded
        return head


class HeadParser:
    """Parses a head in pieces. `head` is None until the head is complete."""

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
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Called by httptools."""
        parser = self._parser
        method = parser.get_method().decode()
        host, target = _parts_of(self._target)
        self.head = Head(method, target, parser.get_http_version(), self._headers)
        if host is not None:
            self.head.headers[b"host"] = host
        self.head.keeps_alive = parser.should_keep_alive()

    def feed(self, piece: bytes) -> None:
        """Parse a piece, which must not go beyond the head. Raises `BadHttpMessage`."""
        try:
            self._parser.feed_data(piece)
        except HttpParserUpgrade:
            # No other protocol is spoken here, and a server may ignore the question.
            if self.head is not None and self.head.method == "CONNECT":
                raise BadHttpMessage(HTTPStatus.METHOD_NOT_ALLOWED, "this server is not a proxy") from None
        except HttpParserError as error:
            raise BadHttpMessage(HTTPStatus.BAD_REQUEST, f"malformed request: {error}") from error

    def finish(self) -> Head:
        """Return the head after its last piece. Raises `BadHttpMessage`."""
        head = self.head
        # The two refer to each other, and would stay in memory until the collector runs.
        self._parser = None
        if head is None:
            raise BadHttpMessage(HTTPStatus.BAD_REQUEST, "malformed request: no request line")
        if head.version not in _VERSIONS:
            raise BadHttpMessage(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, f"HTTP/{head.version} is not supported")
        if head.has_repeated:
            _check_repeated(head)
        encoding = head.headers.get(b"transfer-encoding")
        if encoding is not None and encoding.lower() != b"chunked":
            raise BadHttpMessage(
                HTTPStatus.NOT_IMPLEMENTED, f"unknown transfer encoding '{encoding.decode('latin-1')}'"
            )
        if encoding is not None and head.version == "1.0":
            # A proxy that speaks HTTP/1.0 passes the header on without understanding it.
            raise BadHttpMessage(HTTPStatus.BAD_REQUEST, "malformed request: chunks in HTTP/1.0")
        return head


def _joined(raw: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    values: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for name, value in raw:
        values[name.lower()].append(value)
    return {name: b", ".join(given) for name, given in values.items()}


def _check_repeated(head: Head) -> None:
    """Raise `BadHttpMessage` for a header that is there twice and may be there only once.

    A proxy in front of this server may go by the other one.
    """
    seen = set()
    for sent, _ in head.raw_headers:
        name = sent.lower()
        if name in seen and name in _SINGLE:
            raise BadHttpMessage(HTTPStatus.BAD_REQUEST, f"malformed request: two headers '{name.decode()}'")
        seen.add(name)


def _leading_number(text: bytes) -> int:
    """Read a number as C does: up to the first character that does not belong to it, and 0 if there is no number."""
    found = _LEADING_NUMBER.match(text)
    return 0 if found is None else int(found[1])


class Heads:
    """Reads heads, and remembers short ones: as they are, and by all but their lengths. For one thread."""

    def __init__(self) -> None:
        self._known: Memo[bytes, Head] = Memo(1024)
        self._forms: Memo[tuple[bytes, ...], Head] = Memo(1024)

    def read(self, raw: bytes, parser: HeadParser | None) -> Head:
        """Return the head in these bytes, which end with its empty line. Raises `BadHttpMessage`.

        If the head came in pieces, `parser` has had all of them.
        """
        head = self._known.get(raw)
        if head is not None:
            return head
        # What is between the lengths, and the header of each.
        parts = _LENGTHS.split(raw)
        lengths = parts[2::3]
        del parts[2::3]
        form = tuple(parts)
        head = self._forms.get(form)
        if head is not None and head.is_general:
            content_length, header_length = head.content_length, head.header_length
            for name, length in zip(parts[1::2], lengths, strict=True):
                if len(name) == _CONTENT_LENGTH_BYTES:
                    content_length = int(length)
                else:
                    header_length = int(length)
            head = head.of_lengths(content_length, header_length)
        else:
            if parser is None:
                parser = HeadParser()
                parser.feed(raw)
            head = parser.finish()
            if len(raw) <= _MEMORABLE_BYTES and lengths:
                self._forms.keep(form, head)
        if len(raw) <= _MEMORABLE_BYTES:
            self._known.keep(raw, head)
        return head


def _parts_of(target: bytes) -> tuple[bytes | None, bytes]:
    """Return the host, if the target names one, and the path with its query.

    Clients of a proxy send a whole URL, and a server has to accept it; its host counts and the header `Host` does not
    (RFC 9112, section 3.2.2). The forms of CONNECT and of `OPTIONS *` stay as they are: no path is equal to them.
    """
    found = _WHOLE_URL.fullmatch(target)
    if found is None:
        return None, target
    host, path = found.groups()
    return host, path if path.startswith(b"/") else b"/" + path


def path_of(head: Head) -> str:
    """Return the path as the client wrote it: Triton decodes nothing in it."""
    return head.target.partition(b"?")[0].decode("latin-1")
