"""Memory on devices that the runtime and a stub both handle, and the order of their work there.

Nothing else imports this module before device memory is handled, since it loads the driver's bindings.

Theory of operation. Work on a device is queued, so a block may be handed over while work on it is still to be done. A
`DeviceLane` is a stream and an event for each side on one device. Once there is a lane, every message that could name
blocks there, or give some back, is a fence: `publish` before it is sent, `receive` after it was read. That takes some
microseconds, and no thread waits for a device.

`Lanes` has a condition, `_changed`. It guards the making of a lane, so that each event is sent once, and wakes
threads that wait for the event of the stub. The dictionaries are read without it: entries are only added.

The stub sends EVENT on the control channel, before the message that needs it, which may come on another channel. So
`receive` may find that EVENT has not been read. On any other thread it waits for the reactor, with a deadline. The
reactor's thread must not wait for itself: it reads further control messages until EVENT is among them (`_look`). These
messages may call `receive` again, on the same thread, which `_looking` then lets pass: what comes there was sent after
the event, or needs none.

With a contained stub no events are shared. To open one, the driver reads what the stub wrote, and work that waits for
an event of a hostile stub may wait for ever. So each side waits for its own work instead.

`DeviceCallerMemory` works as `CallerMemory` (`regions.py`): one lock, and blocks that come back through a queue.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from moonpool.ipc.arena import Arena, Block, growth_bytes
from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.lane import DeviceLane
from moonpool.ipc.cuda.region import DeviceLease, DeviceRegion
from moonpool.ipc.errors import Closed, CudaError, CudaUnavailable, OutOfMemory, RemoteProtocolError
from moonpool.runtime.stubs.allotment import next_number

# Seconds until EVENT must have come. The stub makes its context on the device first.
_ARRIVAL_S = 30.0
# No socket holds more packets.
_MOST_WAITING = 300


class Lanes:
    """The lanes to one stub, by devices. Any thread may call any method."""

    def __init__(
        self, send_event: Callable[[int, bytes], None], read_event: Callable[[], bool], gpus: Sequence[int] | None
    ) -> None:
        """`send_event` sends EVENT with the number of a device and a handle.

        `read_event` reads the next control message if there is one, and returns False if another thread does that.
        `gpus` are those that a contained stub sees, in its order, and None for a stub that is not contained and sees
        all.
        """
        self._send_event = send_event
        self._read_event = read_event
        # The thread that reads control messages to find an event, 0 for none.
        self._looking = 0
        self._gpus = gpus
        self._lanes: dict[int, DeviceLane] = {}
        # The devices whose event the stub has sent.
        self._met: set[int] = set()
        self._changed = threading.Condition()
        self._is_closed = False

    def number_of(self, gpu: int) -> int | None:
        """Return the stub's number for a device, None if it does not see the device."""
        if self._gpus is None:
            return gpu
        return self._gpus.index(gpu) if gpu in self._gpus else None

    def gpu_of(self, number: int) -> int:
        """Return the device that has this number for the stub. Raises `RemoteProtocolError` for one that it does not
        see.
        """
        if self._gpus is None:
            return number
        if number >= len(self._gpus):
            raise RemoteProtocolError(f"device {number} is not one of the stub's")
        return self._gpus[number]

    def nearest(self, gpu: int) -> int:
        """Return the device, or another one if the stub does not see it."""
        return gpu if self._gpus is None or gpu in self._gpus else self._gpus[0]

    def lane(self, gpu: int) -> DeviceLane:
        """Return the lane on a device that the stub sees. The first call makes it and sends EVENT.

        Raises `CudaUnavailable`, `CudaError`.
        """
        lane = self._lanes.get(gpu)
        if lane is None:
            number = self.number_of(gpu)
            if number is None:
                raise ValueError(f"the stub does not see device {gpu}")
            with self._changed:
                lane = self._lanes.get(gpu)
                if lane is None:
                    where = device(gpu)
                    if self._gpus is not None and not where.has_descriptors:
                        raise CudaUnavailable(
                            f"device {gpu} ({where.name}) does not share memory by descriptor "
                            f"({where.why_no_descriptors}), and a contained model needs that; use tensors in ordinary "
                            "memory, or MOONPOOL_SANDBOX: standard"
                        )
                    lane = DeviceLane(where, shares_events=self._gpus is None)
                    self._send_event(number, lane.handle)
                    self._lanes[gpu] = lane
        return lane

    def meet(self, number: int, handle: bytes) -> None:
        """Take in EVENT of the stub. Raises `RemoteProtocolError` if it must not send one."""
        gpu = self.gpu_of(number)
        with self._changed:
            lane = self._lanes.get(gpu)
            if lane is None or gpu in self._met:
                raise RemoteProtocolError(f"EVENT of device {number} came unasked")
            if handle and self._gpus is not None:
                raise RemoteProtocolError("a contained stub shares no events")
            try:
                lane.meet(handle)
            except (CudaError, OutOfMemory):
                lane.meet(b"")
                self._send_event(number, b"")
            self._met.add(gpu)
            self._changed.notify_all()

    def publish(self) -> None:
        """Let the stub's work wait for ours. To be called before a message to the stub. Raises `CudaError`."""
        if self._is_closed:
            return
        for lane in self._lanes.copy().values():
            lane.publish()

    def receive(self) -> None:
        """Let our work wait for the stub's. To be called after a message of the stub was read.

        Waits until the events of the stub have come; see the head of this file. Raises `CudaError`,
        `RemoteProtocolError`, `PeerGone`.
        """
        if self._is_closed:
            return
        for gpu, lane in self._lanes.copy().items():
            if gpu not in self._met:
                self._await(gpu)
            if gpu in self._met:
                lane.receive()

    def met(self, gpu: int) -> DeviceLane:
        """Return the lane for a block that the stub names. Raises `RemoteProtocolError` if it has not sent its
        event.
        """
        if gpu not in self._met and not self._is_closed:
            raise RemoteProtocolError(f"a block on device {self.number_of(gpu)} ahead of its EVENT")
        return self.lane(gpu)

    def _await(self, gpu: int) -> None:
        if self._looking == threading.get_ident() or self._look(gpu):
            return
        deadline = time.monotonic() + _ARRIVAL_S
        with self._changed:
            while gpu not in self._met and not self._is_closed:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise RemoteProtocolError("the stub did not send its EVENT")
                self._changed.wait(left_s)

    def _look(self, gpu: int) -> bool:
        """Read control messages until the event has come. Returns False if another thread reads them."""
        if not self._read_event():
            return False
        self._looking = threading.get_ident()
        try:
            for _ in range(_MOST_WAITING):
                if gpu in self._met:
                    break
                self._read_event()
        finally:
            self._looking = 0
        return True

    def tidy(self) -> None:
        """Drop memory that the devices have done with."""
        for lane in self._lanes.copy().values():
            lane.release()
            lane.device.tidy()

    def close(self) -> None:
        """Close the lanes after the stub has ended. Arrays that it made stay valid."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for lane in self._lanes.values():
                lane.close()
            # Ends a cycle: the functions refer to the connection, which refers to this object.
            self._send_event, self._read_event = _send_nothing, _read_nothing


def _send_nothing(_number: int, _handle: bytes) -> None:
    """Do nothing, because the stub is gone."""


def _read_nothing() -> bool:
    return False


def new_device_region(
    present_bytes: int, needed_bytes: int, limit_bytes: int | None, gpu: int, others_bytes: int = 0
) -> DeviceRegion:
    """Make a region on a device. The sizes are those of `growth_bytes`, rounded to the granularity of the device.

    Raises `OutOfMemory`, `CudaUnavailable`, `CudaError`.
    """
    where = device(gpu)
    size_bytes = growth_bytes(present_bytes, where.rounded(needed_bytes), limit_bytes, others_bytes)
    size_bytes -= size_bytes % where.granularity_bytes
    return DeviceRegion.create(next_number(), size_bytes, where)


class DeviceCallerMemory:
    """The memory on one device in which `Runtime.empty` makes arrays. Stubs that see the device may use it.
    Thread-safe.
    """

    def __init__(self, limit_bytes: int | None, gpu: int) -> None:
        """Use at most `limit_bytes` on the device. Raises `CudaUnavailable`, `CudaError`."""
        self._limit_bytes = limit_bytes
        self._gpu = gpu
        self._lock = threading.Lock()
        self._regions: list[DeviceRegion] = []
        self._arena = Arena(self._create)
        # Has no peer. It orders the work of those who have the same block one after the other.
        self._lane = DeviceLane(device(gpu), shares_events=False)
        # Blocks whose arrays are gone, appended by the thread that dropped the last of them.
        self._returned: deque[object] = deque()
        self._give_back: Callable[[object], object] = self._returned.append
        self._is_closed = False

    def _create(self, needed_bytes: int) -> DeviceRegion:
        region = new_device_region(self._arena.size_bytes, needed_bytes, self._limit_bytes, self._gpu)
        self._regions.append(region)
        return region

    def empty(self, shape: tuple[int, ...], datatype: int, size_bytes: int) -> DeviceArray:
        """Return an array with any content. `datatype` is a code of `ipc.tensors`.

        Raises `OutOfMemory`, `CudaError`, `Closed`.
        """
        with self._lock:
            if self._is_closed:
                raise Closed("the model was unloaded")
            while self._returned:
                returned: Block = self._returned.popleft()  # type: ignore[assignment]
                self._arena.release(returned)
            block = self._arena.allocate(size_bytes)
        region: DeviceRegion = block.region  # type: ignore[assignment]
        lease = region.lease(block.offset, block.size_bytes, self._give_back, block, self._lane)
        return DeviceArray.over(lease, 0, datatype, shape)

    def lease_over(self, array: DeviceArray) -> DeviceArray | None:
        """Return an array that a library made of one of `empty`, with a lease on the same block. None for any other
        array.
        """
        with self._lock:
            for block in self._arena.blocks():
                region: DeviceRegion = block.region  # type: ignore[assignment]
                start = region.address + block.offset
                if start <= array.address and array.address + array.nbytes <= start + block.size_bytes:
                    block.holds += 1
                    break
            else:
                return None
        lease = region.lease(block.offset, block.size_bytes, self._give_back, block, self._lane)
        if array.stream:
            lease.use(array.stream)
        return DeviceArray.over(lease, array.address - start, array.datatype, array.shape)

    def gave(self, lease: DeviceLease) -> bool:
        """Return True if a lease is on an array of `empty`."""
        return lease.give_back is self._give_back

    @property
    def size_bytes(self) -> int:
        """The size of all regions together."""
        return self._arena.size_bytes

    def close(self) -> None:
        """Close the regions. Arrays that callers hold stay valid."""
        with self._lock:
            self._is_closed = True
            for region in self._regions:
                region.close()
            self._lane.close()
