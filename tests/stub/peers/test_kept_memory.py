"""Memory by which a stub has grown: for how long it is kept, and when it is given up at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
from tests.stub.closing import close_regions

from moonpool.ipc import arena
from moonpool.ipc.arena import Keep
from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.messages import NO_DEVICE, Kind, Side
from moonpool.ipc.region import set_aside
from moonpool.stub.peers.regions import Regions

KiB = 1024


class Grower:
    """The regions of a stub, and a runtime that gives it so much memory."""

    def __init__(self, limit_bytes: int) -> None:
        self.given: dict[int, int] = {}
        self.said: list[Kind] = []
        self._limit_bytes = limit_bytes
        self._number = 1
        self.regions = Regions(self._send)
        self.regions.keep = Keep(60.0, 5.0)
        self.given[1] = 64 * KiB
        self.regions.add_first(1, 64 * KiB, set_aside(1, 64 * KiB), Side.STUB)

    def _send(self, kind: Kind, number: int, *_: object, notes: Iterable[Callable[[], object]]) -> None:
        self.said.append(kind)
        for note in notes:
            note()
        if kind == Kind.RETIRE:
            del self.given[number]
        elif sum(self.given.values()) + number > self._limit_bytes:
            self.regions.refuse("the limit is reached")
        else:
            self._number += 1
            self.given[self._number] = number
            fd = set_aside(self._number, number)
            self.regions.arrive(fd, self._number, number, Side.STUB, NO_DEVICE, b"")

    def answer(self, size_bytes: int) -> None:
        """Allocate a block for an answer, and get it back."""
        block = self.regions.allocate(size_bytes)
        self.regions.returned.append((block.region.id, block.offset))


@pytest.fixture
def grower() -> Iterator[Grower]:
    grower = Grower(1024 * KiB)
    yield grower
    close_regions(grower.regions)


@pytest.mark.promise("Limits", "The first region by which memory has grown …")
def test_an_idle_stub_keeps_the_first_region_for_a_minute(grower: Grower) -> None:
    grower.answer(256 * KiB)
    grower.answer(512 * KiB)
    assert list(grower.given) == [1, 2, 3]
    grower.regions.retire_idle(5.0)
    assert list(grower.given) == [1, 2]
    grower.regions.retire_idle(59.0)
    assert list(grower.given) == [1, 2]
    grower.regions.retire_idle(60.0)
    assert list(grower.given) == [1]


def test_it_keeps_none_where_memory_is_short(grower: Grower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "headroom_bytes", lambda: 256 * KiB)
    grower.answer(256 * KiB)
    grower.regions.retire_idle(5.0)
    assert list(grower.given) == [1]


@pytest.mark.promise("Limits", "The first region by which memory has grown …")
def test_what_it_keeps_is_given_up_for_memory_that_was_refused(grower: Grower) -> None:
    grower.answer(256 * KiB)
    grower.answer(900 * KiB)
    assert grower.said == [Kind.GROW, Kind.GROW, Kind.RETIRE, Kind.GROW]
    assert sum(grower.given.values()) == (64 + 900) * KiB
    with pytest.raises(OutOfMemory, match="the limit is reached"):
        grower.answer(1024 * KiB)


def test_a_region_in_use_is_not_given_up(grower: Grower) -> None:
    block = grower.regions.allocate(256 * KiB)
    with pytest.raises(OutOfMemory):
        grower.answer(900 * KiB)
    assert grower.regions.block(block.region.id, block.offset) is block
