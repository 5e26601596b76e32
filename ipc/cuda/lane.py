"""What happens to device memory between this process and one peer, in order.

Theory of operation. A *lane* is a stream of our own for one peer on one device, and an event that the peer can wait for. All that
crosses is ordered through the stream:

- Before a message names blocks on the device, or gives them back, `publish` makes the lane wait for the streams that
  touch them, and records the event.
- After a message that names or gives back such blocks, `receive` makes the lane wait for the peer's event.
- Whoever touches a block on a stream of his own lets that stream wait for the lane first (`DeviceLease.use`, `enter`). When he
  is done with it, or with the next `publish` that names the stream, the lane waits for him.

Nobody waits on the processor for any of it. An event that is recorded again only ever stands for more, so one for each
direction is enough. There is a lane for each peer, and not one for all, because what waits for a slow or dead peer must
hold up nobody else. One that has no peer orders what callers do with memory of their own.

Where the two processes cannot share events (each may find that out when it opens the other's), both wait for their own
work before they send: `publish` returns when the work is done.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from moonpool.ipc.cuda import driver as api
from moonpool.ipc.errors import CudaError, OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from moonpool.ipc.cuda.device import Device


# How long work of a process that is gone may still take.
_GRACE_S = 1.0
_lanes: WeakValueDictionary[int, Lane] = WeakValueDictionary()


def lane_of(stream: int) -> Lane | None:
    """The lane that a stream belongs to, if it is one's."""
    return _lanes.get(stream)


def order(device: Device, first: int, then: int) -> None:
    """`Device.order`, where `first` is a stream of that device, or of a lane on any."""
    lane = _lanes.get(first)
    if lane is not None and lane.is_lost:
        return  # what its peer was at ended with it
    (device if lane is None else lane.device).order(first, then)


class Lane:
    """Thread-safe. Raises `CudaError` where the driver refuses.

    The stream lives as long as anything refers to the lane, also after `close`.
    """

    def __init__(self, device: Device, *, shares_events: bool = True) -> None:
        self.device = device
        self.stream = device.new_stream()
        _lanes[self.stream] = self
        # What is needed until work on the lane is done, with the events that say so.
        self._kept: deque[tuple[list[int], object]] = deque()
        self._own = self._peers = 0
        # The event of a peer that has gone before the device came to it, which it may never do.
        self._missed = 0
        # For EVENT; empty where events cannot be shared.
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
        """Take in the peer's EVENT. Raises `CudaError` where it cannot be opened: then `meet(b"")`, and tell the peer so.

        An empty handle: from now on `publish` waits itself, and `receive` has nothing to do. `handle` is empty then, too.
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
        """To be called right before a message that names blocks or gives them back.

        The peer sees what was queued on these streams, and on the lane, by now.
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
            self.let_go()

    def receive(self) -> None:
        """To be called right after a message that names blocks or gives them back."""
        if self._peers:
            with self.device:
                self.device.driver.cuStreamWaitEvent(self.stream, self._peers, 0)

    def enter(self, stream: int) -> None:
        """Let a stream wait for all that was received or queued on the lane by now."""
        if stream == self.stream:
            return
        if self.is_lost:
            raise _died()
        self.device.order(self.stream, stream)

    def follow(self, other: Lane) -> None:
        """Let this lane wait for another one: what one peer made is handed to another."""
        other.enter(self.stream)

    def _wait_for(self, stream: int) -> None:
        """Within `with self.device`."""
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
        """Copy device memory into an array, which is C-contiguous. Fast where the array is pinned (`Device.pin`).

        Returns when the copy is done; without `wait`, it is done after `finish`, and the array must live until then.
        """
        device = self.device
        if array.nbytes:
            with device:
                device.driver.cuMemcpyDtoHAsync_v2(
                    _address(array), address, array.nbytes, self.stream
                )
            if wait:
                device.finish(self.stream)

    def from_host(self, address: int, array: NDArray[Any], *, wait: bool = True) -> None:
        """Copy a C-contiguous array to device memory, as `to_host` does: the array may be written to again afterwards."""
        device = self.device
        if array.nbytes:
            with device:
                device.driver.cuMemcpyHtoDAsync_v2(
                    address, _address(array), array.nbytes, self.stream
                )
            if wait:
                device.finish(self.stream)

    def keep(self, thing: object) -> None:
        """Hold on to something until all that is queued on the lane by now is done: the source of a copy, say."""
        self.let_go()
        self._kept.append((self.device.mark([self.stream]), thing))

    @property
    def keeps(self) -> bool:
        """Whether there is something that `let_go` may find to be done with."""
        return bool(self._kept)

    def let_go(self) -> None:
        """Of what was kept, until work that is done by now. Never waits."""
        while self._kept:
            try:
                events, thing = self._kept.popleft()
            except IndexError:  # another thread lets go, too
                return
            if not self.device.are_done(events):
                self._kept.appendleft((events, thing))
                return

    @property
    def is_lost(self) -> bool:
        """Whether the peer is gone, and what it was at may never be done: nobody is to wait for this lane."""
        return bool(self._missed)

    def reach(self) -> None:
        """Wait until all that was received or queued by now is done.

        Unlike `finish`, it ends where the peer does: raises `CudaError` if what the peer was at when it died does not come.
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
        """Wait until all that is queued on the lane is done."""
        self.device.finish(self.stream)

    def close(self) -> None:
        """The peer is gone. Arrays that were received stay valid. May be called many times."""
        # What a device has that has failed goes with the process.
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
            with suppress(CudaError):
                self.device.close_stream(self.stream)


def _died() -> CudaError:
    return CudaError("the process that was to compute this has died before", "", 0)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
