"""Allocates blocks for tensors in regions. Used by the writer of the regions.

Theory of operation. Only the writer of a region allocates in it, and the table lives in the writer's own
memory, so no peer can damage it. A *block* is in use while somebody holds it: the reader that got
a message about it, a local array, a response that passes an input through. Each holder counts once in `Block.holds`.

Free bytes of a region are kept as extents in order of address. The first extent that is large enough is cut, and
neighbours are joined again when a block is released. So low addresses are used again and again, and stay in the
processor's cache. Released blocks of one size stay whole until another size is wanted, because the next request is
mostly as large as the last one.

A region never grows, because the peer has mapped it. If no region has enough room, `create` makes another one, of about
the size of all that there are, so that their number grows with the logarithm of the memory. Later regions are given up
again once they are idle (`Idle`). The first of them is kept longer: to make it anew takes several times as long as to
copy a tensor into it, and most models that once had a large tensor will have another one. A block is named by region
and offset, and the number of a region that was given up is not used for another one, so a late message about a block in
it finds nothing.

On the main thread of a stub, a signal handler of the model's may raise anywhere in this code. So the tables change at
once (`signals.py`): a block is in use and with its new owner, or it is free.

Not thread-safe: one thread at a time owns an arena. Other threads release blocks through a queue that the owner
drains. A lease may end in any thread, in the middle of a garbage collection, and must not wait for a lock there.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.memory import ALIGNMENT, Region
from moonpool.ipc.region import headroom_bytes
from moonpool.ipc.signals import at_once, set_at_once

_PAGE = 4096
# Larger tensors have a block of just their size.
LARGEST_CLASS = 1 << 20
# The last item of a list, and the place behind it.
_LAST = slice(-1, None)
_END = slice(sys.maxsize, None)


def _rounded(size_bytes: int) -> int:
    """Return the size of the smallest block for so many bytes."""
    return (size_bytes + ALIGNMENT - 1) & -ALIGNMENT or ALIGNMENT


def block_bytes(size_bytes: int) -> int:
    """Return the size of the block for a tensor of so many bytes: a few classes for each power of two.

    Requests of different sizes then find a block that was released before them. A class is larger than a tensor in it
    by a quarter at most. `block_bytes` in ipc/native/port.h does the same.
    """
    units = _rounded(size_bytes) // ALIGNMENT
    if size_bytes <= LARGEST_CLASS:
        shift = max(0, units.bit_length() - 3)
        units = -(-units >> shift) << shift
    return units * ALIGNMENT


class Block:
    """A range of bytes in use, with the number of its holders."""

    __slots__ = ("holds", "offset", "region", "size_bytes")

    def __init__(self, region: Region, offset: int, size_bytes: int) -> None:
        self.region = region
        self.offset = offset
        self.size_bytes = size_bytes
        self.holds = 1

    def __repr__(self) -> str:
        return f"<Block {self.region.id}+{self.offset}:{self.size_bytes} holds={self.holds}>"


class Extents:
    """The free bytes and the blocks of one region."""

    __slots__ = ("_free", "_spares", "live", "region", "uses")

    def __init__(self, region: Region) -> None:
        self.region = region
        self.live: dict[int, Block] = {}
        self.uses = 0
        # The start and the size of each extent.
        self._free = [(0, region.size_bytes)]
        # The blocks that were released last, all of one size. They are in no extent yet.
        self._spares: list[Block] = []

    def take(self, size_bytes: int, taken: list[Block]) -> Block | None:
        """Return a spare block of that size, or one cut from the first extent that has room; None if none has.

        `taken` gets the block, too.
        """
        if self._spares:
            block = self._spares[-1]
            if block.size_bytes == size_bytes:
                self.uses += 1
                # Nobody reads the holders of a spare block.
                block.holds = 1
                tables = (self._spares, self.live, taken)
                set_at_once(tables, (_LAST, block.offset, _END), ((), block, (block,)))
                return block
            self._join_spares()
        return self._cut(size_bytes, taken)

    def _cut(self, size_bytes: int, taken: list[Block]) -> Block | None:
        for i, (start, free) in enumerate(self._free):
            if free >= size_bytes:
                rest = [(start + size_bytes, free - size_bytes)] if free > size_bytes else []
                block = Block(self.region, start, size_bytes)
                self.uses += 1
                tables = (self._free, self.live, taken)
                set_at_once(tables, (slice(i, i + 1), start, _END), (rest, block, (block,)))
                return block
        return None

    def has_room(self, size_bytes: int) -> bool:
        """Return True if a block of that size is free."""
        if self._spares and self._spares[-1].size_bytes == size_bytes:
            return True
        self._join_spares()
        # No generator: a signal handler may raise while it is closed, and nobody would get that.
        return max([free for _, free in self._free], default=0) >= size_bytes

    def give(self, block: Block, *steps: Callable[[], object]) -> None:
        """Make the bytes of a block free again, and take further steps at once with that."""
        if self._spares and self._spares[-1].size_bytes != block.size_bytes:
            self._join_spares()
        at_once(partial(self.live.__delitem__, block.offset), partial(self._spares.append, block), *steps)
        block.holds = 0

    def _join_spares(self) -> None:
        while self._spares:
            self._join_last_spare()

    def _join_last_spare(self) -> None:
        """Join the bytes of a free block with free neighbours."""
        free, block = self._free, self._spares[-1]
        offset, size = block.offset, block.size_bytes
        first = last = bisect_left(free, (offset, 0))
        if last < len(free) and free[last][0] == offset + size:
            size += free[last][1]
            last += 1
        if first and sum(free[first - 1]) == offset:
            first -= 1
            offset = free[first][0]
            size += free[first][1]
        set_at_once((self._spares, free), (_LAST, slice(first, last)), ((), [(offset, size)]))


class Arena:
    """Allocates blocks in regions, and adds regions as they are needed.

    `create` makes a region of at least that many bytes, in whole pages, or raises `OutOfMemory`.
    """

    __slots__ = ("_create", "_extents")

    def __init__(self, create: Callable[[int], Region]) -> None:
        self._create = create
        self._extents: dict[int, Extents] = {}

    @property
    def has_grown(self) -> bool:
        """True if there is more than the first region."""
        return len(self._extents) > 1

    def add(self, region: Region) -> None:
        """Allocate in this region from now on, if it is not known yet. The first one added is never idle."""
        if region.id not in self._extents:
            self._extents[region.id] = Extents(region)

    def has_room(self, size_bytes: int) -> bool:
        """Return True if a block of that size needs no other region."""
        size = _rounded(size_bytes)
        for extents in self._extents.values():  # noqa: SIM110 - no generator here either
            if extents.has_room(size):
                return True
        return False

    def allocate(self, size_bytes: int, taken: list[Block] | None = None) -> Block:
        """Return a block that the caller holds once. If there is no room, raises what `create` raises.

        `taken` gets the block, too: if a signal handler raises, the block is there or was not allocated.
        """
        size = _rounded(size_bytes)
        into = [] if taken is None else taken
        for extents in self._extents.values():
            block = extents.take(size, into)
            if block is not None:
                return block
        region = self._create((size + _PAGE - 1) & -_PAGE)
        self.add(region)
        block = self._extents[region.id].take(size, into)
        if block is None:
            raise ValueError(f"asked for a region of {size} bytes, got one of {region.size_bytes}")
        return block

    def is_first(self, region: Region) -> bool:
        """Return True for the first region that was added."""
        return next(iter(self._extents.values())).region is region

    @property
    def size_bytes(self) -> int:
        """The size of all regions together."""
        return sum(extents.region.size_bytes for extents in self._extents.values())

    @property
    def used_bytes(self) -> int:
        """The size of all blocks in use together."""
        return sum(block.size_bytes for block in self.blocks())

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks that somebody holds."""
        for extents in self._extents.values():
            for block in extents.live.values():
                if block.holds:
                    yield block

    def regions(self) -> list[Region]:
        """Return all regions in which blocks are allocated."""
        return [extents.region for extents in self._extents.values()]

    def region(self, region_id: int) -> Region | None:
        """Return the region of that number, or None if no blocks are allocated in it."""
        extents = self._extents.get(region_id)
        return None if extents is None else extents.region

    def find(self, region_id: int, offset: int) -> Block | None:
        """Return the block in use that begins at this offset, or None."""
        extents = self._extents.get(region_id)
        return None if extents is None else extents.live.get(offset)

    def release(self, block: Block, *steps: Callable[[], object]) -> None:
        """Count one holder less, and take further steps, functions of C, at once with that. After the last holder, the
        bytes are free.
        """
        if block.holds > 1:
            at_once(partial(setattr, block, "holds", block.holds - 1), *steps)
        else:
            self._extents[block.region.id].give(block, *steps)

    def idle(self) -> dict[int, int]:
        """Return the regions after the first that have no blocks, each with the number of blocks that it ever had.

        If that number is the same in two calls, the region was not needed in between.
        """
        later = list(self._extents.values())[1:]
        return {extents.region.id: extents.uses for extents in later if not extents.live}

    @property
    def first_grown(self) -> int:
        """The number of the region by which the arena has grown first, of those that it has; 0 if there is none."""
        later = list(self._extents)[1:]
        return later[0] if later else 0

    def retire(self, region_id: int) -> Region:
        """Stop using an idle region. The caller closes it."""
        return self.retirement(region_id)().region

    def retirement(self, region_id: int) -> Callable[[], Extents]:
        """Return the function of C that stops using an idle region."""
        if self._extents[region_id].live:
            raise ValueError(f"region {region_id} is in use")
        return partial(self._extents.pop, region_id)


class Keep(NamedTuple):
    """The seconds for which an arena keeps idle regions: the first one by which it has grown, and the others."""

    first_s: float
    others_s: float


class Idle:
    """Remembers since when regions of some arenas have been idle. For the thread that has the arenas."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        # By region: the number of its blocks so far, and the time since which that has not changed.
        self._since: dict[int, tuple[int, float]] = {}

    def over(self, arenas: Iterable[Arena], now_s: float) -> list[tuple[Arena, int]]:
        """Return the regions to give up, as they have been idle for their time. `now_s` is of a monotonic clock.

        If the machine has less memory left than an arena has, its first one is not kept longer than the others.
        """
        since: dict[int, tuple[int, float]] = {}
        over = []
        for arena in arenas:
            for region_id, uses in arena.idle().items():
                before, since_s = self._since.get(region_id, (uses, now_s))
                if before != uses:
                    since_s = now_s
                idle_s = now_s - since_s
                if idle_s >= self._keep.others_s and not self._is_kept(arena, region_id, idle_s):
                    over.append((arena, region_id))
                since[region_id] = uses, since_s
        self._since = since
        return over

    def _is_kept(self, arena: Arena, region_id: int, idle_s: float) -> bool:
        return region_id == arena.first_grown and idle_s < self._keep.first_s and not is_short(arena.size_bytes)


def is_short(size_bytes: int) -> bool:
    """Return whether less memory is left to this process than so much, as far as the system tells."""
    room = headroom_bytes()
    return room is not None and room < size_bytes


def growth_bytes(present_bytes: int, needed_bytes: int, limit_bytes: int | None, others_bytes: int = 0) -> int:
    """Return the size of a region to add: the sum of the present ones, within the limit, so that there are never many.

    `others_bytes` count towards the limit as well: memory in use elsewhere, or memory that the process may have kept.
    Raises `OutOfMemory` if `needed_bytes` do not fit.
    """
    if limit_bytes is None:
        return max(present_bytes, needed_bytes)
    left = (limit_bytes - present_bytes - others_bytes) // _PAGE * _PAGE
    if needed_bytes > left:
        others = f" and {others_bytes} in use elsewhere or kept by the process" if others_bytes else ""
        raise OutOfMemory(
            f"{needed_bytes} bytes of shared memory are needed and {present_bytes} are in use{others}, "
            f"{limit_bytes} are allowed; raise MOONPOOL_REGION_LIMIT_BYTES or send smaller tensors"
        )
    return min(max(present_bytes, needed_bytes), left)
