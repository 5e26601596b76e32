"""The writer's table of memory, against a naive model of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule
from tests.heap_region import HeapRegion

from moonpool.ipc import arena as arenas
from moonpool.ipc.arena import Arena, Block, Idle, Keep, growth_bytes
from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.memory import ALIGNMENT, Region

PAGE = 4096
FIRST_BYTES = 2 * PAGE
LIMIT_BYTES = 8 * PAGE
SIZES = st.one_of(
    st.integers(0, 5 * ALIGNMENT),
    st.sampled_from([PAGE - 1, PAGE, PAGE + 1, FIRST_BYTES, FIRST_BYTES + 1, LIMIT_BYTES]),
)


class ArenaMachine(RuleBasedStateMachine):
    """Blocks live in a dictionary of intervals; each is filled with a number of its own."""

    blocks: Bundle[Block] = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(self.create)
        self.regions: dict[int, HeapRegion] = {}
        self.uses: dict[int, int] = {}
        self.asked_bytes: list[int] = []
        self.stamps: dict[Block, int] = {}
        self.numbers = 0
        self.arena.add(self.new_region(FIRST_BYTES))
        self.first_id = 1

    def new_region(self, size_bytes: int) -> HeapRegion:
        self.numbers += 1
        region = HeapRegion(self.numbers, size_bytes)
        self.regions[region.id] = region
        self.uses[region.id] = 0
        return region

    def create(self, needed_bytes: int) -> Region:
        self.asked_bytes.append(needed_bytes)
        return self.new_region(growth_bytes(self.present_bytes, needed_bytes, LIMIT_BYTES))

    @property
    def present_bytes(self) -> int:
        return sum(region.size_bytes for region in self.regions.values())

    def longest_free_bytes(self) -> int:
        """The longest run of bytes that no block covers, found by looking at every byte."""
        longest = 0
        for region in self.regions.values():
            used = np.zeros(region.size_bytes + 1, bool)
            used[-1] = True
            for block in self.stamps:
                if block.region is region:
                    used[block.offset : block.offset + block.size_bytes] = True
            edges = np.flatnonzero(used)
            longest = max(longest, int(np.diff(edges, prepend=-1).max()) - 1)
        return longest

    def stamp(self, block: Block, number: int) -> None:
        block.region.memory()[block.offset : block.offset + block.size_bytes] = bytes([number]) * block.size_bytes

    @rule(target=blocks, size_bytes=SIZES)
    def allocate(self, size_bytes: int) -> Block:
        self.asked_bytes.clear()
        rounded = max(ALIGNMENT, math.ceil(size_bytes / ALIGNMENT) * ALIGNMENT)
        has_room = self.longest_free_bytes() >= rounded
        try:
            block = self.arena.allocate(size_bytes)
        except OutOfMemory:
            assert not has_room
            assert self.present_bytes + rounded > LIMIT_BYTES
            return multiple()  # type: ignore[return-value]
        assert bool(self.asked_bytes) is not has_room
        assert [n for n in self.asked_bytes if n % PAGE or not rounded <= n < rounded + PAGE] == []
        assert block.size_bytes == rounded
        assert block.holds == 1
        assert block not in self.stamps
        self.uses[block.region.id] += 1
        self.stamps[block] = number = len(self.stamps) % 255 + 1
        self.stamp(block, number)
        return block

    @rule(size_bytes=SIZES)
    def look_for_room(self, size_bytes: int) -> None:
        rounded = max(ALIGNMENT, math.ceil(size_bytes / ALIGNMENT) * ALIGNMENT)
        assert self.arena.has_room(size_bytes) is (self.longest_free_bytes() >= rounded)

    @rule(target=blocks, block=blocks)
    def hold(self, block: Block) -> Block:
        block.holds += 1
        return block

    @rule(block=consumes(blocks))
    def release(self, block: Block) -> None:
        held = block.holds
        self.arena.release(block)

        assert block.holds == held - 1
        if held == 1:
            del self.stamps[block]

    @rule()
    def retire_what_is_idle(self) -> None:
        used = {block.region.id for block in self.stamps}
        expected = {i: n for i, n in self.uses.items() if i != self.first_id and i not in used}
        assert self.arena.idle() == expected

        for region_id in expected:
            assert self.arena.retire(region_id) is self.regions.pop(region_id)
            del self.uses[region_id]

    @precondition(lambda self: self.stamps)
    @rule(data=st.data())
    def a_used_region_is_not_retired(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.stamps, key=lambda b: b.offset)))

        with pytest.raises(ValueError, match=f"region {block.region.id} is in use"):
            self.arena.retire(block.region.id)

    @invariant()
    def no_two_blocks_overlap(self) -> None:
        # A block that shares a byte with another was overwritten by it.
        for block, number in self.stamps.items():
            run = bytes(block.region.memory()[block.offset : block.offset + block.size_bytes])
            assert run == bytes([number]) * block.size_bytes

    @invariant()
    def blocks_are_aligned_and_inside_their_region(self) -> None:
        for block in self.stamps:
            assert block.offset % ALIGNMENT == 0
            assert 0 <= block.offset <= block.region.size_bytes - block.size_bytes

    @invariant()
    def the_table_is_the_model(self) -> None:
        assert set(self.arena.blocks()) == set(self.stamps)
        assert self.arena.size_bytes == self.present_bytes <= LIMIT_BYTES
        assert self.arena.used_bytes == sum(block.size_bytes for block in self.stamps)

    @invariant()
    def a_block_is_found_where_it_begins_and_nowhere_else(self) -> None:
        starts = {(block.region.id, block.offset): block for block in self.stamps}
        for region_id, region in self.regions.items():
            for offset in range(0, region.size_bytes, ALIGNMENT):
                assert self.arena.find(region_id, offset) is starts.get((region_id, offset))
        assert self.arena.find(self.numbers + 1, 0) is None

    def teardown(self) -> None:
        """The free bytes become one extent again, so a block as large as the region fits."""
        for block in list(self.stamps):
            while block.holds:
                self.arena.release(block)
        self.stamps.clear()
        self.asked_bytes.clear()
        wholes = sorted((r.size_bytes for r in self.regions.values()), reverse=True)
        taken = [self.arena.allocate(size_bytes) for size_bytes in wholes]

        assert self.asked_bytes == []
        assert sorted(block.region.id for block in taken) == sorted(self.regions)
        assert self.arena.used_bytes == self.arena.size_bytes


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def arena() -> Arena:
    """64 KiB that do not grow."""

    def refuse(needed_bytes: int) -> Region:
        raise OutOfMemory(f"no {needed_bytes} bytes")

    made = Arena(refuse)
    made.add(HeapRegion(1, 16 * PAGE))
    return made


def test_low_addresses_are_used_first_and_again(arena: Arena) -> None:
    first, second = arena.allocate(64), arena.allocate(64)
    arena.release(first)
    again = arena.allocate(10)

    assert (first.offset, second.offset, again.offset) == (0, 64, 0)


def test_a_block_of_nothing_has_a_place_of_its_own(arena: Arena) -> None:
    assert [arena.allocate(0).offset for _ in range(3)] == [0, 64, 128]


@given(order=st.permutations(range(12)))
@settings(max_examples=50, deadline=None)
def test_neighbours_are_joined_in_whatever_order_they_come_back(order: list[int]) -> None:
    arena = Arena(lambda _: pytest.fail("grew"))
    arena.add(HeapRegion(1, 12 * ALIGNMENT))
    blocks = [arena.allocate(ALIGNMENT) for _ in range(12)]
    for i in order:
        arena.release(blocks[i])

    assert arena.allocate(12 * ALIGNMENT).offset == 0


def test_a_block_stays_while_somebody_holds_it(arena: Arena) -> None:
    block = arena.allocate(100)
    block.holds += 1
    arena.release(block)
    assert arena.find(1, block.offset) is block
    arena.release(block)

    assert arena.find(1, block.offset) is None
    assert arena.used_bytes == 0


def test_an_error_of_the_creator_reaches_the_caller_and_changes_nothing(arena: Arena) -> None:
    with pytest.raises(OutOfMemory, match=f"no {17 * PAGE} bytes"):
        arena.allocate(16 * PAGE + 1)

    assert (arena.size_bytes, arena.used_bytes) == (16 * PAGE, 0)


def test_a_region_that_is_smaller_than_asked_for_is_told() -> None:
    arena = Arena(lambda _: HeapRegion(2, 64))

    with pytest.raises(ValueError, match="asked for a region of 128 bytes, got one of 64"):
        arena.allocate(65)


def test_the_first_region_is_never_idle(arena: Arena) -> None:
    assert arena.idle() == {}


def test_a_region_that_was_used_between_two_looks_shows_it(arena: Arena) -> None:
    arena.add(HeapRegion(2, 32 * PAGE))
    before = arena.idle()
    arena.release(arena.allocate(20 * PAGE))

    assert (before, arena.idle()) == ({2: 0}, {2: 1})


def test_a_retired_region_is_not_allocated_in(arena: Arena) -> None:
    region = HeapRegion(2, 32 * PAGE)
    arena.add(region)

    assert arena.retire(2) is region
    with pytest.raises(OutOfMemory):
        arena.allocate(20 * PAGE)
    assert arena.find(2, 0) is None


KEEP = Keep(60.0, 5.0)


@pytest.fixture
def grown(arena: Arena) -> Arena:
    arena.add(HeapRegion(2, 32 * PAGE))
    arena.add(HeapRegion(3, 64 * PAGE))
    return arena


def over(idle: Idle, arena: Arena, now_s: float) -> list[int]:
    return [region_id for _, region_id in idle.over([arena], now_s)]


def test_the_first_region_by_which_an_arena_grew_is_kept_longer(grown: Arena) -> None:
    idle = Idle(KEEP)

    assert over(idle, grown, 100.0) == []
    assert over(idle, grown, 104.9) == []
    assert over(idle, grown, 105.0) == [3]
    grown.retire(3)
    assert over(idle, grown, 159.9) == []
    assert over(idle, grown, 160.0) == [2]


def test_the_time_of_a_region_begins_anew_with_each_use(grown: Arena) -> None:
    idle = Idle(KEEP)
    over(idle, grown, 0.0)
    grown.release(grown.allocate(20 * PAGE))
    block = grown.allocate(40 * PAGE)

    assert over(idle, grown, 60.0) == []
    grown.release(block)
    assert over(idle, grown, 119.9) == []
    assert over(idle, grown, 125.0) == [2, 3]


@pytest.mark.parametrize(("room", "expected"), [(112 * PAGE, [3]), (112 * PAGE - 1, [2, 3])])
def test_nothing_is_kept_longer_where_memory_is_short(
    grown: Arena, monkeypatch: pytest.MonkeyPatch, room: int, expected: list[int]
) -> None:
    monkeypatch.setattr(arenas, "headroom_bytes", lambda: room)
    idle = Idle(KEEP)
    over(idle, grown, 0.0)

    assert over(idle, grown, 5.0) == expected


@given(st.integers(0, 2**40), st.integers(1, 2**30), st.none() | st.integers(0, 2**41))
def test_growth_is_what_is_needed_and_stays_within_the_limit(
    present_pages: int, needed_pages: int, limit_bytes: int | None
) -> None:
    present, needed = present_pages * PAGE, needed_pages * PAGE
    if limit_bytes is not None and present + needed > limit_bytes:
        with pytest.raises(OutOfMemory, match="raise MOONPOOL_REGION_LIMIT_BYTES"):
            growth_bytes(present, needed, limit_bytes)
        return

    size = growth_bytes(present, needed, limit_bytes)

    assert needed <= size <= max(present, needed)
    assert size % PAGE == 0
    assert limit_bytes is None or present + size <= limit_bytes


@pytest.mark.parametrize(
    ("present_pages", "needed_pages", "limit_pages", "expected_pages"),
    [(0, 1, None, 1), (4, 1, None, 4), (4, 9, None, 9), (4, 1, 7, 3), (4, 3, 7, 3), (4, 1, 99, 4)],
)
def test_memory_doubles_as_far_as_it_may(
    present_pages: int, needed_pages: int, limit_pages: int | None, expected_pages: int
) -> None:
    limit = None if limit_pages is None else limit_pages * PAGE

    assert growth_bytes(present_pages * PAGE, needed_pages * PAGE, limit) == expected_pages * PAGE


def test_the_smallest_region_is_chosen_from_sizes_that_are_no_whole_pages() -> None:
    assert growth_bytes(100, PAGE, 2 * PAGE) == PAGE
    with pytest.raises(OutOfMemory, match=f"{2 * PAGE} bytes of shared memory are needed"):
        growth_bytes(100, 2 * PAGE, 2 * PAGE)
