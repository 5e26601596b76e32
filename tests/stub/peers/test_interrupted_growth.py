"""A signal handler may raise anywhere in the allocator of a stub: each block is free or has its owner, and each GROW
one answer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from tests.runtime.interrupting import interrupted_everywhere
from tests.stub.closing import blocks_left, close_regions
from tests.waiting import wait_until

from moonpool.ipc.arena import Block, Keep
from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.messages import NO_DEVICE, Kind, Side
from moonpool.ipc.region import set_aside
from moonpool.ipc.signals import at_once
from moonpool.stub.peers.regions import Regions

KiB = 1024
PATIENCE_S = 60.0


class Runtime:
    """Gives a stub memory, on a thread of its own, as the control thread does."""

    def __init__(self, limit_bytes: int) -> None:
        self.given = {1: 64 * KiB}
        self.limit_bytes = limit_bytes
        # The questions that were not answered yet, and the most there were at a time.
        self.open = 0
        self.most_open = 0
        self._number = 1
        self._heard: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self.regions = Regions(self._send)
        self.regions.keep = Keep(0.0, 0.0)
        self.regions.add_first(1, 64 * KiB, set_aside(1, 64 * KiB), Side.STUB)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _send(self, *message: object, notes: Iterable[Callable[[], object]] = ()) -> None:
        at_once(partial(self._heard.put, message), *notes)

    def _serve(self) -> None:
        while (message := self._heard.get()) is not None:
            kind, number, *_ = message
            if kind == Kind.RETIRE:
                del self.given[number]
                continue
            self.open += 1
            self.most_open = max(self.most_open, self.open + self._heard.qsize())
            self.open -= 1
            if sum(self.given.values()) + number > self.limit_bytes:
                self.regions.refuse("the limit is reached")
                continue
            self._number += 1
            self.given[self._number] = number
            fd = set_aside(self._number, number)
            self.regions.arrive(fd, self._number, number, Side.STUB, NO_DEVICE, b"")

    def check(self, held: list[Block]) -> None:
        """Each byte is in a block that somebody holds, or free."""
        regions = self.regions
        assert set(blocks_left(regions)) == set(held)
        places = sorted((each.region.id, each.offset, each.size_bytes) for each in held)
        assert all(one[:1] < two[:1] or one[1] + one[2] <= two[1] for one, two in pairwise(places))
        wait_until(lambda: self.given.keys() == {each.id for each in regions.arena.regions()}, PATIENCE_S)
        if not held:
            regions.retire_idle(0.0)
            whole = regions.allocate(64 * KiB)
            assert whole.region.id == 1
            regions.take_back([whole])

    def close(self) -> None:
        self._heard.put(None)
        self._thread.join(PATIENCE_S)
        close_regions(self.regions)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    made = Runtime(1024 * KiB)
    yield made
    made.close()


@pytest.mark.parametrize(
    "sizes",
    [
        (64, 64, 64, 128, 64),
        (64, 128, 64, 192, 64 * KiB - 1024),
        # Beyond the first region, and beyond the limit.
        (60 * KiB, 80 * KiB, 64, 300 * KiB, 4096 * KiB, 200),
    ],
    ids=["of few sizes", "of many sizes", "that grow"],
)
def test_an_interrupt_at_any_point_of_an_allocation_loses_nothing(runtime: Runtime, sizes: tuple[int, ...]) -> None:
    regions = runtime.regions
    held: list[Block] = []

    def allocate() -> None:
        for number, size in enumerate(sizes):
            try:
                regions.allocate(size, taken=held)
            except OutOfMemory:
                assert size == 4096 * KiB
            if number % 2 and held:
                block = held[0]
                at_once(partial(regions.give_back, (block.region.id, block.offset)), partial(held.pop, 0))
        regions.retire_idle(0.0)

    def check() -> None:
        runtime.check(held)
        regions.take_back(held)
        held.clear()
        runtime.check(held)

    assert interrupted_everywhere(allocate, check, at_lines=False) > 20
    assert runtime.most_open <= 1


def test_blocks_that_the_runtime_holds_are_counted_or_not(runtime: Runtime) -> None:
    regions = runtime.regions
    blocks = [regions.allocate(64) for _ in range(3)]
    counted: list[Block] = []

    def check() -> None:
        assert [each.holds - 1 for each in blocks] == [counted.count(each) for each in blocks]
        regions.take_back(counted)
        counted.clear()
        runtime.check(blocks)

    assert interrupted_everywhere(lambda: regions.hold(blocks, counted), check, at_lines=False) > 5
