"""Keeps the regions that the runtime has sent, and allocates memory for answers. Maps the memory that clients lend,
too.

Theory of operation. Two locks. `_arrived`, a condition, guards the regions of requests: the control thread adds and
removes them, and the main thread waits for one if the message that names it was faster on the other channel. `_turn`
guards the arenas: any thread that has something to send allocates, the main thread retires regions.

Growth. A thread that needs a larger arena sends GROW and waits on `_granted`, with `_turn` held. So there is one
question at a time, and the next item of `_granted` is the answer to it: a region, or the text of a refusal. This wait
has no deadline, because an answer that came after the deadline would be taken for the next one's. The runtime always
answers, and when it ends, the process ends. A signal handler that raises ends the wait, but not the question:
`_growing` has its device until its answer was taken in, and the next allocation does that first.

A signal handler may raise between any two steps here. So what a step takes out of one table goes into another one at
once (`at_once`), and a block that is allocated for somebody is in that one's list then (`taken`).

A collection of garbage may run a destructor of the model's in the middle of an allocation, and that destructor may want
memory. The lock is an RLock, so this does not hang, but the arena is half changed. `allocate` sees that its own thread
has the turn and refuses.

Blocks come back through deques and not under the lock: `returned` is appended to by the control thread and by the
leases of `empty`, whose destructors may run anywhere. The next allocation makes them free. If that came too late, GROW
was refused, and blocks came along with the refusal, one more attempt is made.

Answers mostly want blocks of sizes that others had before. So a block of the first region that came back is not
released but put aside (`spares`), and the next allocation of its size class has it again; `_stub_port.pyx` does
both, compiled. All of them are released before the arena grows. Nobody holds a block that was put aside, and the arena
does not see that it is free.

Lent regions. A model gets inputs of a client through a private mapping: what it writes there stays in this process.
One mapping serves all batches, since finding its pages takes longer than copying what lies in them. So after the answer
to a batch `LentRegion` drops the pages that were written to, if the process has had page faults since it last looked,
and the next batch sees the client's memory again. The client may write as soon as it has its answer. If the model keeps
an input, its pages become the model's own before that. If the client cuts its memory short, an access ends this process
with SIGBUS, which the runtime does not count as a death that the model caused.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from moonpool.ipc.arena import Arena, Block, Keep, block_bytes, is_short
from moonpool.ipc.channel import MAX_PACKET_BYTES
from moonpool.ipc.codec import encode
from moonpool.ipc.conversation import Overflow, check_size
from moonpool.ipc.errors import MoonpoolError, OutOfMemory, RemoteProtocolError
from moonpool.ipc.memory import Lease, Region
from moonpool.ipc.messages import MAX_STORED_BYTES, NO_DEVICE, Kind, Side
from moonpool.ipc.region import SharedRegion, write_into
from moonpool.ipc.signals import at_once
from moonpool.stub import threads

if TYPE_CHECKING:
    from moonpool.ipc.cuda.region import DeviceLease, DeviceRegion
    from moonpool.stub.devices.memory import DeviceMemory

# The runtime sends a region before the message that needs it. The wait covers the switch between threads.
_ARRIVAL_S = 30.0
_INDIRECT = int(Kind.INDIRECT)
# The argument of a `get` that blocks.
_WAITING = (True,)


class Regions(Overflow):
    """Holds the memory shared with the runtime. Any thread may call `allocate`, `hold`, `find` and `empty`."""

    # `threads` says why this lock is not in the dictionary.
    __slots__ = ("_turn",)

    def __init__(self, send_control: Callable[..., None]) -> None:
        self._send_control = send_control
        # For how long memory is kept that is not needed.
        self.keep = Keep(0.0, 0.0)
        self._arrived = threading.Condition()
        self._granted: SimpleQueue[Region | str] = SimpleQueue()
        # Regions with requests, by number. `request_region` waits for one that is not here yet.
        self.requests: dict[int, Region] = {}
        # Places (region, offset) of blocks that came back, appended by any thread.
        self.returned: deque[Any] = deque()
        # One object for all leases: each access to a bound method would make another one.
        self.give_back = self.returned.append
        self.arena = Arena(self._grow)
        # Blocks that were put aside, by their sizes. Needs the turn.
        self.spares: dict[int, list[Block]] = {}
        # The device of the GROW whose answer was not taken in yet, and that answer, once it came: one item each, or
        # none.
        self._growing: deque[int] = deque()
        self._answers: deque[Region | str] = deque()
        # None until memory on a device is first used.
        self.devices: DeviceMemory | None = None
        # Held by the thread that uses the arenas.
        self._turn = threads.RLock()

    def add_first(self, region_id: int, size_bytes: int, fd: int, writer: int) -> None:
        """Add a region that came in the handshake."""
        region = self._adopt(region_id, size_bytes, fd)
        if writer == Side.STUB:
            self.arena.add(region)
        else:
            self.requests[region_id] = region

    def arrive(self, fd: int, region_id: int, size_bytes: int, writer: int, device: int, handle: bytes) -> None:
        """Add a region that came after the handshake; `fd` is -1 if it came without a descriptor. On the control
        thread.
        """
        if device != NO_DEVICE:
            self._arrive_on(device, region_id, size_bytes, writer, handle, fd)
            return
        if fd < 0:
            raise RemoteProtocolError(f"region {region_id} came without its descriptor")
        region = self._adopt(region_id, size_bytes, fd)
        if writer != Side.STUB:
            self._take_in(region)
        else:
            self._granted.put(region)

    def _arrive_on(self, device: int, region_id: int, size_bytes: int, writer: int, handle: bytes, fd: int) -> None:
        from moonpool.stub.devices.memory import adopt

        self.on_devices()  # before the region can be found, so that its finder sees that there are devices
        try:
            region = adopt(region_id, size_bytes, device, fd, handle)
        except MoonpoolError as error:
            if writer != Side.STUB:
                raise
            # The thread that asked can do without the region, so the runtime gets it back.
            self._send_control(Kind.RETIRE, region_id)
            self._granted.put(str(error))
            return
        if writer == Side.STUB:
            self._granted.put(region)
        else:
            self._take_in(region)

    def on_devices(self) -> DeviceMemory:
        """Return the memory on devices, made at the first call. From any thread."""
        if self.devices is None:
            from moonpool.stub.devices.memory import DeviceMemory

            with self._arrived:
                if self.devices is None:
                    self.devices = DeviceMemory(self._grow, self._send_control)
        return self.devices

    def arrive_lent(self, region_id: int, size_bytes: int, fd: int) -> None:
        """Add memory of a client that the runtime lends. On the control thread."""
        self._take_in(LentRegion(region_id, size_bytes, fd))

    def _take_in(self, region: Region) -> None:
        with self._arrived:
            self.requests[region.id] = region
            self._arrived.notify_all()

    def refuse(self, reason: str) -> None:
        """Give the refusal of the runtime to the thread that asked for memory. On the control thread."""
        self._granted.put(reason)

    def forget(self, region_id: int) -> None:
        """Close a region that the runtime does not use any more. On the control thread."""
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
        """Return a region with requests. Waits for it if its message was overtaken; raises `RemoteProtocolError` in the
        end.
        """
        region = self.requests.get(region_id)
        if region is None:
            with self._arrived:
                self._arrived.wait_for(lambda: region_id in self.requests, _ARRIVAL_S)
                if region_id not in self.requests:
                    raise RemoteProtocolError(f"region {region_id} was named but not sent")
                region = self.requests[region_id]
        return region

    def has(self, region: Region) -> bool:
        """Return whether a region is one of these, and was not given up."""
        return self._own(region.id) is region or self.requests.get(region.id) is region

    def _own(self, region_id: int) -> Region | None:
        """Return the region of that number, if this side allocates in it."""
        region = self.arena.region(region_id)
        if region is None and self.devices is not None:
            region = self.devices.region(region_id)
        return region

    def region(self, region_id: int) -> Region:
        """Return the region of a block that the runtime lent: one of its own, or one in which this side allocates."""
        own = self._own(region_id)
        return self.request_region(region_id) if own is None else own

    def _grow(self, size_bytes: int, device: int = NO_DEVICE) -> Region:
        note = partial(self._growing.append, device)
        self._send_control(Kind.GROW, size_bytes, device, notes=(note,))
        answer = self._take_answer(device)
        if isinstance(answer, str):
            raise OutOfMemory(answer)
        return answer

    def _take_answer(self, device: int) -> Region | str:
        """Wait for the answer to GROW, and allocate in the region that came. Needs the turn."""
        if not self._answers:
            # Without a deadline: see the theory of operation. One call into C, so the answer is in one of the two
            # queues.
            self._answers.extend(map(self._granted.get, _WAITING))
        answer = self._answers[0]
        if not isinstance(answer, str):
            self._arena(device).add(answer)
        at_once(self._answers.clear, self._growing.clear)
        return answer

    def _arena(self, device: int) -> Arena:
        return self.arena if device == NO_DEVICE else self.on_devices().arena(device)

    def _collect(self) -> None:
        """Take in the blocks that came back. Needs the turn."""
        returned, arena, devices = self.returned, self.arena, self.devices
        while returned:
            place, forget = returned[0], returned.popleft
            block = arena.find(*place)
            if block is not None:
                if block.holds == 1 and arena.is_first(block.region):
                    aside = self.spares.setdefault(block.size_bytes, [])
                    at_once(forget, partial(aside.append, block), partial(setattr, block, "holds", 0))
                elif block.holds:
                    arena.release(block, forget)
                else:  # it was put aside before
                    forget()
                continue
            block = None if devices is None else devices.find(*place)
            if devices is None or block is None:
                forget()
            else:
                devices.release(block, forget)

    def _release_spares(self) -> None:
        """Make the blocks free that were put aside. Needs the turn."""
        for aside in self.spares.values():
            while aside:
                self.arena.release(aside[-1], aside.pop)
        self.spares.clear()

    def allocate(self, size_bytes: int, device: int = NO_DEVICE, taken: list[Block] | None = None) -> Block:
        """Allocate a block for an answer. Raises `OutOfMemory` with the runtime's reason.

        `taken` gets the block, too: if a signal handler raises, the block is there or was not allocated.
        """
        arena = self._arena(device)
        # A destructor of the model's may run in the middle of an allocation of the same thread.
        if self._turn._is_owned():  # type: ignore[attr-defined]
            raise OutOfMemory("a destructor asked for memory while memory was being allocated")
        into = [] if taken is None else taken
        with self._turn:
            if self._growing:  # a signal handler ended the wait of the thread that asked
                self._take_answer(self._growing[0])
            if self.returned:
                self._collect()
            size = size_bytes
            if device == NO_DEVICE:
                size = block_bytes(size_bytes)
                aside = self.spares.get(size)
                if aside:
                    block = aside[-1]
                    hold = partial(setattr, block, "holds", 1)
                    at_once(aside.pop, hold, partial(into.append, block))
                    return block
                if not arena.has_room(size):
                    self._release_spares()
                    # The rest of its class may be too much.
                    size = size if arena.has_room(size) else size_bytes
            try:
                return arena.allocate(size, into)
            except OutOfMemory:
                # Blocks that clients dropped meanwhile may have come along with the refusal. And what is kept for later
                # may make room: the runtime reads RETIRE before GROW.
                came_back = bool(self.returned)
                self._collect()
                self._release_spares()
                if not self._retire_idle(arena) and not came_back:
                    raise
                return arena.allocate(size, into)

    def take_back(self, blocks: Iterable[Block]) -> None:
        """Count one holder less for blocks that were allocated or held for a message that is not sent."""
        self.returned.extend([(block.region.id, block.offset) for block in blocks])

    def find(self, lease: Lease | DeviceLease) -> Block | None:
        """Return the block of a lease that `empty` made; None for other leases."""
        if lease.give_back is not self.give_back:
            return None
        place: tuple[int, int] = lease.token  # type: ignore[assignment]
        return self.block(*place)

    def block(self, region_id: int, offset: int) -> Block | None:
        """Return the block in use that begins at this place, if one does."""
        block = self.arena.find(region_id, offset)
        if block is None and self.devices is not None:
            block = self.devices.find(region_id, offset)
        return block

    def hold(self, blocks: Sequence[Block], held: list[Block] | None = None) -> None:
        """Count the runtime as a further holder of these blocks, until it gives them back. `held` gets each that was
        counted.
        """
        if blocks:
            into = [] if held is None else held
            with self._turn:
                for block in blocks:
                    at_once(partial(setattr, block, "holds", block.holds + 1), partial(into.append, block))

    def empty(self, size_bytes: int) -> Lease:
        """Allocate a block as a lease for the model."""
        block = self.allocate(size_bytes)
        place = (block.region.id, block.offset)
        return block.region.lease(block.offset, size_bytes, self.give_back, place)

    def empty_on(self, device: int, size_bytes: int) -> DeviceLease:
        """Allocate a block on a device as a lease for the model. Raises `OutOfMemory`, `CudaUnavailable`,
        `CudaError`.
        """
        devices = self.on_devices()
        lane = devices.lane(device)
        block = self.allocate(size_bytes, device)
        # The device may still have work of the runtime's on this block in its queue.
        devices.receive(device)
        place = (block.region.id, block.offset)
        region = cast("DeviceRegion", block.region)
        lease = region.lease(block.offset, size_bytes, self.give_back, place, lane)
        devices.remember(lease)
        return lease

    def pack(self, taken: list[Block], *message: Any) -> bytes:
        """Return the packet of a message; if the message is too large, store it and return the packet of INDIRECT.

        `taken` gets its block, which goes back by `take_back` if the packet is not sent. Raises `LocalProtocolError`
        for values that msgpack cannot carry, `OutOfMemory`.
        """
        packet = encode(*message)
        return packet if len(packet) <= MAX_PACKET_BYTES else self.indirect(packet, taken=taken)

    def indirect(self, packet: bytes, most_bytes: int = MAX_STORED_BYTES, taken: list[Block] | None = None) -> bytes:
        """Store a message in memory, within the size that the runtime reads. `taken` gets its block."""
        check_size(packet, most_bytes)
        return encode(_INDIRECT, *self.store(packet, taken))

    def store(self, packet: bytes, taken: list[Block] | None = None) -> tuple[int, int, int]:
        """Put a message that is too large for a packet into a block, which the runtime releases after it has copied
        it.
        """
        block = self.allocate(len(packet), taken=taken)
        block.region.memory()[block.offset : block.offset + len(packet)] = packet
        return block.region.id, block.offset, len(packet)

    def load(self, region: int, offset: int, size_bytes: int) -> bytes:
        return bytes(self.request_region(region).memory()[offset : offset + size_bytes])

    def retire_idle(self, idle_s: float) -> None:
        """Give back the regions in which no answer lies, if they are not kept for later. For the main thread of an idle
        stub.
        """
        with self._turn:
            self._collect()
            for arena in self._arenas():
                is_kept = idle_s < self.keep.first_s and not is_short(arena.size_bytes)
                self._retire_idle(arena, arena.first_grown if is_kept else 0)

    def _retire_idle(self, arena: Arena, kept: int = 0) -> bool:
        """Give back idle regions, but not the one of the number `kept`. Returns False if there are none. Needs the
        turn.
        """
        idle = [region_id for region_id in arena.idle() if region_id != kept]
        for region_id in idle:
            region = arena.region(region_id)
            self._send_control(Kind.RETIRE, region_id, notes=(arena.retirement(region_id),))
            if region is not None:
                region.close()
        return bool(idle)

    def publish(self) -> None:
        """Order the work on devices. To be called right before a message that names blocks or gives them back."""
        if self.devices is not None:
            self.devices.publish()

    @property
    def has_grown(self) -> bool:
        """Return whether there is a region that could be given back one day."""
        return any(arena.has_grown for arena in self._arenas())

    def _arenas(self) -> list[Arena]:
        return [self.arena] if self.devices is None else [self.arena, *self.devices.arenas()]


_PAGE = mmap.PAGESIZE
_PAGEMAP = "/proc/self/pagemap"
# With MAP_NORESERVE the kernel sets no memory aside for private copies of all pages.
_PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
# MADV_POPULATE_WRITE, from Linux 5.14 on.
_POPULATE_WRITE = 23
# Bits in the last of the 8 bytes of an entry of /proc/PID/pagemap: the page is in memory, it is swapped out, it
# belongs to a file.
_PRESENT, _SWAPPED, _OF_FILE = 0x80, 0x40, 0x20
# The drivers of GPUs. Where a GPU can write to any memory of a process, its driver has the faults, and not the process.
_GPUS = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/kfd")
_NOT_OWN = bytes(each for each in range(256) if each & _OF_FILE or not each & (_PRESENT | _SWAPPED))


class CutShort(RemoteProtocolError):
    """Says that a client's memory is shorter than when it was registered. Nothing of it is mapped yet."""


def _fault_count() -> int:
    """Return how many page faults the threads of this process have had; 0 if the system does not count them."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


class LentRegion(Region):
    """Maps one shared memory object of a client. For the main thread of the stub, but for `close`."""

    __slots__ = ("_address", "_fault_count", "_fd", "_has_all_faults", "_inputs", "_pagemap_fd", "outputs")

    def __init__(self, region_id: int, size_bytes: int, fd: int) -> None:
        """Take over `fd`, until `close`."""
        self.id = region_id
        self.size_bytes = size_bytes
        self._fd = fd
        self.buffer = None
        self._inputs: mmap.mmap | None = None
        self._address = 0
        # Of the process, when no page of `_inputs` was its own.
        self._fault_count = -1
        self._has_all_faults = not any(map(os.path.exists, _GPUS))
        # The client's memory, in which outputs go; None before the first one.
        self.outputs: mmap.mmap | None = None
        self._pagemap_fd = -1
        with contextlib.suppress(OSError):  # without it, all pages are dropped after each batch
            self._pagemap_fd = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)

    def _map(self, flags: int) -> mmap.mmap:
        try:
            return mmap.mmap(self._fd, self.size_bytes, flags)
        except (OSError, ValueError) as error:
            is_cut = os.fstat(self._fd).st_size < self.size_bytes
            raise (CutShort if is_cut else RemoteProtocolError)(
                f"{self.size_bytes} bytes of a client's shared memory cannot be mapped: {error}"
            ) from error

    def lease(self, offset: int, size_bytes: int, give_back: Callable[[object], object], token: object) -> Lease:
        """Return an input. Raises `RemoteProtocolError`, which is `CutShort` if the object is shorter than it was."""
        if self.buffer is None:
            self.buffer = self._inputs = inputs = self._map(_PRIVATE)
            self._address = np.frombuffer(inputs, np.uint8).__array_interface__["data"][0]
        lease = super().lease(offset, size_bytes, give_back, token)
        # No message may name a block of this mapping, which is private to the process.
        lease.region = None
        return lease

    def write(self, offset: int, array: np.ndarray) -> None:
        """Write an output into the client's memory. Raises the same errors as `lease`."""
        write_into(self.outputs or self.open_outputs(), offset, array)

    def open_outputs(self) -> mmap.mmap:
        """Map the memory for outputs. Raises the same errors as `lease`."""
        self.outputs = outputs = self._map(mmap.MAP_SHARED)
        return outputs

    def renew(self, blocks: list[tuple[int, int]]) -> None:
        """Drop the model's changes to these blocks (offset, size) after their batch. The model kept none of them."""
        # A page becomes the process's own by a fault. To look at the pages of a megabyte takes six times as long as to
        # ask for the count.
        count = _fault_count() if self._has_all_faults else 0
        if count and count == self._fault_count:
            return
        # The control thread may close the region meanwhile.
        inputs = self._inputs
        for offset, size_bytes in blocks:
            begin = offset // _PAGE * _PAGE
            end = offset + size_bytes
            if inputs is not None and self._is_changed(begin, end):
                inputs.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        # The count from before: another thread of the model may have written since.
        self._fault_count = count

    def give_up(self, blocks: list[tuple[int, int]]) -> None:
        """Leave these blocks (offset, size) to the model, which has kept some of them: give it copies of their
        pages.
        """
        inputs, self.buffer, self._inputs = self._inputs, None, None
        self._fault_count = -1
        if inputs is None:
            return
        for offset, size_bytes in blocks:
            begin = offset // _PAGE * _PAGE
            try:
                inputs.madvise(_POPULATE_WRITE, begin, offset + size_bytes - begin)
            except OSError:
                pages = np.frombuffer(inputs, np.uint8)[begin : offset + size_bytes : _PAGE]
                np.bitwise_or(pages, 0, out=pages)

    def _is_changed(self, begin: int, end: int) -> bool:
        """Return whether the process may have written to pages there. True if that cannot be found out."""
        pages = (end - begin + _PAGE - 1) // _PAGE
        try:
            entries = os.pread(self._pagemap_fd, 8 * pages, (self._address + begin) // _PAGE * 8)
        except OSError:
            return True
        return len(entries) != 8 * pages or bool(entries[7::8].translate(None, _NOT_OWN))

    def close(self) -> None:
        self.buffer = self._inputs = self.outputs = None
        for fd in (self._fd, self._pagemap_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._pagemap_fd = -1
