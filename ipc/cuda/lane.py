"""Orders the work on device memory of this process and one peer.

Theory of operation. A *device lane* is a stream of our own for one peer on one device, with an event for which the
peer can wait. All blocks that cross between the two processes are ordered through the stream:

- Before a message names blocks on the device, or releases them, `publish` makes the lane wait for the streams that
  touch them, and records the event.
- After a message that names or releases such blocks, `receive` makes the lane wait for the peer's event.
- Before code touches a block on its own stream, that stream waits for the lane (`DeviceLease.use`, `enter`). When the
  code is done with the block, or with the next `publish` that names the stream, the lane waits for that stream.

None of this blocks a thread: the device waits. Each direction needs only one event, although it is recorded again and
again. A later record covers all work before it, so a peer that waits for the event after a second record waits for more
than it has to, and never for less. There is one lane for each peer, because work that waits for a slow or dead peer
must not delay other work. A lane without a peer orders the work of callers on memory of their own.

If the two processes cannot share events (each may detect that when it opens the other's), both wait for their own
work before they send: `publish` returns when the work is done.

A peer may die before the device has come to its event, and then the event may never come. `close` notes that in
`_missed`, and the lane is *lost*: no other stream may wait for it (`enter` raises, `order` leaves it out), and a thread
that waits for its work does so by looking again and again (`reach`), so that it can give up.

The collector finalizes a cycle in any order, so a lane may be gone before the leases that name its stream, and the
driver takes the handle of a destroyed stream for whatever occupies that memory now. So the stream is kept, and another
lane gets it once its work is done. Only the stream of a lost lane is destroyed; from then on (`is_over`) nothing names
it, and memory that it may touch stays.

No method takes a lock. Lanes are found in a dictionary by weak reference, and the deque of kept objects is used by
`append` and `popleft`, which are atomic. If two threads release at the same time, one of them finds it empty.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from moonpool.ipc.cuda import driver as api
from moonpool.ipc.cuda.device import Device
from moonpool.ipc.errors import CudaError, OutOfMemory

if TYPE_CHECKING:
    from numpy.typing import NDArray


# The seconds that work of a process may take after the process has ended.
_GRACE_S = 1.0
_lanes: WeakValueDictionary[int, DeviceLane] = WeakValueDictionary()


def lane_of(stream: int) -> DeviceLane | None:
    """Return the lane of a stream, or None if the stream is no lane's."""
    return _lanes.get(stream)


def order(device: Device, first: int, then: int) -> None:
    """Order two streams as `Device.order` does. `first` is a stream of that device, or of a lane on any device."""
    lane = _lanes.get(first)
    if lane is not None and lane.is_lost:
        return  # the work of its peer ended with the peer
    (device if lane is None else lane.device).order(first, then)


class DeviceLane:
    """A stream and an event for one peer on one device. Thread-safe. Raises `CudaError` if the driver refuses.

    The stream lives as long as the lane is referred to, even after `close`.
    """

    def __init__(self, device: Device, *, shares_events: bool = True) -> None:
        self.device = device
        self.stream = device.rested_stream()
        _lanes[self.stream] = self
        # Objects that must live until work on the lane is done, each with the events of that work.
        self._kept: deque[tuple[list[int], object]] = deque()
        self._own = self._peers = 0
        # The event of a peer that died before the device came to the event, which may never happen.
        self._missed = 0
        # True after the stream was destroyed.
        self.is_over = False
        # The handle for EVENT; empty if events cannot be shared.
        self.handle = b""
        if shares_events:
            self._make_event()

    def _make_event(self) -> None:
        event, handle, device = c_void_p(), api.IpcHandle(), self.device
        try:
            with device:
                device.driver.cuEventCreate(byref(event), api.DISABLE_TIMING | api.INTERPROCESS)
                self._own = event.value or 0
                device.driver.cuIpcGetEventHandle(byref(handle), event)
        except (CudaError, OutOfMemory):  # not on this device, not in this container, or no more
            self._drop_own()
        else:
            self.handle = bytes(handle)

    def meet(self, handle: bytes) -> None:
        """Accept the peer's EVENT. Raises `CudaError` if it cannot be opened; then call `meet(b"")`, and send the peer
        an empty handle.

        After an empty handle, `publish` waits itself, and `receive` does nothing. `handle` is then empty, too.
        """
        if not handle:
            self._drop_own()
            return
        event, device = c_void_p(), self.device
        if len(handle) != api.HANDLE_BYTES:
            raise CudaError(f"the handle of an event has {len(handle)} bytes", "", 0)
        with device:
            opened = api.IpcHandle.from_buffer_copy(handle)
            device.driver.cuIpcOpenEventHandle(byref(event), opened)
        self._peers = event.value or 0

    def publish(self, streams: Iterable[int] = ()) -> None:
        """Order all work until now before the peer's. Call it right before a message that names or releases blocks.

        The peer sees the work queued until now on these streams and on the lane.
        """
        device = self.device
        with device:
            for stream in streams:
                self._wait_for(stream)
            if self._own:
                device.driver.cuEventRecord(self._own, self.stream)
        if not self._own:
            device.finish(self.stream)
        if self._kept:
            self.release()

    def receive(self) -> None:
        """Let the lane wait for the peer's work. Call it right after a message that names or releases blocks."""
        if self._peers:
            with self.device:
                self.device.driver.cuStreamWaitEvent(self.stream, self._peers, 0)

    def enter(self, stream: int) -> None:
        """Let a stream wait for all that was received or queued on the lane until now."""
        if stream == self.stream:
            return
        if self.is_lost:
            raise _died()
        self.device.order(self.stream, stream)

    def follow(self, other: DeviceLane) -> None:
        """Let this lane wait for another one, when one peer's output goes to another peer."""
        other.enter(self.stream)

    def _wait_for(self, stream: int) -> None:
        """Let the lane wait for a stream. The caller is inside `with self.device`."""
        owner = _lanes.get(stream)
        if owner is not None and owner.is_lost:
            return
        if owner is not None and owner.device is not self.device:
            owner.device.order(stream, self.stream)
        elif stream != self.stream:
            self.device.order_within(stream, self.stream)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Queue a copy on the lane, from device to device."""
        self.device.copy(target, source, size_bytes, self.stream)

    def to_host(self, array: NDArray[Any], address: int, *, wait: bool = True) -> None:
        """Copy device memory into a C-contiguous array. Fast if the array is pinned (`Device.pin`).

        Returns when the copy is done. Without `wait`, it is done after `finish`, and the array must live until then.
        """
        device = self.device
        if array.nbytes:
            with device:
                device.driver.cuMemcpyDtoHAsync_v2(_address(array), address, array.nbytes, self.stream)
            if wait:
                device.finish(self.stream)

    def from_host(self, address: int, array: NDArray[Any], *, wait: bool = True) -> None:
        """Copy a C-contiguous array to device memory, and wait as `to_host` does. Then the array may be written to
        again.
        """
        device = self.device
        if array.nbytes:
            with device:
                device.driver.cuMemcpyHtoDAsync_v2(address, _address(array), array.nbytes, self.stream)
            if wait:
                device.finish(self.stream)

    def keep(self, thing: object) -> None:
        """Keep an object, such as the source of a copy, until all work queued on the lane until now is done."""
        self.release()
        self._kept.append((self.device.mark([self.stream]), thing))

    @property
    def keeps(self) -> bool:
        """True if `release` may have something to drop."""
        return bool(self._kept)

    def release(self) -> None:
        """Drop the kept objects whose work is done. Never waits."""
        while self._kept:
            try:
                events, thing = self._kept.popleft()
            except IndexError:  # another thread releases, too
                return
            if not self.device.are_done(events):
                self._kept.appendleft((events, thing))
                return

    @property
    def is_lost(self) -> bool:
        """True if the peer is gone and its work may never be done. Nothing may wait for such a lane."""
        return bool(self._missed)

    def reach(self) -> None:
        """Wait until all that was received or queued until now is done.

        Unlike `finish`, it gives up after the peer's death: it raises `CudaError` if the peer's last work is not done
        soon.
        """
        events = self.device.mark([self.stream])
        pause_s = waited_s = 0.0
        while not self.device.are_done(events):
            if self._missed and waited_s > _GRACE_S:
                raise _died()
            pause_s = min(0.001, 2 * pause_s + 0.000_02)
            waited_s += pause_s
            time.sleep(pause_s)

    def finish(self) -> None:
        """Wait until all work queued on the lane is done."""
        self.device.finish(self.stream)

    def close(self) -> None:
        """Close the events after the peer has gone. Received arrays stay valid. May be called many times."""
        # The events of a device that has failed end with the process.
        with suppress(CudaError):
            self._drop_own()
        peers, self._peers = self._peers, 0
        if peers:
            with suppress(CudaError), self.device:
                if self._is_unfinished(peers):
                    self._missed = peers
                else:
                    self.device.driver.cuEventDestroy_v2(peers)

    def _is_unfinished(self, event: int) -> bool:
        try:
            self.device.driver.cuEventQuery(event)
        except CudaError as error:
            return error.number == api.NOT_READY
        return False

    def _drop_own(self) -> None:
        own, self._own, self.handle = self._own, 0, b""
        if own:
            with self.device:
                self.device.driver.cuEventDestroy_v2(own)

    def __del__(self) -> None:
        if hasattr(self, "stream"):  # else it was never made
            self.close()
            with suppress(CudaError, OutOfMemory):
                if self.is_lost:
                    self.is_over = True
                    self.device.close_stream(self.stream)
                else:
                    self.device.rest(self.stream)


def _died() -> CudaError:
    return CudaError("the process that was to compute this has died before", "", 0)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
