"""A device as this process sees it: its context, and work on it that no peer takes part in.

Theory of operation. `_lock` makes sure that a process has one `Device` for each number; a lookup of a known device
takes no lock. `_pinning` makes sure that memory is registered with the driver once. The registration ends in
`Map.before_unmap`, in the thread that drops the last view, which may be in the middle of a garbage collection and
therefore takes no lock.

Events and idle streams are kept in deques. Their `append` and `pop` are atomic, so any thread takes and returns one
without a lock; a thread that finds none makes one. The same holds for `dying`, to which a finalizer appends: each
thread that calls `tidy` pops a mapping, tries to unmap it, and appends it again if queued work may still touch it.

The current context belongs to a thread. `with device` pushes the context and pops it, so a model's own choice stays.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from ctypes import byref, c_int, c_size_t, c_ulonglong, c_void_p
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Protocol

import numpy as np

from moonpool.ipc.cuda import driver as api
from moonpool.ipc.errors import CudaError, CudaUnavailable, OutOfMemory
from moonpool.ipc.memory import Region
from moonpool.ipc.region import Map

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Dying(Protocol):
    """Memory at an address of this process that nobody refers to any more: a `region.Mapping`."""

    def end(self) -> bool:
        """Unmap it, and return True, unless queued work may still touch it. Never waits."""


_lock = threading.Lock()
_pinning = threading.Lock()
_devices: dict[int, Device] = {}
_MOST_LOOKS = 4
# The granularity of regions that are shared by handle.
_USUAL_GRANULARITY = 1 << 21


def device_count() -> int:
    """Return the number of devices that this process sees; 0 if none can be used. Makes no context."""
    try:
        driver = api.load()
    except CudaUnavailable:
        return 0
    count = c_int()
    driver.cuDeviceGetCount(byref(count))
    return count.value


def device(ordinal: int) -> Device:
    """Return the device of that number, the same object at each call. The first call makes its context, or shares it.

    Thread-safe. Raises `CudaUnavailable`.
    """
    found = _devices.get(ordinal)
    if found is None:
        with _lock:
            found = _devices.get(ordinal)
            if found is None:
                found = _devices[ordinal] = Device(ordinal)
    return found


def device_of(address: int) -> Device | None:
    """Return the device of the memory at an address; None for memory that is on no device.

    Raises `CudaUnavailable`.
    """
    driver = api.load()
    kind, ordinal = ctypes.c_uint(), c_int()
    try:
        driver.cuPointerGetAttribute(byref(kind), api.POINTER_KIND, address)
        if kind.value != api.DEVICE_MEMORY:
            return None
        driver.cuPointerGetAttribute(byref(ordinal), api.POINTER_DEVICE, address)
    except CudaError as error:
        if error.number != api.INVALID_VALUE:  # the driver's error for addresses that it does not know
            raise
        return None
    return device(ordinal.value)


def _nothing() -> None:
    """Do nothing before memory is unmapped that could not be pinned."""


class Device:
    """A device and its primary context, which torch and cupy use as well. Thread-safe.

    `with device:` makes its context the thread's current one inside the block. The context stays until the process
    ends.
    """

    def __init__(self, ordinal: int) -> None:
        """Called by `device` only, as a process has one object for each number."""
        self.driver = driver = api.load()
        self.ordinal = ordinal
        number, name, context = c_int(), ctypes.create_string_buffer(256), c_void_p()
        try:
            driver.cuDeviceGet(byref(number), ordinal)
            driver.cuDeviceGetName(name, 256, number)
            driver.cuDevicePrimaryCtxRetain(byref(context), number)
        except (CudaError, OutOfMemory) as error:
            raise CudaUnavailable(
                f"device {ordinal} cannot be used: {error}; this process sees {device_count()} devices "
                "(CUDA_VISIBLE_DEVICES chooses which)"
            ) from error
        self.name = name.value.decode(errors="replace")
        self.context = context.value
        # Why regions are shared by the older handle, and not by descriptor; empty if they are shared by descriptor.
        self.granularity_bytes, self.why_no_descriptors = self._way()
        # Events that are free to be recorded.
        self._events: deque[int] = deque()
        self._streams: deque[int] = deque()
        # Streams of lanes that are gone, each with an event for the work that was left.
        self._resting: deque[tuple[int, list[int]]] = deque()
        # Mappings without references that queued work may still touch.
        self.dying: deque[Dying] = deque()

    def __enter__(self) -> Device:
        self.driver.cuCtxPushCurrent_v2(self.context)
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.cuCtxPopCurrent_v2(byref(c_void_p()))

    def __repr__(self) -> str:
        return f"<Device {self.ordinal}, {self.name}>"

    def memory_info(self) -> tuple[int, int]:
        """Return the free bytes, and all bytes."""
        free, total = c_size_t(), c_size_t()
        with self:
            self.driver.cuMemGetInfo_v2(byref(free), byref(total))
        return free.value, total.value

    def rounded(self, size_bytes: int) -> int:
        """Return the size of the smallest region that has so many bytes."""
        granularity = self.granularity_bytes
        return (size_bytes + granularity - 1) // granularity * granularity or granularity

    def order(self, first: int, then: int) -> None:
        """Let work queued later on the stream `then` wait for work queued until now on `first`. Does not wait itself.

        `first` is a stream of this device, `then` of any device.
        """
        if first != then:
            with self:
                self.order_within(first, then)

    def order_within(self, first: int, then: int) -> None:
        """Order two different streams as `order` does. The caller is inside `with device`."""
        event = self._take_event()
        try:
            self.driver.cuEventRecord(event, first)
            # The call notes the work to wait for, so the event may be recorded again at once.
            self.driver.cuStreamWaitEvent(then, event, 0)
        finally:
            self._events.append(event)

    def finish(self, stream: int) -> None:
        """Wait until all work queued on a stream until now is done. The processor sleeps meanwhile."""
        event = self._take_event()
        with self:
            self.driver.cuEventRecord(event, stream)
            self.driver.cuEventSynchronize(event)
        self._events.append(event)

    def new_stream(self) -> int:
        """Make a stream that does not wait for any other."""
        stream = c_void_p()
        with self:
            self.driver.cuStreamCreate(byref(stream), api.NON_BLOCKING)
        return stream.value or 0

    def close_stream(self, stream: int) -> None:
        """Destroy a stream. The driver still does the work queued on it."""
        with self:
            self.driver.cuStreamDestroy_v2(stream)

    def rest(self, stream: int) -> None:
        """Take over a stream that nobody needs any more, for `rested_stream`. Never waits, and takes no lock."""
        self._resting.append((stream, self.mark([stream])))

    def rested_stream(self) -> int:
        """Return a stream that does not wait for any other and has nothing to do."""
        # One that waits for a dead process may never be done. A few are looked at, so that many of them cost no time.
        for _ in range(min(_MOST_LOOKS, len(self._resting))):
            try:
                stream, events = self._resting.popleft()
            except IndexError:  # another thread takes streams, too
                break
            if self.are_done(events):
                return stream
            self._resting.append((stream, events))
        return self.new_stream()

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Queue a copy between addresses of devices."""
        if size_bytes:
            with self:
                self.driver.cuMemcpyAsync(target, source, size_bytes, stream)

    def pin(self, region: Region) -> bool:
        """Register a region of ordinary memory with the driver until it is unmapped, so that copies run without a
        detour.

        May be called many times. Returns False if it cannot be pinned; copies work all the same.
        """
        memory = region.buffer
        if not isinstance(memory, Map):
            return False
        with _pinning:
            if memory.before_unmap is None:
                memory.before_unmap = self._register(memory)
            return memory.before_unmap is not _nothing

    def _register(self, memory: Map) -> Callable[[], object]:
        address = int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
        try:
            with self:
                self.driver.cuMemHostRegister_v2(address, len(memory), api.PORTABLE)
        except (CudaError, OutOfMemory):
            return _nothing
        return partial(self._unregister, address)

    def _unregister(self, address: int) -> None:
        # A device that has failed has released it already.
        with suppress(CudaError), self:
            self.driver.cuMemHostUnregister(address)

    @contextmanager
    def borrowed_stream(self) -> Iterator[int]:
        """Lend a stream for work that is done when the block ends. To make a stream takes longer than most such
        work.
        """
        try:
            stream = self._streams.pop()
        except IndexError:
            stream = self.new_stream()
        try:
            yield stream
        finally:
            self._streams.append(stream)

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        """Set all bytes in a range, and wait. Waits for no other stream, and neither does `write`."""
        with self.borrowed_stream() as stream:
            with self:
                self.driver.cuMemsetD8Async(address, value, size_bytes, stream)
            self.finish(stream)

    def write(self, address: int, array: NDArray[Any]) -> None:
        """Copy a C-contiguous array to an address on the device, and wait until it is done."""
        if array.nbytes:
            source = array.__array_interface__["data"][0]
            with self.borrowed_stream() as stream:
                with self:
                    self.driver.cuMemcpyHtoDAsync_v2(address, source, array.nbytes, stream)
                self.finish(stream)

    def read(self, array: NDArray[Any], address: int, stream: int) -> None:
        """Copy from an address on the device into a C-contiguous array, after the work queued on `stream`, and wait."""
        if array.nbytes:
            target = array.__array_interface__["data"][0]
            with self:
                self.driver.cuMemcpyDtoHAsync_v2(target, address, array.nbytes, stream)
            self.finish(stream)

    def mark(self, streams: Iterable[int]) -> list[int]:
        """Return events for the work queued on these streams until now. `are_done` takes them back."""
        events = []
        with self:
            for stream in streams:
                event = self._take_event()
                events.append(event)
                self.driver.cuEventRecord(event, stream)
        return events

    def are_done(self, events: list[int]) -> bool:
        """Return True if all work before these events is done, and take back the events that are done. Never waits."""
        with self:
            while events:
                try:
                    self.driver.cuEventQuery(events[-1])
                except CudaError as error:
                    if error.number != api.NOT_READY:
                        raise
                    return False
                self._events.append(events.pop())
        return True

    def tidy(self) -> None:
        """Unmap memory that nobody refers to and no queued work touches. Never waits."""
        for _ in range(len(self.dying)):
            try:
                mapping = self.dying.popleft()
            except IndexError:  # another thread tidies, too
                return
            try:
                is_done = mapping.end()
            except CudaError:
                # The context is broken, and the next call on it raises. Its memory ends with the process.
                continue
            if not is_done:
                self.dying.append(mapping)

    def _take_event(self) -> int:
        try:
            return self._events.pop()
        except IndexError:
            event = c_void_p()
            with self:
                flags = api.DISABLE_TIMING | api.BLOCKING_SYNC
                self.driver.cuEventCreate(byref(event), flags)
            return event.value or 0

    @property
    def has_descriptors(self) -> bool:
        """True if regions are shared by descriptor, False if by the older handle."""
        return not self.why_no_descriptors

    def _way(self) -> tuple[int, str]:
        """Return the granularity of regions, and why they cannot be shared by descriptor.

        Some machines refuse the descriptors that their driver says it has, so a small one is made.
        """
        if not (self._has(api.HAS_VIRTUAL_MEMORY) and self._has(api.HAS_DESCRIPTORS)):
            return _USUAL_GRANULARITY, "its driver has no POSIX descriptors of memory"
        granularity, properties = c_size_t(), api.device_properties(self.ordinal)
        allocation, fd = c_ulonglong(), c_int(-1)
        driver = self.driver
        try:
            driver.cuMemGetAllocationGranularity(byref(granularity), byref(properties), api.MINIMUM)
            with self:
                driver.cuMemCreate(byref(allocation), granularity.value, byref(properties), 0)
                try:
                    driver.cuMemExportToShareableHandle(byref(fd), allocation, api.DESCRIPTOR, 0)
                finally:
                    driver.cuMemRelease(allocation)
            os.close(fd.value)
        except OutOfMemory:  # a device that is full now may have room later
            return granularity.value, ""
        except CudaError as error:
            return _USUAL_GRANULARITY, str(error)
        return granularity.value, ""

    def _has(self, attribute: int) -> bool:
        value = c_int()
        self.driver.cuDeviceGetAttribute(byref(value), attribute, self.ordinal)
        return bool(value.value)
