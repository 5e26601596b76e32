"""A link whose peer answers batches as the bytes say: nearly right, or not at all."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

from tests.fuzz.choices import Choices
from tests.runtime.scripted import KiB, Pair

from moonpool.ipc.codec import control_codec, encode
from moonpool.ipc.errors import MoonpoolError, PeerGone, RemoteProtocolError
from moonpool.ipc.messages import NO_CORE, Kind, Side
from moonpool.runtime.model.request import InferenceRequest, Response

_CONTROL = control_codec(Side.RUNTIME)
_MINUTES_S = itertools.count(0.0, 60.0)


class _Liar:
    """Makes up messages of places that exist and of others."""

    def __init__(self, pair: Pair, choices: Choices) -> None:
        self._pair = pair
        self._choices = choices
        # There is usually one block for each row, because otherwise no answer would get any further.
        self._rows = 0

    def _regions(self) -> list[int]:
        return sorted(self._pair.peer.regions)

    def _place(self) -> list[int]:
        blocks = self._pair.peer.blocks
        if blocks and self._choices.byte() % 2:
            return list(self._choices.of(blocks)[:2])
        offset = self._choices.number(0, 0, 64, 64 * KiB - 16)
        return [self._choices.number(*self._regions()), offset]

    def places(self) -> list[list[int]]:
        return [self._place() for _ in self._choices.some(2)]

    def blocks(self) -> list[list[int]]:
        """Make blocks that go with the layout that was made last."""
        count = self._choices.number(*[self._rows] * 3, 0, 1, 2) % 8
        return [[*self._place(), self._choices.number(16, 16, 4, 0)] for _ in range(count)]

    def layout(self, count: int) -> bytes:
        self._rows = 0
        rows = [[self._row() for _ in self._choices.some(2)] for _ in range(count)]
        return encode(*rows)

    def _row(self) -> list[Any]:
        choices = self._choices
        shape = [choices.number(4, 1, 0) for _ in choices.some(2)] or [4]
        datatype = choices.number(11, 11, 8, 13)
        block, offset = choices.number(self._rows), choices.number(0)
        self._rows += 1
        size = choices.number(*[min(4 * math.prod(shape), 2**63)] * 3, 16)
        return [choices.number(0, 1), datatype, shape, block, offset, size]

    def remark(self) -> Any:
        return self._choices.of([None, [{"a": 1}, None], [None, [1, "text"]], [{}, [9, "text"]]])

    def answer(self, count: int) -> bytes:
        choices, batch = self._choices, self._pair.peer.batch
        count = min(5, choices.number(*[count] * 4, count + 1))
        remarks = choices.of([None, None, [self.remark() for _ in range(count)]])
        states = choices.of([None, None, [choices.byte() % 4 for _ in range(count)]])
        number = choices.number(batch, batch, batch, batch, batch + 1)
        layout = self.layout(count)
        return encode(
            Kind.ANSWER,
            number,
            choices.number(NO_CORE, 0, 200),
            self.places() if choices.byte() % 4 == 0 else [],
            self.places() if choices.byte() % 4 == 0 else [],
            self.blocks(),
            layout,
            remarks,
            states,
        )

    def response(self) -> list[Any]:
        choices, batch = self._choices, self._pair.peer.batch
        layout = choices.of([self.layout(1), None])
        number = choices.number(batch, batch, batch - 1)
        return [number, choices.byte() % 3, choices.byte() % 3, self.blocks(), layout, self.remark()]


def link(data: bytes) -> None:
    """Drive a link. Each answer has one outcome for each request, or is a breach of the protocol."""
    pair, choices = Pair(), Choices(data)
    kept: list[Any] = []
    try:
        while choices:
            _step(pair, choices, kept)
    except (RemoteProtocolError, PeerGone):
        pass
    finally:
        kept.clear()
        pair.close()


def _step(pair: Pair, choices: Choices, kept: list[Any]) -> None:
    liar, peer, link = _Liar(pair, choices), pair.peer, pair.link
    operation = choices.byte() % 6
    if operation < 3:
        requests = pair.execute(*[[1.0] * (1 + choices.byte() % 4) for _ in range(1 + choices.byte() % 3)])
        with contextlib.suppress(BlockingIOError):
            for _ in choices.some(1):
                _take(link.response(_told(Kind.RESPONSES, [liar.response()])[0])[1], kept)
            if operation == 2:
                peer.channel.send(choices.take(1 + choices.byte()))
            else:
                peer.channel.send(liar.answer(len(requests)))
        outcomes = link.finish(requests)
        if len(outcomes) != len(requests):
            raise AssertionError(outcomes)
        for outcome in outcomes:
            _take(outcome, kept)
        # The peer sent its answer past its own end of the conversation, so its turn is set by hand.
        peer.conversation.turn = peer.conversation.after[Kind.ANSWER]
    elif operation == 3:
        _take(link.response(_told(Kind.RESPONSES, [liar.response()])[0])[1], kept)
    elif operation == 4:
        link.release(_told(Kind.RELEASE, liar.places()))
    else:
        kept.clear()
        link.tidy(next(_MINUTES_S))


def _told(kind: Kind, things: list[Any]) -> list[Any]:
    """Make rows as the control channel decodes them."""
    found: list[Any] = _CONTROL.decode(encode(kind, things))[1]
    return found


def _take(outcome: Any, kept: list[Any]) -> None:
    """Read all outputs of the answers, and keep them for a while."""
    if isinstance(outcome, Response):
        for array in outcome.outputs.values():
            array.tobytes()
            kept.append(array)
    elif isinstance(outcome, (MoonpoolError, InferenceRequest)):
        str(outcome)
