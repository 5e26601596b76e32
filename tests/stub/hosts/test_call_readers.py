"""Tests which thread reads the calls channel, and for which others."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.heap_region import HeapRegion
from tests.waiting import wait_until

from moonpool.ipc.arena import Arena
from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import calls_codec, encode
from moonpool.ipc.messages import Kind, Side
from moonpool.stub.hosts.calls import Call, Calls
from moonpool.stub.pb_utils.response import ResponseIterator
from moonpool.stub.peers.regions import Regions


class Asker:
    """Make calls whose runtime is the test."""

    def __init__(self) -> None:
        ours, theirs = Channel.pair()
        self.runtime = ours
        self._codec = calls_codec(Side.RUNTIME)
        self.regions = Regions(lambda *_, **__: None)
        self.regions.arena = Arena(lambda size: HeapRegion(9, size))
        self.channel = Channel(theirs)
        self.calls = Calls(self.channel, self.regions)
        self.answers: dict[int, Any] = {}
        self.threads: list[threading.Thread] = []

    def ask(self) -> Call:
        call = self.calls.open()
        self.calls.begin(call, Kind.IS_MODEL_READY, "m", "")
        return call

    def wait_in_thread(self, call: Call) -> None:
        def wait() -> None:
            self.answers[call.number] = self.calls.wait(call)[3]["value"]

        thread = threading.Thread(target=wait)
        thread.start()
        self.threads.append(thread)

    def heard(self) -> list[Any]:
        return self._codec.decode(self.runtime.receive())

    def answer(self, call: Call, value: int) -> None:
        self.runtime.send(encode(Kind.DONE, call.number, None, {"value": value}))

    def reply(self, call: Call, *, final: bool, block: list[int]) -> None:
        self.runtime.send(encode(Kind.REPLY, call.number, final, [], [block], [], None, None))

    def close(self) -> None:
        for thread in self.threads:
            thread.join(60.0)
        self.runtime.close()
        self.channel.close()


@pytest.fixture
def asker() -> Iterator[Asker]:
    asker = Asker()
    yield asker
    asker.close()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]])
def test_answers_in_any_order_find_those_who_wait(asker: Asker, order: list[int]) -> None:
    calls = [asker.ask() for _ in range(4)]
    for each in calls:
        asker.wait_in_thread(each)
    for place in order:
        asker.answer(calls[place], place)
        # If the thread that reads has its answer, another one reads.
        wait_until(lambda place=place: calls[place].number in asker.answers)  # type: ignore[misc]

    assert asker.answers == {each.number: place for place, each in enumerate(calls)}


def test_answers_that_came_before_anybody_waited_are_there(asker: Asker) -> None:
    first, second = asker.ask(), asker.ask()
    asker.answer(first, 1)
    asker.answer(second, 2)

    assert asker.calls.wait(second)[3] == {"value": 2}
    assert asker.calls.wait(first)[3] == {"value": 1}


def test_many_threads_ask_without_losing_anything(asker: Asker) -> None:
    count, times = 8, 200
    total: list[int] = []

    def serve() -> None:
        for _ in range(count * times):
            _, number, _, _ = asker.heard()
            asker.runtime.send(encode(Kind.DONE, number, None, {"value": number}))

    def ask() -> None:
        for _ in range(times):
            call = asker.ask()
            total.append(asker.calls.wait(call)[3]["value"] - call.number)

    threads = [threading.Thread(target=ask) for _ in range(count)]
    threads.append(threading.Thread(target=serve))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)

    assert total == [0] * (count * times)


def test_blocks_of_abandoned_answers_are_released(asker: Asker) -> None:
    call = asker.ask()
    asker.heard()
    asker.reply(call, final=False, block=[7, 64, 8])
    other = asker.ask()
    asker.heard()
    asker.answer(other, 1)
    asker.calls.wait(other)
    asker.calls.abandon(call)

    assert asker.heard() == [Kind.WITHDRAW, call.number]
    asker.reply(call, final=True, block=[7, 128, 8])
    last = asker.ask()
    asker.heard()
    asker.answer(last, 1)
    asker.calls.wait(last)
    assert asker.calls.take_released() == [(7, 64), (7, 128)]


def test_an_iterator_that_is_forgotten_withdraws_its_call(asker: Asker) -> None:
    call = asker.ask()
    asker.heard()
    responses = ResponseIterator.over(lambda _: None, lambda: None, lambda: asker.calls.abandon(call))
    del responses
    gc.collect()

    assert asker.heard() == [Kind.WITHDRAW, call.number]
