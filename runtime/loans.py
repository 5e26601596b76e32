"""What one stub may look at: memory that the runtime wrote for it, and memory of others that was lent to it.

A loan lasts for a batch, unless the stub says that the model keeps it, or until the stub gives it back. Whoever
drives the instance lends the inputs of a batch; what a call of the model is answered with is lent by
whichever thread has the answer. So there is a lock, which is never held for long.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any

from moonpool.ipc.arena import Arena, Block
from moonpool.ipc.errors import CudaUnavailable, RemoteProtocolError
from moonpool.ipc.memory import lease_of, offset_in
from moonpool.ipc.messages import Side
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.client_region import ClientRegion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np

    from moonpool.ipc.cuda.array import DeviceArray
    from moonpool.ipc.cuda.region import DeviceLease, DeviceRegion
    from moonpool.ipc.memory import Lease, Region
    from moonpool.runtime.allotment import RegionSource
    from moonpool.runtime.lanes import Lanes
    from moonpool.runtime.regions import CallerMemory

    Place = tuple[int, int]
    # What is kept for as long as the stub may look at it.
    Loan = Block | Lease | DeviceLease

# Memory of another stub is lent from this size on. What is smaller is copied, which costs less than
# telling of it, and keeps the rows of a batch together.
SHARED_BYTES = 64 * 1024


def _keep(_: object) -> None:
    """For leases that only have to keep their token alive."""


class Loans:
    """Any thread may call any method."""

    def __init__(
        self,
        send_region: Callable[[Any, Side], None],
        first: SharedRegion,
        source: RegionSource,
        retire: Callable[[int], None],
        *,
        is_private: bool = False,
        lanes: Callable[[], Lanes] | None = None,
    ) -> None:
        """`source` is owned from now on. `first` comes from it, and the caller announces it to the stub.

        `retire` tells the stub to forget a region.

        `lanes` makes those to the stub, at the first call; it is called where device memory is handled.
        """
        self._send_region = send_region
        self._lanes = lanes
        self._retire = retire
        self._source = source
        # The memory of each device that the process may have kept. For a contained one it counts until the process ends.
        self._kept_on: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._arena = Arena(self._grow)
        self._arena.add(first)
        # What the runtime writes for the stub on devices, by their numbers.
        self._arenas: dict[int, Arena] = {}
        self._regions: dict[int, SharedRegion | DeviceRegion] = {first.id: first}
        self.first = first
        # Whether this stub and others must not see each other's memory.
        self.is_private = first.is_private = is_private
        self._caller_memory: CallerMemory | None = None
        self._announced: dict[int, SharedRegion | DeviceRegion] = {}
        # Of this batch; and what the model keeps, of earlier batches and of answers to its calls.
        self._lent: list[tuple[Place, Loan]] = []
        self._kept: dict[Place, list[Loan]] = {}
        # Where outputs of this batch may go, in memory of clients.
        self._targets: list[tuple[Place, Lease]] = []
        # Blocks of ours that were handed on, and that those who had them let go of.
        self._returned: deque[object] = deque()
        self._give_back: Callable[[object], object] = self._returned.append
        self._idle: dict[int, int] = {}

    def serve(self, caller_memory: CallerMemory) -> None:
        """From now on, arrays in this memory are lent, whatever their size."""
        self._caller_memory = caller_memory

    def _grow(self, needed_bytes: int) -> SharedRegion:
        region = self._source.region(self._arena.size_bytes, needed_bytes)
        region.is_private = self.is_private
        self._regions[region.id] = region
        self._send_region(region, Side.RUNTIME)
        return region

    def _grow_on(self, gpu: int, needed_bytes: int) -> DeviceRegion:
        from moonpool.runtime.device_regions import new_device_region

        present_bytes = self._arenas[gpu].size_bytes
        region = new_device_region(
            present_bytes, needed_bytes, self._source.limit_bytes, gpu, self._kept_on[gpu]
        )
        region.is_private = self.is_private
        self._regions[region.id] = region
        self._send_region(region, Side.RUNTIME)
        return region

    # Lending

    def allocate(self, size_bytes: int, *, keep: bool = False) -> Block:
        """A block to write into, lent for this batch; with `keep`, until the stub gives it back.

        Raises `OutOfMemory`.
        """
        with self._lock:
            if self._returned:
                self._collect()
            block = self._arena.allocate(size_bytes)
            self._note((block.region.id, block.offset), block, keep)
            return block

    def allocate_on(self, gpu: int, size_bytes: int, *, keep: bool = False) -> Block:
        """As `allocate`, on a device that the stub sees; what is written there goes over its lane.

        Raises `OutOfMemory`, `CudaUnavailable`, `CudaError`.
        """
        # Before the first region there.
        self.lanes.lane(gpu)
        with self._lock:
            self._collect()
            arena = self._arenas.get(gpu)
            if arena is None:
                arena = self._arenas[gpu] = Arena(partial(self._grow_on, gpu))
            block = arena.allocate(size_bytes)
            self._note((block.region.id, block.offset), block, keep)
            return block

    @property
    def lanes(self) -> Lanes:
        """Those to the stub. Raises `CudaUnavailable` where there are to be none."""
        if self._lanes is None:
            raise CudaUnavailable("this stub is lent no memory of devices")
        return self._lanes()

    def lend(self, array: np.ndarray, *, keep: bool = False) -> tuple[list[int], int] | None:
        """Lend the memory that an array lies in: its block, and the array's offset in that.

        None for memory that the stub cannot, may not or need not see; then it has to be copied.
        """
        lease = lease_of(array)
        if lease is None or not array.flags.c_contiguous:
            return None
        region, place_offset, size_bytes = lease.region, lease.offset, lease.size
        if type(region) is not ClientRegion and not self._may_see(lease, array):
            return None
        with self._lock:
            if not self._announce(region):  # type: ignore[arg-type]
                return None
            self._note((region.id, place_offset), lease, keep)  # type: ignore[union-attr]
        return [region.id, place_offset, size_bytes], offset_in(lease, array)  # type: ignore[union-attr]

    def lend_on_device(
        self, array: DeviceArray, *, keep: bool = False
    ) -> tuple[list[int], int] | None:
        """As `lend`, of an array on a device: what the stub does there comes after what was done to the array."""
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
        with self._lock:
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
            array.nbytes < SHARED_BYTES
            or type(region) is not SharedRegion
            or self.is_private
            or region.is_private
        )

    def lend_target(self, lease: Lease) -> list[int]:
        """Let the stub write an output of this batch to memory of a client; the block that it is."""
        region: SharedRegion = lease.region  # type: ignore[assignment]
        with self._lock:
            self._announce(region)
            self._targets.append(((region.id, lease.offset), lease))
        return [region.id, lease.offset, lease.size]

    def _announce(self, region: SharedRegion | DeviceRegion) -> bool:
        if region.id in self._announced or region.id in self._regions:
            return True
        # Clients may come and go faster than anybody tidies up.
        self._forget_closed()
        if not region.share(lambda each: self._send_region(each, Side.RUNTIME)):
            return False
        self._announced[region.id] = region
        return True

    def has_lent(self, region: Region) -> bool:
        """Whether the stub may look into a region."""
        return region.id in self._announced or region.id in self._regions

    def _note(self, place: Place, loan: Loan, keep: bool) -> None:
        if keep:
            self._kept.setdefault(place, []).append(loan)
        else:
            self._lent.append((place, loan))

    # Looking at what is lent

    def open(self, region_id: int, offset: int, size_bytes: int) -> Lease:
        """A lease on what is lent to the stub at a place that it names. Raises `RemoteProtocolError`."""
        place = (region_id, offset)
        with self._lock:
            loan: Loan | None = self._find_target(place)
            if loan is None:
                loan = self._find(place)
            if loan is not None and size_bytes <= (
                loan.size_bytes if type(loan) is Block else loan.size  # type: ignore[union-attr]
            ):
                if not isinstance(loan.region, SharedRegion):
                    return self._open_on_device(loan, size_bytes)  # type: ignore[arg-type,return-value]
                if type(loan) is Block:
                    loan.holds += 1
                    return loan.region.lease(offset, size_bytes, self._give_back, loan)
                return loan.again(size_bytes, _keep, loan)  # type: ignore[union-attr]
        raise RemoteProtocolError(
            f"a block of {size_bytes} bytes at {offset} in region {region_id}, "
            "which is not the stub's to answer from"
        )

    def _open_on_device(self, loan: Block | DeviceLease, size_bytes: int) -> DeviceLease:
        region: DeviceRegion = loan.region  # type: ignore[assignment]
        lane = self.lanes.met(region.device.ordinal)
        # A lease knows the stub's lane since it was lent.
        if type(loan) is not Block:
            return loan  # type: ignore[return-value]
        loan.holds += 1
        return region.lease(loan.offset, size_bytes, self._give_back, loan, lane)

    def _find_target(self, place: Place) -> Lease | None:
        return next((lease for lent, lease in self._targets if lent == place), None)

    def _find(self, place: Place) -> Loan | None:
        loan = next((loan for lent, loan in self._lent if lent == place), None)
        if loan is None and place in self._kept:
            loan = self._kept[place][-1]
        # What the stub sees of a client's memory is its own copy: there are no answers in it.
        return None if type(getattr(loan, "region", None)) is ClientRegion else loan

    # The ends of loans

    def end_batch(self, held: Sequence[list[int]]) -> None:
        """The batch is over, and with it its loans, but for those that the model keeps.

        Raises `RemoteProtocolError`.
        """
        with self._lock:
            lent, self._lent = self._lent, []
            self._targets.clear()
            if held:
                lent = self._keep_some(lent, held)
            for _, loan in lent:
                if type(loan) is Block:
                    (self._arena_of(loan) if self._arenas else self._arena).release(loan)

    def _arena_of(self, block: Block) -> Arena:
        if isinstance(block.region, SharedRegion):
            return self._arena
        region: DeviceRegion = block.region  # type: ignore[assignment]
        return self._arenas[region.device.ordinal]

    def _keep_some(
        self, lent: list[tuple[Place, Loan]], held: Sequence[list[int]]
    ) -> list[tuple[Place, Loan]]:
        """Note what the model keeps of what was lent to it; returns the rest."""
        # The same memory may have been lent more than once.
        kept = Counter((region, offset) for region, offset in held)
        rest = []
        for place, loan in lent:
            if kept[place]:
                kept[place] -= 1
                self._note(place, loan, keep=True)
            else:
                rest.append((place, loan))
        for place in kept.elements():
            raise RemoteProtocolError(f"the stub keeps block {place}, which it was not given")
        return rest

    def take_back(self, places: Iterable[Sequence[int]]) -> None:
        """The stub gives back what it kept. Raises `RemoteProtocolError` for what it does not have."""
        loans = []
        with self._lock:
            for each in places:
                place = (each[0], each[1])
                kept = self._kept.get(place)
                if not kept:
                    raise RemoteProtocolError(
                        f"the stub releases block {place}, which it does not hold"
                    )
                # Kept until the lock is let go of: it may be the last that refers to a lease.
                loan = kept.pop()
                loans.append(loan)
                if not kept:
                    del self._kept[place]
                if type(loan) is Block:
                    self._arena_of(loan).release(loan)

    def _collect(self) -> None:
        while self._returned:
            block: Block = self._returned.popleft()  # type: ignore[assignment]
            self._arena_of(block).release(block)

    # Memory that nobody needs for now

    def tidy(self) -> None:
        """Give up regions that were not used since the last time."""
        with self._lock:
            self._collect()
            self._idle = {
                region_id: uses
                for arena in (self._arena, *self._arenas.values())
                for region_id, uses in arena.idle().items()
                if not self._gave_up(arena, region_id, uses)
            }
            self._forget_closed()

    def _gave_up(self, arena: Arena, region_id: int, uses: int) -> bool:
        """Whether a region is given up now, as it has been used as often as the last time and no more."""
        region = self._regions[region_id]
        # Memory that others opened in the older way goes when they do.
        is_older = not isinstance(region, SharedRegion) and bool(region.handle)
        if self._idle.get(region_id) != uses or is_older:
            return False
        arena.retire(region_id)
        self._retire(region_id)
        del self._regions[region_id]
        if isinstance(region, SharedRegion):
            self._source.retire(region)
        else:
            if self.is_private:
                self._kept_on[region.device.ordinal] += region.size_bytes
            region.close()
        return True

    def _forget_closed(self) -> None:
        """Let the stub forget regions that whoever made them has given up, and in which nothing is lent."""
        closed = [region.id for region in self._announced.values() if region.is_closed]
        if closed:
            in_use = {place[0] for place in self._kept} | {place[0] for place, _ in self._lent}
            for region_id in closed:
                if region_id not in in_use:
                    del self._announced[region_id]
                    self._retire(region_id)

    @property
    def size_bytes(self) -> int:
        """All memory that was set aside for this stub to read."""
        return self._arena.size_bytes

    @property
    def used_bytes(self) -> int:
        """How much of it is lent, or was handed on and is looked at by others."""
        with self._lock:
            self._collect()
            return self._arena.used_bytes

    @property
    def count(self) -> int:
        """How much is lent at this moment."""
        with self._lock:
            return len(self._lent) + sum(map(len, self._kept.values()))

    @property
    def has_clients_memory(self) -> bool:
        """True if the stub works at this moment in memory of a client, which the client can cut short."""
        with self._lock:
            loans = [loan for _, loan in self._lent]
            loans += [loan for kept in self._kept.values() for loan in kept]
            return bool(self._targets) or any(type(each.region) is ClientRegion for each in loans)

    @property
    def is_kept(self) -> bool:
        """Whether the model keeps anything."""
        return bool(self._kept)

    def close(self) -> None:
        """Let go of all regions and of what was lent; leases that are out stay valid."""
        with self._lock:
            self._lent.clear()
            self._kept.clear()
            self._targets.clear()
            # Who makes them refers to this, too.
            self._lanes = None
            for region in self._regions.values():
                region.close()
            self._source.close()
