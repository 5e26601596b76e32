"""Sends answers of OpenAI's API: whole ones, streams of events, and errors in the form that its clients read.

The first piece decides about the status: an error before it has a status of its own. An error after it ends the stream
with an event, and without `[DONE]`. Pieces that the client does not read wait here, up to a bound.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import orjson

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import ModelError
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.openai.answers import TextAnswer
from moonpool.runtime.openai.endpoints import PieceReader
from moonpool.runtime.openai.pieces import Piece
from moonpool.runtime.schedule.stream import ResponseStream
from moonpool.runtime.server.http.head import JSON, Headers
from moonpool.runtime.server.http.json_text import dumps
from moonpool.runtime.server.http.routes import RouteReply, RouteRequest, id_header, id_of
from moonpool.runtime.server.openai.asking import TURN, together
from moonpool.runtime.server.openai.errors import reply_of

_log = RuntimeLog("moonpool")
_EVENTS: Headers = (
    (b"Content-Type", b"text/event-stream; charset=utf-8"),
    (b"Cache-Control", b"no-cache"),
    # For proxies, which would hold small pieces back.
    (b"X-Accel-Buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"
"""The event that ends a stream which has not failed."""
_MOST_UNSENT_BYTES = 64 << 20
# A proxy may close a connection on which nothing comes for long. Clients skip a comment.
_SILENCE_S, _COMMENT = 15.0, b":\n\n"


class EventWriter(Protocol):
    """Makes the events of one answer."""

    def of(self, piece: Piece, place: int) -> list[bytes]:
        """Return the events for a piece of the answer to the prompt at `place`. Raises `ModelError`."""

    def at_end(self, place: int) -> list[bytes]:
        """Return the events that end the answer to the prompt at `place`."""

    def last(self) -> bytes:
        """Return the events behind those of all prompts, and `DONE`."""


class ChunkWriter:
    """Makes the events of a chat or a completion."""

    def __init__(self, answer: TextAnswer) -> None:
        self._answer = answer
        # What is the same in all chunks, before and behind the choice.
        self._before = b'data: %b,"choices":[' % written(answer.chunk_head)[:-1]
        self._behind = b'],"usage":null}\n\n' if answer.tells_usage else b"]}\n\n"

    def of(self, piece: Piece, place: int) -> list[bytes]:
        """Return a chunk for each choice of `TextAnswer.chunks`."""
        choices = self._answer.chunks(piece, place)
        return [self._event(choices[0])] if len(choices) == 1 else [self._event(each) for each in choices]

    def at_end(self, place: int) -> list[bytes]:
        """Return a chunk for each choice of `TextAnswer.end_chunks`."""
        return [self._event(choice) for choice in self._answer.end_chunks(place)]

    def last(self) -> bytes:
        """Return the chunk with the usage, if it is wanted and known, and `DONE`."""
        usage = self._answer.usage
        if not self._answer.tells_usage or usage is None:
            return DONE
        return b'%b],"usage":%b}\n\n%b' % (self._before, dumps(usage), DONE)

    def _event(self, choice: dict[str, Any]) -> bytes:
        return b"%b%b%b" % (self._before, written(choice), self._behind)


class EventStream:
    """An answer that is sent piece by piece."""

    def __init__(self, request: RouteRequest, writer: EventWriter, readers: Sequence[PieceReader]) -> None:
        self._exchange = request.exchange
        self._writer = writer
        self._readers = readers
        # What is not sent yet.
        self._events: list[bytes] = []
        self._sent_s = 0.0
        self._timer: asyncio.TimerHandle

    async def send(self, streams: Sequence[ResponseStream]) -> None:
        """Send everything, as it comes. Raises an error before the first event; sends a later one."""
        exchange = self._exchange
        self._look_in(_SILENCE_S)
        try:
            if len(streams) == 1:
                await self._send(streams[0], 0)
            else:
                await together([self._send_whole(stream, place) for place, stream in enumerate(streams)])
            self._events.append(self._writer.last())
        except Exception as error:
            self._fail(error)
        finally:
            self._timer.cancel()
        self._begin()
        exchange.finish(self._taken())

    async def _send(self, stream: ResponseStream, place: int) -> None:
        """Send the answer to one prompt, but for the events that end it."""
        exchange, events = self._exchange, self._events
        piece_of, events_of = self._readers[place].piece, self._writer.of
        async for first in stream:
            events += events_of(piece_of(first), place)
            for response in stream._take_ready(TURN - 1):
                events += events_of(piece_of(response), place)
            self._write()
            if exchange.unsent_bytes > _MOST_UNSENT_BYTES:
                exchange.abort()
            if stream._is_ready:
                # Pieces may come faster than they can be sent: let other clients have their turn.
                await asyncio.sleep(0)
        events += self._writer.at_end(place)

    async def _send_whole(self, stream: ResponseStream, place: int) -> None:
        """Send the answer to one prompt beside others, which may take longer."""
        await self._send(stream, place)
        self._write()

    def _taken(self) -> bytes:
        """Take the events that are not sent yet."""
        events = b"".join(self._events)
        self._events.clear()
        return events

    def _begin(self) -> None:
        if not self._exchange.status:
            self._exchange.begin(200, _EVENTS)

    def _write(self) -> None:
        """Send the events that are ready. The status waits for the first one."""
        if self._events:
            self._begin()
            self._exchange.send(self._taken())
            self._sent_s = time.monotonic()

    def _fail(self, error: Exception) -> None:
        """Send an error as the last event, unless nothing was sent."""
        exchange = self._exchange
        if not exchange.status and not self._events:
            raise error
        if not isinstance(error, MoonpoolError):
            _log.error("answering %r failed", exchange.head.target[:200], exc_info=error)
        exchange.has_failed = True
        self._events.append(reply_of(error).event)

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._beat)

    def _beat(self) -> None:
        """Send a comment if nothing was sent for long, once the headers are out."""
        left_s = self._sent_s + _SILENCE_S - time.monotonic()
        if left_s <= 0 and self._exchange.status:
            self._exchange.send(_COMMENT)
            self._sent_s = time.monotonic()
        self._look_in(left_s if left_s > 0 else _SILENCE_S)


def answered(
    endpoint: Callable[[RouteRequest], Awaitable[RouteReply | None]],
) -> Callable[[RouteRequest], Awaitable[RouteReply | None]]:
    """Return an endpoint that tells errors as clients of this API read them, with the id of the request."""

    async def answer(request: RouteRequest) -> RouteReply | None:
        exchange = request.exchange
        exchange.received_ns = time.monotonic_ns()
        request.id = id_of(exchange.head)
        exchange.own_headers = id_header(request.id)
        try:
            return await endpoint(request)
        except Exception as error:
            if exchange.status:
                raise
            if not isinstance(error, MoonpoolError):
                _log.exception("answering %r failed", exchange.head.target[:200])
            refusal = reply_of(error)
            return RouteReply(refusal.status, refusal.headers, refusal.body)

    return answer


def json_reply(value: object) -> RouteReply:
    """Return what a model has answered as JSON. Raises as `written`."""
    return RouteReply(200, JSON, written(value))


def written(value: object) -> bytes:
    """Return what a model has answered as JSON. Raises `ModelError` for a text or a number that JSON has no form
    for.
    """
    try:
        return orjson.dumps(value)
    except TypeError as error:
        raise ModelError(f"the model's answer cannot be written as JSON: {error}") from None
