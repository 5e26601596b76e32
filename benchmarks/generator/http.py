"""HTTP/1.1 from the client's side, only as much as prepared requests need."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

from moonpool.benchmarks.generator.engine import ANSWERED, WireError
from moonpool.runtime.process.files import parsed_json

_HEAD_LIMIT_BYTES = 1 << 16
_ERROR_LIMIT_BYTES = 1 << 20
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*(?:\r\n|$)")
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;.*)?")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


class HttpWire:
    """Sends requests that were prepared. It reads the heads of answers, and only the bodies of errors.

    A request that is part of a sequence has two parts, and the id of the sequence goes between them.
    """

    def __init__(self, *requests: bytes | Sequence[bytes]) -> None:
        self.skip = 0
        self.closes = False
        self.responses = 0
        self._requests = [(each,) if isinstance(each, bytes) else tuple(each) for each in requests]
        self._begin()

    def _begin(self) -> None:
        self._buffer = b""
        self._has_head = False
        self._status = 0
        # Length of a body that is collected; None if it comes in chunks.
        self._length: int | None = 0

    def opening(self) -> Sequence[bytes | memoryview]:
        return ()

    def outgoing(self) -> Sequence[bytes | memoryview]:
        return ()

    def begin(self, kind: int, sequence: int) -> Sequence[bytes | memoryview]:
        self._begin()
        request = self._requests[kind]
        return (str(sequence).encode().join(request),) if len(request) == 2 else request

    def cancel(self) -> Sequence[bytes | memoryview] | None:
        # HTTP/1.1 has no other way.
        return None

    def feed(self, data: bytes) -> str | None:
        if self.skip or (self._has_head and not data):
            self.skip -= len(data)
            if self.skip < 0:
                raise WireError("a server sent more than the Content-Length of its answer")
            return self._answered() if self.skip == 0 else None
        self._buffer = self._buffer + data if self._buffer else data
        if not self._has_head:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _HEAD_LIMIT_BYTES:
                    raise WireError("the server's answer is not HTTP: its head has no end")
                return None
            head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
            return self._head(head.lower())
        return self._body()

    def _head(self, head: bytes) -> str | None:
        # The most frequent case comes first, because it is the generator's whole work for most answers.
        if not head.startswith(b"http/1.1 200"):
            found = _STATUS.match(head.upper())
            if found is None:
                raise WireError(f"the server's answer is not HTTP: {head[:40]!r}")
            self._status = int(found[1])
            if 100 <= self._status < 200:
                rest, self._buffer = self._buffer, b""
                return self.feed(rest) if rest else None
        else:
            self._status = 200
        self._has_head = True
        self.closes = b"connection: close" in head or (
            head.startswith(b"http/1.0") and b"connection: keep-alive" not in head
        )
        length = _LENGTH.search(head)
        if length is None:
            if b"\r\ntransfer-encoding: chunked" not in head:
                raise WireError(f"an answer HTTP {self._status} has neither a Content-Length nor chunks")
            self._length = None
            return self._body()
        if self._status != 200:
            self._length = int(length[1])
            return self._body()
        self.skip = int(length[1]) - len(self._buffer)
        if self.skip > 0:
            self._buffer = b""
            return None
        if self.skip < 0:
            raise WireError("a server sent more than the Content-Length of its answer")
        return self._answered()

    def _body(self) -> str | None:
        body = self._buffer if self._length is not None else _dechunked(self._buffer)
        if body is None or (self._length is not None and len(body) < self._length):
            if self._status != 200 and len(self._buffer) > _ERROR_LIMIT_BYTES:
                raise WireError("the text of an error is longer than 1 MiB")
            return None
        return self._answered() if self._status == 200 else self._failed(body)

    def _answered(self) -> str:
        self.responses += 1
        return ANSWERED

    def _failed(self, body: bytes) -> str:
        text = body.decode(errors="replace").strip()
        # A proxy on the way may answer without the protocol's JSON.
        with contextlib.suppress(ValueError, LookupError, TypeError):
            text = _error_of(text)
        return f"HTTP {self._status}: {text[:500]}"


_EVENT_LIMIT_BYTES = 64 << 20
_ERROR = re.compile(rb'data:[ \t]*\{[ \t]*"error"[ \t]*:')
# Of OpenAI's API only events with a part of the answer are responses: none with a role, a reason or the usage alone.
_CHUNK_OF_TEXT = re.compile(rb'"object":[ \t]*"(?:chat\.completion\.chunk|text_completion)"')
_PIECE = re.compile(rb'"(?:content|text|reasoning|reasoning_content|refusal|name|arguments)":[ \t]*"[^"]')
_NO_RESPONSES = (b":", b"data: [DONE]")


class EventWire(HttpWire):
    """Sends requests that are answered by streams of events (`text/event-stream`), and counts the events.

    An event with an error ends its request with that error, once the rest of the stream is there.
    """

    def __init__(self, *requests: bytes | Sequence[bytes]) -> None:
        super().__init__(*requests)
        self._events = b""
        self._error: str | None = None

    def _begin(self) -> None:
        super()._begin()
        self._events, self._error = b"", None

    def _head(self, head: bytes) -> str | None:
        if head.startswith(b"http/1.1 200") and b"\r\ntransfer-encoding: chunked" not in head:
            raise WireError("a stream of events does not come in chunks")
        return super()._head(head)

    def _body(self) -> str | None:
        if self._status != 200:
            return super()._body()
        is_over = self._take_chunks()
        *events, self._events = self._events.split(b"\n\n")
        for event in events:
            if _ERROR.match(event):
                self._error = _message(event.partition(b":")[2])
            elif not event.startswith(_NO_RESPONSES) and (not _CHUNK_OF_TEXT.search(event) or _PIECE.search(event)):
                self.responses += 1
        if len(self._events) + len(self._buffer) > _EVENT_LIMIT_BYTES:
            raise WireError("an event of a stream has no end")
        if not is_over:
            return None
        return ANSWERED if self._error is None else self._error

    def _take_chunks(self) -> bool:
        """Move the contents of whole chunks to the events; return True after the last one."""
        while (end := self._buffer.find(b"\r\n")) >= 0:
            word = _CHUNK.fullmatch(self._buffer[:end])
            if word is None:
                raise WireError(f"{self._buffer[:end][:40]!r} is not the size of a chunk")
            size = int(word[1], 16)
            if size == 0:
                return self._buffer.find(b"\r\n\r\n", end) >= 0
            at = end + 2 + size + 2
            if at > len(self._buffer):
                break
            self._events += self._buffer[end + 2 : at - 2]
            self._buffer = self._buffer[at:]
        return False

    def _failed(self, body: bytes) -> str:
        # Some servers send the error as an event.
        return super()._failed(body.removeprefix(b"data:"))


def _message(text: bytes) -> str:
    """Return the error in an event."""
    try:
        return _error_of(text)[:500]
    except (ValueError, LookupError, TypeError):
        return text.decode(errors="replace").strip()[:500]


def _error_of(text: bytes | str) -> str:
    """Return the error in a JSON object, in the form of KServe or of OpenAI. Raises ValueError and the like."""
    error = parsed_json(text)["error"]
    return str(error["message"] if isinstance(error, dict) else error)


def _dechunked(data: bytes) -> bytes | None:
    """Return the whole body, or None if its end has not come yet."""
    parts: list[bytes] = []
    at = 0
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return None
        word = _CHUNK.fullmatch(data[at:end])
        if word is None:
            raise WireError(f"{data[at:end][:40]!r} is not the size of a chunk")
        size = int(word[1], 16)
        if size == 0:
            # Trailers would come before the empty line.
            return b"".join(parts) if data.find(b"\r\n\r\n", end) >= 0 else None
        at = end + 2 + size + 2
        if at > len(data):
            return None
        parts.append(data[end + 2 : at - 2])
