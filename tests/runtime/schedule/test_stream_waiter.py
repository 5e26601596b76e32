"""Consumers of streams are woken for the first response and the last one, and for those in between together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.model.request import Response
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.schedule.backlog import held_bytes
from moonpool.runtime.schedule.stream import StreamWaiter


class Turns:
    """A reactor whose turns the test ends."""

    def __init__(self) -> None:
        self._soon: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[[], object]) -> None:
        self._soon.append(callback)

    def end_turn(self) -> None:
        soon, self._soon = self._soon, []
        for callback in soon:
            callback()


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def waiter(turns: Turns) -> StreamWaiter:
    return StreamWaiter(cast(Reactor, turns), "m", 1 << 20)


def rings(waiter: StreamWaiter) -> bool:
    """Return True if the consumer was woken since the last call."""
    return waiter.bell.acquire(blocking=False)


def respond(waiter: StreamWaiter, times: int = 1) -> None:
    for _ in range(times):
        waiter.respond(Response({}))


def test_the_first_response_wakes_the_consumer_at_once(waiter: StreamWaiter) -> None:
    respond(waiter)
    assert rings(waiter)


def test_those_of_one_turn_wake_it_once_at_the_end(waiter: StreamWaiter, turns: Turns) -> None:
    respond(waiter)
    assert rings(waiter)
    for _ in range(3):
        respond(waiter, 3)
        assert not rings(waiter)
        turns.end_turn()
        assert rings(waiter)
        turns.end_turn()
        assert not rings(waiter)
    assert len(waiter.waiting) == 10


def test_many_wake_it_before_the_end_of_the_turn(waiter: StreamWaiter, turns: Turns) -> None:
    respond(waiter)
    assert rings(waiter)
    counts = [0, 0]
    for place in range(2):
        while not rings(waiter):
            respond(waiter)
            counts[place] += 1
            assert counts[place] < 100
    assert counts[0] == counts[1] > 1
    respond(waiter)
    turns.end_turn()
    assert rings(waiter)


@pytest.mark.parametrize("outcome", [None, MoonpoolError("no")])
def test_the_last_one_wakes_it_at_once(waiter: StreamWaiter, outcome: Any) -> None:
    respond(waiter, 3)
    assert rings(waiter)
    waiter.resolve(outcome)
    assert rings(waiter)


def test_responses_are_taken_together_up_to_an_error(waiter: StreamWaiter) -> None:
    respond(waiter, 3)
    error = MoonpoolError("no")
    waiter.respond(error)
    respond(waiter)
    taken = waiter.take_ready(2) + waiter.take_ready(9)
    assert len(taken) == 3
    assert waiter.take_ready(9) == []
    assert waiter.waiting.popleft() is error
    assert len(waiter.take_ready(9)) == 1
    assert waiter.take_ready(9) == []
    assert waiter.backlog.waiting_bytes == held_bytes(error)


def test_a_consumer_that_sleeps_after_each_response_misses_none() -> None:
    reactor = Reactor()
    try:
        waiter = StreamWaiter(reactor, "m", 1 << 20)
        taken: list[object] = []
        count = 643

        def take() -> None:
            while len(taken) < count:
                if not waiter.waiting and not waiter.bell.acquire(timeout=60.0):
                    return
                if waiter.waiting:
                    taken.append(waiter.waiting.popleft())

        consumer = threading.Thread(target=take)
        consumer.start()
        # Turns of all lengths.
        left = count
        for length in range(1, count):
            now = min(left, length)
            reactor.call_soon(lambda now=now: respond(waiter, now))  # type: ignore[misc]
            left -= now
        consumer.join(60.0)
        assert len(taken) == count
    finally:
        reactor.close()
