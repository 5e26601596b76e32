"""A signal handler of a model's may raise anywhere while the model answers: each request has its end once, and no
memory is lost.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.runtime.interrupting import OF_A_STUB, Interrupted, interrupted_everywhere
from tests.stub.closing import apart, blocks_left
from tests.stub.peers.desk import OUTPUTS, StubDesk, in_python

from moonpool.ipc.codec import control_codec, unpack_layout
from moonpool.ipc.messages import AGAIN, FINAL, INCREMENT, NO_DETAILS, OBSERVE, OPEN, Kind, Side
from moonpool.ipc.region import SharedRegion
from moonpool.stub.pb_utils.errors import TritonError, TritonModelException
from moonpool.stub.pb_utils.request import RELEASE_RESCHEDULE, InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.pb_utils.tensor import Tensor

LARGE, LARGE_BYTES = 9, 1 << 20
everywhere = partial(interrupted_everywhere, within=OF_A_STUB, at_lines=False)


class Desk(StubDesk):
    """A stub whose runtime is the test: it counts responses and ends of requests, and gives back all memory that
    comes.
    """

    def __init__(self, *, is_decoupled: bool) -> None:
        super().__init__(in_python, decoupled=is_decoupled)
        region = SharedRegion.create(LARGE, LARGE_BYTES)
        self.peer.regions.add_first(LARGE, LARGE_BYTES, os.dup(region.fd), Side.STUB)
        self.regions[LARGE] = region
        self.numbers = itertools.count(1)
        # What has come, by the number of the batch.
        self.came: Counter[int] = Counter()
        self.ended: Counter[int] = Counter()
        self.last: list[Any] = []

    def request(self) -> InferenceRequest:
        """Return a request that may be answered apart from its batch."""
        origin = (self.peer.responses, next(self.numbers), 0)
        return InferenceRequest.from_wire(NO_DETAILS, OUTPUTS, [], origin)

    def read(self) -> None:
        """Take what has come, and give back all memory."""
        codec = control_codec(Side.RUNTIME)
        for fields in self.told():
            if fields[0] == Kind.INDIRECT:
                _, region, offset, size = fields
                self.give_back([[region, offset, size]])
                fields = codec.decode(bytes(self.regions[region].memory()[offset : offset + size]))
            if fields[0] != Kind.RESPONSES:
                continue
            for row in fields[1]:
                batch, _, flags, blocks, layout, remark = self.last = row
                assert not self.ended[batch]
                self.came[batch] += layout is not None or (remark or [None, None])[1] is not None
                self.ended[batch] += bool(flags)
                self.give_back(blocks)

    def look_for_work(self) -> None:
        """Do what the main thread does before each batch."""
        self.work.send(b"work")
        self.peer.care()
        self.peer.conversation.channel.receive()

    def give_back(self, blocks: list[list[int]]) -> None:
        self.peer.regions.returned.extend([(region, offset) for region, offset, _ in blocks])

    def check(self) -> None:
        """No request is remembered, and all memory is free."""
        assert not self.peer.responses.replies
        assert blocks_left(self.peer.regions) == []


@pytest.fixture(params=[True, False], ids=["decoupled", "not decoupled"])
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    made = Desk(is_decoupled=request.param)
    yield made
    made.close()


@pytest.fixture
def decoupled() -> Iterator[Desk]:
    made = Desk(is_decoupled=True)
    yield made
    made.close()


def plain(_: Desk) -> InferenceResponse:
    return InferenceResponse([Tensor("SUM", np.arange(4, dtype=np.float32))])


def of_text(_: Desk) -> InferenceResponse:
    text = Tensor("SAID", np.array([b"text"], object))
    return InferenceResponse([text, Tensor("SUM", np.zeros(3, np.int32))], parameters={"k": 1})


def in_place(desk: Desk) -> InferenceResponse:
    """Return a response with an output that lies in shared memory already, and another one."""
    there = desk.peer.regions.empty(300 * 1024)
    return InferenceResponse([Tensor("DIFF", there), Tensor("SUM", np.zeros(3, np.int32))])


def failed(_: Desk) -> InferenceResponse:
    return InferenceResponse(error=TritonError("on purpose"))


def long(_: Desk) -> InferenceResponse:
    """Return an error that is too long for a packet."""
    return InferenceResponse(error=TritonError("long " * 12_000))


MADE = [plain, of_text, in_place, failed, long]


@pytest.mark.promise(
    "Responses at any time",
    "A signal handler of a model may raise at any point of `send`: `send` raises that, the response was sent or not, "
    "and the sender goes on from there.",
)
@pytest.mark.parametrize("make", MADE)
def test_an_interrupt_at_any_point_of_a_send_loses_nothing(
    desk: Desk, make: Callable[[Desk], InferenceResponse]
) -> None:
    kept: list[InferenceRequest] = [desk.request()]
    made = [make(desk)]

    def ask() -> None:
        sender = kept[0].get_response_sender()
        sender.send(made.pop())
        sender.send(flags=FINAL)

    def check() -> None:
        made.clear()
        request = kept.pop()
        reply, sender = request.reply(), request.get_response_sender()
        desk.read()
        assert desk.came[reply.batch] == reply.count <= 1
        assert desk.ended[reply.batch] == reply.is_closed

        def finish() -> None:
            if not reply.count:
                sender.send(make(desk))
            with suppress(TritonModelException):
                sender.send(flags=FINAL)

        apart(finish)
        with pytest.raises(TritonModelException):
            sender.send(make(desk))
        desk.read()
        assert desk.came[reply.batch] == desk.ended[reply.batch] == 1
        desk.check()
        kept.append(desk.request())
        made.append(make(desk))

    assert everywhere(ask, check) > 20


@pytest.mark.parametrize("error", [TimeoutError, MemoryError, ValueError])
@pytest.mark.parametrize("make", [plain, of_text, in_place])
def test_a_send_raises_what_a_handler_raised_and_no_response_becomes_an_error(
    desk: Desk, make: Callable[[Desk], InferenceResponse], error: type[Exception]
) -> None:
    raised: list[None] = []
    left: list[Any] = []

    def prepare() -> None:
        request = desk.request()
        left[:] = request.get_response_sender(), make(desk), request

    def act() -> None:
        raise error("on purpose")

    def ask() -> None:
        try:
            left[0].send(left[1], FINAL)
        except error:
            raised.append(None)

    def check() -> None:
        with suppress(TritonModelException):
            left[0].send(left[1], FINAL)
        desk.read()
        assert set(desk.came.values()) == set(desk.ended.values()) == {1}
        assert desk.last[5] is None or desk.last[5][1] is None
        left.clear()
        desk.check()
        prepare()

    prepare()
    count = everywhere(ask, check, act=act)
    # The last time, none was left to raise.
    assert len(raised) == count - 1 > 20


def test_what_a_handler_sends_in_the_middle_of_a_send_comes_before_it(decoupled: Desk) -> None:
    desk = decoupled
    kept: list[InferenceRequest] = []
    refused: list[int] = []

    def act(flags: int) -> None:
        # It may have come after the last one.
        with suppress(TritonModelException):
            kept[0].get_response_sender().send(plain(desk), flags)

    def ask() -> None:
        try:
            kept[0].get_response_sender().send(plain(desk), FINAL)
        except TritonModelException:
            refused.append(kept[0].reply().batch)

    def check() -> None:
        reply = kept.pop().reply()
        desk.read()
        assert desk.ended[reply.batch] == 1
        assert desk.came[reply.batch] == reply.count
        desk.check()
        kept.append(desk.request())

    for flags in (0, FINAL):
        kept.append(desk.request())
        assert everywhere(ask, check, act=partial(act, flags)) > 20
        kept.clear()
    assert refused
    assert max(desk.came.values()) == 2


@pytest.mark.parametrize("is_answered", [True, False])
@pytest.mark.parametrize("end", ["finish", "fail", "reschedule"])
def test_an_interrupt_at_any_point_of_the_last_response_loses_nothing(desk: Desk, end: str, is_answered: bool) -> None:
    kept: list[InferenceRequest] = []

    def prepare() -> None:
        kept.append(desk.request())
        if is_answered:
            kept[0].get_response_sender().send(plain(desk))

    def finish() -> None:
        reply = kept[0].reply()
        if end == "finish":
            reply.finish(plain(desk))
        elif end == "fail":
            reply.fail("on purpose")
        else:
            reply.reschedule()

    def check() -> None:
        finish()
        reply = kept.pop().reply()
        assert reply.is_closed
        desk.read()
        assert desk.ended[reply.batch] == 1
        assert desk.last[2] == (AGAIN if end == "reschedule" else FINAL)
        desk.check()
        prepare()

    prepare()
    assert everywhere(finish, check) > 10


def test_the_end_of_a_dropped_request_comes_where_its_destructor_was_interrupted(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python reports what is raised in a destructor, and goes on.
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda _: reported.append(None))
    kept: list[InferenceRequest] = []

    def ask() -> None:
        kept.clear()

    def check() -> None:
        desk.look_for_work()
        desk.read()
        assert set(desk.ended.values()) == {1}
        assert len(desk.ended) == next(desk.numbers) - 1
        desk.check()
        desk.numbers = itertools.count(len(desk.ended) + 1)
        prepare()

    def prepare() -> None:
        kept.append(desk.request())
        kept[0].reply().leave_open()

    prepare()
    assert everywhere(ask, check, in_destructors=True) > 5
    assert reported


def test_a_request_that_is_dropped_in_a_cycle_ends_once(desk: Desk) -> None:
    cycle: list[object] = [desk.request()]
    cycle[0].reply().leave_open()  # type: ignore[attr-defined]
    cycle.append(cycle)
    del cycle
    gc.collect()
    desk.look_for_work()
    desk.read()
    assert [*desk.ended.values()] == [1]
    desk.check()


@pytest.mark.parametrize("error", [Interrupted, TimeoutError])
def test_an_interrupt_at_any_point_leaves_each_request_of_a_batch_with_one_outcome(
    desk: Desk, error: type[BaseException]
) -> None:
    answer = desk.peer.answer
    requests: list[InferenceRequest] = []
    first = 0
    made: list[InferenceResponse | None] = []

    def prepare() -> None:
        nonlocal first
        requests[:] = [desk.request() for _ in range(6)]
        first = next(desk.numbers) - len(requests)
        requests[1].get_response_sender().send(plain(desk))
        requests[2].set_release_flags(RELEASE_RESCHEDULE)
        requests[3].get_response_sender()
        bad = InferenceResponse.__new__(InferenceResponse)
        made[:] = [of_text(desk), plain(desk), None, in_place(desk), bad, plain(desk)]

    def act() -> None:
        raise error("on purpose")

    def ask() -> None:
        try:
            answer.take(requests, made)
        except error:  # as the stub's loop does
            answer.fail(requests, "interrupted")

    def check() -> None:
        made.clear()
        blocks, layout, _, states = answer.give()
        outcomes = unpack_layout(layout)
        assert len(outcomes) == len(requests)
        assert sorted({row[3] for rows in outcomes for row in rows}) == [*range(len(blocks))]
        desk.give_back(blocks)
        desk.read()
        for number in range(len(requests)):
            # The end comes with ANSWER or apart from it.
            is_open = states is not None and states[number] == OPEN
            assert desk.ended[first + number] == is_open
        for number in (1, 3):
            with pytest.raises(TritonModelException):
                requests[number].get_response_sender().send(plain(desk), FINAL)
        desk.check()
        prepare()

    prepare()
    assert everywhere(ask, check, act=act) > 50


@pytest.mark.promise("Metrics", "Changes from threads, finalizers and forks …")
@pytest.mark.parametrize("raises", [True, False])
def test_an_interrupt_at_any_point_neither_loses_nor_repeats_a_change_of_a_metric(
    decoupled: Desk, raises: bool
) -> None:
    desk = decoupled
    changes = desk.peer.control.metric_changes
    changes.are_made = True
    begun: Counter[str] = Counter()
    done: Counter[str] = Counter()
    seen: Counter[str] = Counter()

    def change(name: str, act: Callable[[], None]) -> None:
        begun[name] += 1
        act()
        done[name] += 1

    def change_all() -> None:
        change("count", partial(changes.add, 1, INCREMENT, 1.0))
        change("observe", partial(changes.add, 2, OBSERVE, 0.5))
        change("drop", partial(changes.drop, 3))
        changes.flush()

    def act() -> None:
        if raises:
            raise Interrupted
        change_all()

    def check() -> None:
        apart(changes.flush)
        for _, rows, dropped in desk.told():
            for metric, _, value, times in rows:
                seen["count" if metric == 1 else "observe"] += int(value * times * metric)
            seen["drop"] += len(dropped)
        for name in ("count", "observe", "drop"):
            assert done[name] <= seen[name] <= begun[name] <= done[name] + 1
            begun[name] = done[name] = seen[name]

    def ask() -> None:
        change_all()
        change_all()

    assert everywhere(ask, check, act=act) > 50
    assert seen["drop"] > 50
