"""The memory that one stub may read: blocks that the runtime wrote for it, and memory of others that was lent to it.

Theory of operation. Every block that a message to the stub names is noted here first, by its place (region and offset),
and stays allocated until the stub has no use for it. There are three ways to have a block:

- `lent` has the inputs of the present batch. The epoch of such a borrowed block is the batch: its ANSWER ends it.
  ANSWER lists the blocks that the model still refers to (`held`), and these move to `_kept`.
- `_kept` has the blocks that the model keeps, and the answers to calls of the model, which no batch ends (`keep=True`).
  The stub gives such a block back by name, in a later ANSWER, in RELEASE, or with its next call. The same memory may be
  lent several times at once, so each place has a list, and each giving back ends one of them.
- `targets` has memory of clients that outputs of the present batch are written to. It ends with the batch.

A block of ours may be used again when two things are true: the stub has given it back, and no caller looks at it. A
model may answer with its input, and then `open` makes a lease on the block for the caller and counts it in `holds`.
`Arena.release` frees a block only when its last holder has released it. Memory of others is kept alive by the reference
to its lease.

Batches and replies mostly want one block, of a size class that others had before. So if a batch had only one, in the
first region, and nobody looks at it, `end_batch` does not release the block but puts it aside (`spares`), one of each
class. `take_back` does so, too. Nothing is lent in such a block. The next `allocate` or `lend_spare` of that class
lends it again. They are released before another region is made, and
by `tidy` and `used_bytes`. Each step with them is one instruction, as `RuntimePort` takes them and puts them back
without the lock.

Who holds the lock. The driver lends inputs, ends batches, and takes back what ANSWER and RELEASE name. A thread with
the answer to a call lends that, the reactor takes back what calls of the stub name, and any thread may drop the last
view of a block. The last one may do so in the garbage collector, while the same thread holds the lock. So leases take
no lock: they append to `_returned`, and the next `allocate` or `tidy` collects it. For the same reason `take_back`
keeps dropped leases in a list until the lock is free again: such a lease may be the last reference to an object whose
end calls other code.

A region is announced under the lock, before the first block in it is named. Messages that name it are sent after that,
perhaps on another channel, and the stub waits for the announcement of a region that it does not know yet.

If the driver gets no answer, nothing is freed. `close` frees all when the stub is given up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.arena import Arena, Block, Idle, Keep, block_bytes
from moonpool.ipc.errors import CudaUnavailable, OutOfMemory, RemoteProtocolError
from moonpool.ipc.memory import ALIGNMENT, SHARED_BYTES, Lease, Region, lease_of, offset_in
from moonpool.ipc.messages import Side
from moonpool.ipc.port import LentBlocks
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.model import budgets
from moonpool.runtime.model.request import InferenceRequest
from moonpool.runtime.process.threads import INTERRUPTIBLE
from moonpool.runtime.stubs.allotment import Allotment
from moonpool.runtime.stubs.regions import CallerMemory, ClientRegion

if TYPE_CHECKING:
    from moonpool.ipc.cuda.array import DeviceArray
    from moonpool.ipc.cuda.region import DeviceLease, DeviceRegion
    from moonpool.runtime.stubs.devices import Lanes

    # What is kept for as long as the stub may look at it.
    Borrowed = Block | Lease | DeviceLease
    # The request in the batch, the number of its input, and that.
    Input = tuple[int, int, DeviceArray]

Place = tuple[int, int]


def _keep(_: object) -> None:
    """Do nothing. For leases that only have to keep their token alive."""


class BorrowedBlocks(LentBlocks):
    """The blocks that one stub has at this moment. Any thread may call any method."""

    first: SharedRegion
    lent: list[tuple[Place, Borrowed]]
    targets: list[tuple[Place, Lease]]
    spares: dict[int, Block]
    # For the compiled port, which lies below that module.
    interruptible = INTERRUPTIBLE

    def __init__(
        self,
        send_region: Callable[[Any, Side], None],
        first: SharedRegion,
        allotment: Allotment,
        retire: Callable[[int], None],
        *,
        is_private: bool = False,
        lanes: Callable[[], Lanes] | None = None,
    ) -> None:
        """Own `allotment`. `first` comes from it, and the caller announces it to the stub.

        `send_region` announces a region to the stub, and `retire` makes the stub forget one. `lanes` returns the lanes
        to the stub, and makes them at the first call. It is only called if device memory is handled.
        """
        super().__init__(first)
        self._send_region = send_region
        self._lanes = lanes
        self._retire = retire
        self._allotment = allotment
        # Bytes of retired regions on each device, which the process may have kept. Those of a contained process count
        # until it ends.
        self._kept_on: Counter[int] = Counter()
        self._arena = Arena(self._grow)
        self._arena.add(first)
        # Memory on devices that the runtime writes for the stub, by the device's number.
        self._arenas: dict[int, Arena] = {}
        self._regions: dict[int, SharedRegion | DeviceRegion] = {first.id: first}
        # True if this stub and others must not see each other's memory.
        self.is_private = first.is_private = is_private
        self._caller_memory: CallerMemory | None = None
        # Regions of others that the stub knows.
        self._announced: dict[int, SharedRegion | DeviceRegion] = {}
        # Kept by the model: inputs of earlier batches, and answers to its calls.
        self._kept: dict[Place, list[Borrowed]] = {}
        # Blocks of ours that were handed on, and whose last view was dropped.
        self._returned: deque[object] = deque()
        self._give_back: Callable[[object], object] = self._returned.append
        self._idle = Idle(Keep(budgets.KEEP_FIRST_MS / 1000, budgets.KEEP_MS / 1000))

    def serve(self, caller_memory: CallerMemory) -> None:
        """Lend arrays in this memory from now on, whatever their size."""
        self._caller_memory = caller_memory

    def _grow(self, needed_bytes: int) -> SharedRegion:
        region = self._allotment.region(self._arena.size_bytes, needed_bytes)
        region.is_private = self.is_private
        self._regions[region.id] = region
        self._send_region(region, Side.RUNTIME)
        return region

    def _grow_on(self, gpu: int, needed_bytes: int) -> DeviceRegion:
        from moonpool.runtime.stubs.devices import new_device_region

        present_bytes = self._arenas[gpu].size_bytes
        region = new_device_region(present_bytes, needed_bytes, self._allotment.limit_bytes, gpu, self._kept_on[gpu])
        region.is_private = self.is_private
        self._regions[region.id] = region
        self._send_region(region, Side.RUNTIME)
        return region

    # Lending

    def allocate(self, size_bytes: int, *, keep: bool = False) -> Block:
        """Allocate a block to write into, lent for this batch, or with `keep` until the stub gives it back.

        Raises `OutOfMemory`.
        """
        with self.lock:
            if self._returned:
                self._collect()
            size = block_bytes(size_bytes)
            block = self.spares.pop(size, None)
            if block is None:
                if self.spares and not self._arena.has_room(size):
                    self._release_spares()
                try:
                    block = self._allocate(self._arena, size)
                except OutOfMemory:
                    # The rest of its class may be too much.
                    block = self._allocate(self._arena, size_bytes)
            self._note((block.region.id, block.offset), block, keep)
            return block

    def lend_spare(self, class_bytes: int) -> Block | None:
        """Lend a block of that class until the stub gives it back. Returns None if none was put aside."""
        with self.lock:
            block = self.spares.pop(class_bytes, None)
            if block is not None:
                self._kept.setdefault((block.region.id, block.offset), []).append(block)
            return block

    def _allocate(self, arena: Arena, size_bytes: int) -> Block:
        """Allocate. What is kept for later is given up if there is no memory otherwise."""
        try:
            return arena.allocate(size_bytes)
        except OutOfMemory:
            given_up = [self._give_up(arena, region_id) for region_id in arena.idle()]
            if not any(given_up):
                raise
            return arena.allocate(size_bytes)

    def allocate_on(self, gpu: int, size_bytes: int, *, keep: bool = False) -> Block:
        """Allocate as `allocate` does, on a device that the stub sees. The caller writes in the order of its lane.

        Raises `OutOfMemory`, `CudaUnavailable`, `CudaError`.
        """
        # The stub must know the lane before the first region there.
        self.lanes.lane(gpu)
        with self.lock:
            self._collect()
            arena = self._arenas.get(gpu)
            if arena is None:
                arena = self._arenas[gpu] = Arena(partial(self._grow_on, gpu))
            block = self._allocate(arena, size_bytes)
            self._note((block.region.id, block.offset), block, keep)
            return block

    @property
    def lanes(self) -> Lanes:
        """The lanes to the stub. Raises `CudaUnavailable` if the stub must not handle device memory."""
        if self._lanes is None:
            raise CudaUnavailable("this stub may not use device memory of others")
        return self._lanes()

    def lend(self, array: np.ndarray, *, keep: bool = False) -> tuple[list[int], int] | None:
        """Lend the memory that an array lies in. Returns its block, and the offset of the array there.

        Returns None for memory that the stub cannot, may not or need not see. Then the caller has to copy the array.
        """
        lease = lease_of(array)
        if lease is None or not array.flags.c_contiguous:
            return None
        region, place_offset, size_bytes = lease.region, lease.offset, lease.size
        if type(region) is not ClientRegion and not self._may_see(lease, array):
            return None
        with self.lock:
            if not self._announce(region):  # type: ignore[arg-type]
                return None
            self._note((region.id, place_offset), lease, keep)  # type: ignore[union-attr]
        return [region.id, place_offset, size_bytes], offset_in(lease, array)  # type: ignore[union-attr]

    def lend_on_device(self, array: DeviceArray, *, keep: bool = False) -> tuple[list[int], int] | None:
        """Lend an array on a device as `lend` does. Work of the stub there comes after all work on the array so far."""
        lease = array.lease
        if lease is None:
            return None
        region, lanes = lease.region, self.lanes
        gpu = region.device.ordinal
        if lanes.number_of(gpu) is None:
            return None
        is_callers = self._caller_memory is not None and self._caller_memory.has_on_device(lease)
        if not is_callers and (self.is_private or region.is_private):
            return None
        lane = lanes.lane(gpu)
        with self.lock:
            if not self._announce(region):
                return None
            self._note((region.id, lease.offset), lease, keep)
        lease.use(lane.stream)
        return [region.id, lease.offset, lease.size], array.address - lease.address

    def _may_see(self, lease: Lease, array: np.ndarray) -> bool:
        if self._caller_memory is not None and self._caller_memory.find(lease) is not None:
            return True
        region = lease.region
        return not (
            array.nbytes < SHARED_BYTES or type(region) is not SharedRegion or self.is_private or region.is_private
        )

    def lend_target(self, lease: Lease) -> list[int]:
        """Let the stub write an output of this batch to memory of a client. Returns its block."""
        region: SharedRegion = lease.region  # type: ignore[assignment]
        with self.lock:
            self._announce(region)
            self.targets.append(((region.id, lease.offset), lease))
        return [region.id, lease.offset, lease.size]

    def _announce(self, region: SharedRegion | DeviceRegion) -> bool:
        if region.id in self._announced or region.id in self._regions:
            return True
        # Clients may come and go faster than `tidy` is called.
        self._forget_closed()
        if not region.share(lambda each: self._send_region(each, Side.RUNTIME)):
            return False
        self._announced[region.id] = region
        return True

    def has_lent(self, region: Region) -> bool:
        """Return True if the stub may look into a region."""
        return region.id in self._announced or region.id in self._regions

    def _note(self, place: Place, borrowed: Borrowed, keep: bool) -> None:
        if keep:
            self._kept.setdefault(place, []).append(borrowed)
        else:
            self.lent.append((place, borrowed))

    # Looking at what is lent

    def open(self, region_id: int, offset: int, size_bytes: int) -> Lease:
        """Return a lease on the memory that is lent to the stub at a place that it names.

        Raises `RemoteProtocolError` if nothing of that size is lent there.
        """
        place = (region_id, offset)
        with self.lock:
            borrowed: Borrowed | None = self._find_target(place)
            if borrowed is None:
                borrowed = self._find(place)
            if borrowed is not None and size_bytes <= (
                borrowed.size_bytes if type(borrowed) is Block else borrowed.size  # type: ignore[union-attr]
            ):
                if not isinstance(borrowed.region, SharedRegion):
                    return self._open_on_device(borrowed, size_bytes)  # type: ignore[arg-type,return-value]
                if type(borrowed) is Block:
                    borrowed.holds += 1
                    return borrowed.region.lease(offset, size_bytes, self._give_back, borrowed)
                return borrowed.again(size_bytes, _keep, borrowed)  # type: ignore[union-attr]
        raise RemoteProtocolError(
            f"a block of {size_bytes} bytes at {offset} in region {region_id}, which is not the stub's to answer from"
        )

    def _open_on_device(self, borrowed: Block | DeviceLease, size_bytes: int) -> DeviceLease:
        region: DeviceRegion = borrowed.region  # type: ignore[assignment]
        lane = self.lanes.met(region.device.ordinal)
        # A lease knows the stub's lane since it was lent.
        if type(borrowed) is not Block:
            return borrowed  # type: ignore[return-value]
        borrowed.holds += 1
        return region.lease(borrowed.offset, size_bytes, self._give_back, borrowed, lane)

    def _find_target(self, place: Place) -> Lease | None:
        for lent, lease in self.targets:
            if lent == place:
                return lease
        return None

    def _find(self, place: Place) -> Borrowed | None:
        borrowed = next((borrowed for lent, borrowed in self.lent if lent == place), None)
        if borrowed is None and place in self._kept:
            borrowed = self._kept[place][-1]
        # A stub gets a private view of a client's input, so nobody else sees what it writes there.
        return None if type(getattr(borrowed, "region", None)) is ClientRegion else borrowed

    # Giving back

    def end_batch(self, held: Sequence[list[int]]) -> None:
        """Free the blocks of the batch, except those in `held`, which the model keeps.

        Raises `RemoteProtocolError` if the model keeps what it was not given.
        """
        with self.lock:
            lent, self.lent = self.lent, []
            if self.targets:
                self.targets.clear()
            if held:
                lent = self._keep_some(lent, held)
            elif len(lent) == 1:
                block = lent[0][1]
                if type(block) is Block and _put_aside(self, block):
                    return
            for _, borrowed in lent:
                if type(borrowed) is Block:
                    (self._arena_of(borrowed) if self._arenas else self._arena).release(borrowed)

    def _arena_of(self, block: Block) -> Arena:
        if isinstance(block.region, SharedRegion):
            return self._arena
        region: DeviceRegion = block.region  # type: ignore[assignment]
        return self._arenas[region.device.ordinal]

    def _keep_some(self, lent: list[tuple[Place, Borrowed]], held: Sequence[list[int]]) -> list[tuple[Place, Borrowed]]:
        """Note the blocks that the model keeps, and return the others."""
        # The same memory may have been lent more than once, so places are counted.
        kept = Counter((region, offset) for region, offset in held)
        rest = []
        for place, borrowed in lent:
            if kept[place]:
                kept[place] -= 1
                self._note(place, borrowed, keep=True)
            else:
                rest.append((place, borrowed))
        for place in kept.elements():
            raise RemoteProtocolError(f"the stub keeps block {place}, which it was not given")
        return rest

    def take_back(self, places: Iterable[Sequence[int]]) -> None:
        """Take back blocks that the model kept. Raises `RemoteProtocolError` for a block that it does not have."""
        borrowed_blocks = []
        with self.lock:
            for each in places:
                place = (each[0], each[1])
                kept = self._kept.get(place)
                if not kept:
                    raise RemoteProtocolError(f"the stub releases block {place}, which it does not hold")
                # Not dropped under the lock: it may be the last reference to a lease.
                borrowed = kept.pop()
                borrowed_blocks.append(borrowed)
                if not kept:
                    del self._kept[place]
                if type(borrowed) is Block and not _put_aside(self, borrowed):
                    self._arena_of(borrowed).release(borrowed)

    def _release_spares(self) -> None:
        while self.spares:
            try:
                _, block = self.spares.popitem()
            except KeyError:  # the port has taken the last one
                return
            self._arena.release(block)

    def _collect(self) -> None:
        while self._returned:
            block: Block = self._returned.popleft()  # type: ignore[assignment]
            self._arena_of(block).release(block)

    # Memory that is not needed for now

    def tidy(self, now_s: float) -> None:
        """Give up regions that were not used for their time. `now_s` is of a monotonic clock."""
        with self.lock:
            self._collect()
            self._release_spares()
            for arena, region_id in self._idle.over((self._arena, *self._arenas.values()), now_s):
                self._give_up(arena, region_id)
            self._forget_closed()

    def _give_up(self, arena: Arena, region_id: int) -> bool:
        """Give up an idle region. Returns False if that is not possible."""
        region = self._regions[region_id]
        # Device memory that was shared by a handle stays until the process that opened it has ended.
        if not isinstance(region, SharedRegion) and region.handle:
            return False
        arena.retire(region_id)
        self._retire(region_id)
        del self._regions[region_id]
        if isinstance(region, SharedRegion):
            self._allotment.retire(region)
        else:
            if self.is_private:
                self._kept_on[region.device.ordinal] += region.size_bytes
            region.close()
        return True

    def _forget_closed(self) -> None:
        """Let the stub forget regions that their makers have closed, and in which nothing is lent."""
        closed = [region.id for region in self._announced.values() if region.is_closed]
        if closed:
            in_use = {place[0] for place in self._kept} | {place[0] for place, _ in self.lent}
            for region_id in closed:
                if region_id not in in_use:
                    del self._announced[region_id]
                    self._retire(region_id)

    @property
    def size_bytes(self) -> int:
        """The size of all memory that was made for this stub to read."""
        return self._arena.size_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes of that memory which are lent, or which others look at."""
        with self.lock:
            self._collect()
            self._release_spares()
            return self._arena.used_bytes

    @property
    def count(self) -> int:
        """The number of borrowed blocks at this moment."""
        with self.lock:
            return len(self.lent) + sum(map(len, self._kept.values()))

    @property
    def has_clients_memory(self) -> bool:
        """True if the stub works at this moment in memory of a client, which the client can cut short."""
        with self.lock:
            borrowed_blocks = [borrowed for _, borrowed in self.lent]
            borrowed_blocks += [borrowed for kept in self._kept.values() for borrowed in kept]
            return bool(self.targets) or any(type(each.region) is ClientRegion for each in borrowed_blocks)

    @property
    def is_kept(self) -> bool:
        """True if the model keeps anything."""
        return bool(self._kept)

    def close(self) -> None:
        """Close all regions and end the use of all borrowed blocks. Leases that callers hold stay valid."""
        with self.lock:
            self.lent.clear()
            self.spares.clear()
            self._kept.clear()
            self.targets.clear()
            # Ends a cycle: the function refers to the link, which refers to this object.
            self._lanes = None
            for region in self._regions.values():
                region.close()
            self._allotment.close()


def _put_aside(blocks: LentBlocks, block: Block) -> bool:
    """Put a block aside that the stub has given back, for the next one of its class.

    Returns False if that cannot be.
    """
    is_alone = block.holds == 1 and block.region is blocks.first
    return is_alone and blocks.spares.setdefault(block.size_bytes, block) is block


def place(
    inputs: Iterable[Input],
    borrowed_blocks: BorrowedBlocks,
    blocks: list[list[int]],
    found: dict[tuple[int, int], tuple[int, int]],
) -> None:
    """Let a stub see these inputs of a batch, which lie on devices.

    Adds their blocks to `blocks`, and to `found` the block and offset of each, by request and number of the input. An
    array that may not be lent is copied on the device, the rows of each input back to back. Raises what
    `BorrowedBlocks.allocate_on` raises.
    """
    copied: dict[int, list[Input]] = {}
    for each in inputs:
        request, number, array = each
        lent = borrowed_blocks.lend_on_device(array)
        if lent is None:
            copied.setdefault(borrowed_blocks.lanes.nearest(array.device.ordinal), []).append(each)
        else:
            found[request, number] = len(blocks), lent[1]
            blocks.append(lent[0])
    for gpu, some in copied.items():
        some.sort(key=lambda each: (each[1], each[0]))
        offsets, size_bytes = _in_rows(some)
        for (request, number, _), offset in zip(some, offsets, strict=True):
            found[request, number] = len(blocks), offset
        arrays = [array for _, _, array in some]
        blocks.append(_copy(arrays, offsets, size_bytes, gpu, borrowed_blocks, keep=False))


def lend_or_copy(array: DeviceArray, borrowed_blocks: BorrowedBlocks, *, keep: bool) -> tuple[list[int], int]:
    """Let a stub see an array on a device. Returns its block, and the offset there. Raises as `place` does."""
    lent = borrowed_blocks.lend_on_device(array, keep=keep)
    if lent is not None:
        return lent
    gpu = borrowed_blocks.lanes.nearest(array.device.ordinal)
    return _copy([array], [0], array.nbytes, gpu, borrowed_blocks, keep=keep), 0


def hand_back(requests: Iterable[InferenceRequest], borrowed_blocks: BorrowedBlocks) -> None:
    """Order later work of callers on arrays that they lent after the work of the stub on them. Callers may be
    models.
    """
    lanes = borrowed_blocks.lanes
    for request in requests:
        for array in request.arrays:
            lease = getattr(array, "lease", None)
            if lease is None or not borrowed_blocks.has_lent(lease.region):
                continue
            device_array: DeviceArray = array
            lane = lanes.lane(lanes.nearest(device_array.device.ordinal))
            device_array.leave(lane.stream)
            if lease.lane is not None and lease.lane is not lane:
                lease.lane.follow(lane)


def _in_rows(inputs: Iterable[Input]) -> tuple[list[int], int]:
    """Return the offset of each input in a block, those of one number back to back, and the size of the block."""
    offsets = []
    end, before = 0, -1
    for _, number, array in inputs:
        if number != before:
            end = (end + ALIGNMENT - 1) & -ALIGNMENT
        offsets.append(end)
        end, before = end + array.nbytes, number
    return offsets, end


def _copy(
    arrays: Iterable[DeviceArray],
    offsets: Iterable[int],
    size_bytes: int,
    gpu: int,
    borrowed_blocks: BorrowedBlocks,
    *,
    keep: bool,
) -> list[int]:
    """Queue the copies of arrays into one block, and return the block."""
    block, lane = (borrowed_blocks.allocate_on(gpu, size_bytes, keep=keep), borrowed_blocks.lanes.lane(gpu))
    start = block.region.address + block.offset  # type: ignore[attr-defined]
    for array, offset in zip(arrays, offsets, strict=True):
        array.enter(lane.stream)
        lane.copy(start + offset, array.address, array.nbytes)
        # The owner may change the array or free it as soon as it has the answer.
        array.leave(lane.stream)
        lane.keep(array)
    return [block.region.id, block.offset, size_bytes]
