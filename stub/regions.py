"""The regions that the runtime has sent, and the memory for answers.

The control thread adds regions; whichever thread of the model has something to send allocates for it.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, cast

from moonpool.ipc.arena import Arena
from moonpool.ipc.conversation import Overflow
from moonpool.ipc.errors import MoonpoolError, OutOfMemory, RemoteProtocolError
from moonpool.ipc.messages import MAX_STORED_BYTES, NO_DEVICE, Kind, Side
from moonpool.ipc.region import SharedRegion
from moonpool.stub.lent_region import LentRegion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonpool.ipc.arena import Block
    from moonpool.ipc.cuda.region import DeviceLease, DeviceRegion
    from moonpool.ipc.memory import Lease, Region
    from moonpool.stub.device_memory import DeviceMemory

# The runtime sends a region before the message that needs it; the wait covers threads' switching.
_ARRIVAL_S = 30.0


class Regions(Overflow):
    """What the stub knows of shared memory. `allocate`, `hold`, `find` and `empty` are for any thread."""

    def __init__(self, send_control: Callable[..., None]) -> None:
        self._send_control = send_control
        self._arrived = threading.Condition()
        self._granted: queue.SimpleQueue[Region | str] = queue.SimpleQueue()
        # Those that hold requests, by their numbers. Of one that is not here yet, `request_region` knows.
        self.requests: dict[int, Region] = {}
        # Blocks of answers that came back: (region, offset), appended by any thread.
        self.returned: deque[object] = deque()
        # Kept, because each look at a bound method makes another object of it.
        self.give_back = self.returned.append
        self.arena = Arena(self._grow)
        # None until device memory is handled.
        self.devices: DeviceMemory | None = None
        # Of whoever uses the arenas.
        self._turn = threading.RLock()
        self._is_deserted = False

    def add_first(self, region_id: int, size_bytes: int, fd: int, writer: int) -> None:
        """One of the regions of the handshake."""
        region = self._adopt(region_id, size_bytes, fd)
        if writer == Side.STUB:
            self.arena.add(region)
        else:
            self.requests[region_id] = region

    def arrive(
        self, fd: int, region_id: int, size_bytes: int, writer: int, device: int, handle: bytes
    ) -> None:
        """A region that was sent later; `fd` is -1 where it came without. Called by the control thread."""
        if device != NO_DEVICE:
            self._arrive_on(device, region_id, size_bytes, writer, handle, fd)
            return
        if fd < 0:
            raise RemoteProtocolError(f"region {region_id} came without its descriptor")
        region = self._adopt(region_id, size_bytes, fd)
        if writer != Side.STUB:
            self._take_in(region)
        elif self.arena.regions():
            self._granted.put(region)
        else:
            self.arena.add(region)

    def _arrive_on(
        self, device: int, region_id: int, size_bytes: int, writer: int, handle: bytes, fd: int
    ) -> None:
        from moonpool.stub.device_memory import adopt

        self.on_devices()  # whoever finds the region finds that there are devices
        try:
            region = adopt(region_id, size_bytes, device, fd, handle)
        except MoonpoolError as error:
            if writer != Side.STUB:
                raise
            # Whoever asked for it can do without; the runtime is to have it back.
            self._send_control(Kind.RETIRE, region_id)
            self._granted.put(str(error))
            return
        if writer == Side.STUB:
            self._granted.put(region)
        else:
            self._take_in(region)

    def on_devices(self) -> DeviceMemory:
        """Memory on devices; made when it is first handled. From any thread."""
        if self.devices is None:
            from moonpool.stub.device_memory import DeviceMemory

            with self._arrived:
                if self.devices is None:
                    self.devices = DeviceMemory(self._grow, self._send_control)
        return self.devices

    def arrive_lent(self, region_id: int, size_bytes: int, fd: int) -> None:
        """Memory of a client that the runtime lends. Called by the control thread."""
        self._take_in(LentRegion(region_id, size_bytes, fd))

    def _take_in(self, region: Region) -> None:
        with self._arrived:
            self.requests[region.id] = region
            self._arrived.notify_all()

    def refuse(self, reason: str) -> None:
        """The runtime gives no more memory. Called by the control thread."""
        self._granted.put(reason)

    def forget(self, region_id: int) -> None:
        """The runtime does not use a region any more. Called by the control thread."""
        with self._arrived:
            region = self.requests.pop(region_id, None)
        if region is not None:
            region.close()

    @staticmethod
    def _adopt(region_id: int, size_bytes: int, fd: int) -> SharedRegion:
        region = SharedRegion.adopt(region_id, size_bytes, fd)
        region.forget_fd()
        return region

    def request_region(self, region_id: int) -> Region:
        """A region that holds requests; waits for it where the message overtook it."""
        region = self.requests.get(region_id)
        if region is None:
            with self._arrived:
                self._arrived.wait_for(
                    lambda: region_id in self.requests or self._is_deserted, _ARRIVAL_S
                )
                if region_id not in self.requests:
                    raise RemoteProtocolError(f"region {region_id} was named but not sent")
                region = self.requests[region_id]
        return region

    def has(self, region: Region) -> bool:
        """Whether this is one of these regions, and not one of another peer's under the same number."""
        return self._own(region.id) is region or self.requests.get(region.id) is region

    def _own(self, region_id: int) -> Region | None:
        """The region of that number, if we allocate in it."""
        region = self.arena.region(region_id)
        if region is None and self.devices is not None:
            region = self.devices.region(region_id)
        return region

    def region(self, region_id: int) -> Region:
        """A region that something lies in which the runtime lent: another's, or one for our own answers."""
        own = self._own(region_id)
        return self.request_region(region_id) if own is None else own

    def _grow(self, size_bytes: int, device: int = NO_DEVICE) -> Region:
        self._send_control(Kind.GROW, size_bytes, device)
        # The runtime answers, or ends, and what asked with it: an answer that came too late would be the next one's.
        answer = self._granted.get()
        if isinstance(answer, str):
            if self._is_deserted:
                self._granted.put(answer)  # whoever asks next is not to wait either
            raise OutOfMemory(answer)
        return answer

    def _collect(self) -> None:
        """Make free what came back."""
        returned, arena, devices = self.returned, self.arena, self.devices
        while returned:
            place: tuple[int, int] = returned.popleft()  # type: ignore[assignment]
            if not arena.release_at(*place) and devices is not None:
                block = devices.find(*place)
                if block is not None:
                    devices.release(block)

    def allocate(self, size_bytes: int, device: int = NO_DEVICE) -> Block:
        """A block for an answer. Raises `OutOfMemory` with the runtime's reason."""
        arena = self.arena if device == NO_DEVICE else self.on_devices().arena(device)
        # A collection of garbage may run anything of the model's in the middle of an allocation.
        if self._turn._is_owned():  # type: ignore[attr-defined]
            raise OutOfMemory("a destructor asked for memory while memory was being allocated")
        with self._turn:
            if self.returned:
                self._collect()
            try:
                return arena.allocate(size_bytes)
            except OutOfMemory:
                # What clients dropped meanwhile came along with the refusal.
                if not self.returned:
                    raise
                self._collect()
                return arena.allocate(size_bytes)

    def find(self, lease: Lease | DeviceLease) -> Block | None:
        """The block that `empty` gave as this lease; None for any other lease."""
        if lease.give_back is not self.give_back:
            return None
        place: tuple[int, int] = lease.token  # type: ignore[assignment]
        return self.block(*place)

    def block(self, region_id: int, offset: int) -> Block | None:
        """The block of ours in use that begins there, if one does."""
        block = self.arena.find(region_id, offset)
        if block is None and self.devices is not None:
            block = self.devices.find(region_id, offset)
        return block

    def hold(self, blocks: Sequence[Block]) -> None:
        """The runtime holds these blocks, too, until it gives them back."""
        if blocks:
            with self._turn:
                for block in blocks:
                    block.holds += 1

    def empty(self, size_bytes: int) -> Lease:
        """A block as a lease of the model's."""
        block = self.allocate(size_bytes)
        place = (block.region.id, block.offset)
        return block.region.lease(block.offset, size_bytes, self.give_back, place)

    def empty_on(self, device: int, size_bytes: int) -> DeviceLease:
        """As `empty`, on a device. Raises `OutOfMemory`, `CudaUnavailable`, `CudaError`."""
        devices = self.on_devices()
        lane = devices.lane(device)
        block = self.allocate(size_bytes, device)
        # The runtime may have done the last thing to it, and the device may not have come to that yet.
        devices.receive(device)
        place = (block.region.id, block.offset)
        region = cast("DeviceRegion", block.region)
        lease = region.lease(block.offset, size_bytes, self.give_back, place, lane)
        devices.remember(lease)
        return lease

    def indirect(self, packet: bytes, most_bytes: int = MAX_STORED_BYTES) -> bytes:
        """As in `Overflow`, within the bound of a message that the runtime reads."""
        return super().indirect(packet, most_bytes)

    def store(self, packet: bytes) -> tuple[int, int, int]:
        """A message too large for a packet; the runtime releases the block when it has copied it."""
        block = self.allocate(len(packet))
        block.region.memory()[block.offset : block.offset + len(packet)] = packet
        return block.region.id, block.offset, len(packet)

    def load(self, region: int, offset: int, size_bytes: int) -> bytes:
        return bytes(self.request_region(region).memory()[offset : offset + size_bytes])

    def retire_idle(self) -> None:
        """Give back the regions that no answer lies in. For an idle stub's main thread."""
        with self._turn:
            self._collect()
            for arena in self._arenas():
                for region_id in arena.idle():
                    arena.retire(region_id).close()
                    self._send_control(Kind.RETIRE, region_id)

    def publish(self) -> None:
        """To be called right before a message that names blocks, or gives them back."""
        if self.devices is not None:
            self.devices.publish()

    @property
    def has_grown(self) -> bool:
        """Whether there is a region that could be given back one day."""
        return any(arena.has_grown for arena in self._arenas())

    def _arenas(self) -> list[Arena]:
        return [self.arena] if self.devices is None else [self.arena, *self.devices.arenas()]

    def desert(self) -> None:
        """The peer is gone: nobody is to wait for it. From any thread."""
        with self._arrived:
            self._is_deserted = True
            self._arrived.notify_all()
        if self.devices is not None:
            self.devices.desert()
        self._granted.put("the process that asked for the response has ended")

    def close(self) -> None:
        """Let go of all regions of a peer that is gone; what the model still looks at stays valid."""
        with self._turn:
            for region in self.arena.regions():
                region.close()
        if self.devices is not None:
            self.devices.close()
        with self._arrived:
            for region in self.requests.values():
                region.close()
