"""One device of this process: its context, and what is done on it that has no peer."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from contextlib import contextmanager, suppress
from ctypes import byref, c_int, c_size_t, c_void_p
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.cuda import driver as api
from moonpool.ipc.errors import CudaError, CudaUnavailable, OutOfMemory
from moonpool.ipc.region import Map

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Callable

    from numpy.typing import NDArray

    from moonpool.ipc.cuda.mapping import Mapping
    from moonpool.ipc.memory import Region

_lock = threading.Lock()
_pinning = threading.Lock()
_devices: dict[int, Device] = {}


def device_count() -> int:
    """How many devices this process sees; 0 where none can be used. Makes no context."""
    try:
        driver = api.load()
    except CudaUnavailable:
        return 0
    count = c_int()
    driver.cuDeviceGetCount(byref(count))
    return count.value


def device(ordinal: int) -> Device:
    """The device of that number, the same object at each call; the first one makes or shares its context.

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
    """The device that memory at an address lies on; None for memory that no device holds.

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
        if (
            error.number != api.INVALID_VALUE
        ):  # what the driver says of addresses that it does not know
            raise
        return None
    return device(ordinal.value)


def _nothing() -> None:
    """What is to be done before memory is unmapped that could not be pinned."""


class Device:
    """A device and its primary context, which torch and cupy use as well. Thread-safe.

    `with device:` makes its context the thread's current one for that long. The context stays until the process ends.
    """

    def __init__(self, ordinal: int) -> None:
        """For `device` alone: a process has one for each number."""
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
        # Whether regions are shared by descriptor, and by the older handle where they are not.
        self.has_descriptors = self._has(api.HAS_VIRTUAL_MEMORY) and self._has(api.HAS_DESCRIPTORS)
        self.granularity_bytes = self._granularity() if self.has_descriptors else 1 << 21
        # Events that are free to be recorded: taken and given back by any thread.
        self._events: deque[int] = deque()
        self._streams: deque[int] = deque()
        # Mappings that nobody refers to any more, and that work in flight may still touch.
        self.dying: deque[Mapping] = deque()

    def __enter__(self) -> Device:
        self.driver.cuCtxPushCurrent_v2(self.context)
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.cuCtxPopCurrent_v2(byref(c_void_p()))

    def __repr__(self) -> str:
        return f"<Device {self.ordinal}, {self.name}>"

    def memory_info(self) -> tuple[int, int]:
        """Bytes that are free, and all."""
        free, total = c_size_t(), c_size_t()
        with self:
            self.driver.cuMemGetInfo_v2(byref(free), byref(total))
        return free.value, total.value

    def rounded(self, size_bytes: int) -> int:
        """The size of the smallest region that has so many bytes."""
        granularity = self.granularity_bytes
        return (size_bytes + granularity - 1) // granularity * granularity or granularity

    def order(self, first: int, then: int) -> None:
        """Let what is queued on the stream `then` from now on wait for what is queued on `first` by now.

        `first` is a stream of this device, `then` of any. Nobody waits here.
        """
        if first != then:
            with self:
                self.order_within(first, then)

    def order_within(self, first: int, then: int) -> None:
        """As `order` of two streams, for whoever is within `with device` already."""
        event = self._take_event()
        try:
            self.driver.cuEventRecord(event, first)
            # What is waited for is settled in the call, so that the event may be recorded again at once.
            self.driver.cuStreamWaitEvent(then, event, 0)
        finally:
            self._events.append(event)

    def finish(self, stream: int) -> None:
        """Wait until all that is queued on a stream by now is done. The processor sleeps meanwhile."""
        event = self._take_event()
        with self:
            self.driver.cuEventRecord(event, stream)
            self.driver.cuEventSynchronize(event)
        self._events.append(event)

    def new_stream(self) -> int:
        """A stream that waits for no other one."""
        stream = c_void_p()
        with self:
            self.driver.cuStreamCreate(byref(stream), api.NON_BLOCKING)
        return stream.value or 0

    def close_stream(self, stream: int) -> None:
        """What is queued there is done all the same."""
        with self:
            self.driver.cuStreamDestroy_v2(stream)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Queue a copy between addresses of devices."""
        if size_bytes:
            with self:
                self.driver.cuMemcpyAsync(target, source, size_bytes, stream)

    def pin(self, region: Region) -> bool:
        """Let copies to and from a region of ordinary memory run without a detour, until it is unmapped.

        May be called many times. False where it cannot be pinned: copies work all the same.
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
        # A device that has failed has let go of it.
        with suppress(CudaError), self:
            self.driver.cuMemHostUnregister(address)

    @contextmanager
    def borrowed_stream(self) -> Iterator[int]:
        """A stream for something that is waited for before this ends: to make one takes longer than most of such work."""
        try:
            stream = self._streams.pop()
        except IndexError:
            stream = self.new_stream()
        try:
            yield stream
        finally:
            self._streams.append(stream)

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        """Set all bytes there, and wait for it. Ordered after nothing, as `write` and `read` are."""
        with self.borrowed_stream() as stream:
            with self:
                self.driver.cuMemsetD8Async(address, value, size_bytes, stream)
            self.finish(stream)

    def write(self, address: int, array: NDArray[Any]) -> None:
        """Copy a C-contiguous array to an address on the device, and wait for it."""
        if array.nbytes:
            source = array.__array_interface__["data"][0]
            with self.borrowed_stream() as stream:
                with self:
                    self.driver.cuMemcpyHtoDAsync_v2(address, source, array.nbytes, stream)
                self.finish(stream)

    def read(self, array: NDArray[Any], address: int, stream: int) -> None:
        """Copy into a C-contiguous array from an address on the device, after what is queued on `stream`, and wait for it."""
        if array.nbytes:
            target = array.__array_interface__["data"][0]
            with self:
                self.driver.cuMemcpyDtoHAsync_v2(target, address, array.nbytes, stream)
            self.finish(stream)

    def mark(self, streams: Iterable[int]) -> list[int]:
        """Events that stand for what is queued on these streams by now; they go back with `are_done`."""
        events = []
        with self:
            for stream in streams:
                event = self._take_event()
                events.append(event)
                self.driver.cuEventRecord(event, stream)
        return events

    def are_done(self, events: list[int]) -> bool:
        """Whether all that these events stand for is done. Takes back those of which it is. Never waits."""
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
        """Unmap what was let go of and is no longer in use. Never waits."""
        for _ in range(len(self.dying)):
            try:
                mapping = self.dying.popleft()
            except IndexError:  # another thread tidies, too
                return
            try:
                is_done = mapping.end()
            except CudaError:
                # The context is broken, as whoever works there next is told; what it has goes with the process.
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

    def _has(self, attribute: int) -> bool:
        value = c_int()
        self.driver.cuDeviceGetAttribute(byref(value), attribute, self.ordinal)
        return bool(value.value)

    def _granularity(self) -> int:
        found = c_size_t()
        properties = api.device_properties(self.ordinal)
        self.driver.cuMemGetAllocationGranularity(byref(found), byref(properties), api.MINIMUM)
        return found.value
