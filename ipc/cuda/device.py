"""One device of this process: its context, and what is done on it that has no peer."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import TYPE_CHECKING

from moonpool.ipc.cuda import driver as api
from moonpool.ipc.errors import CudaError, CudaUnavailable, OutOfMemory

if TYPE_CHECKING:
    from moonpool.ipc.cuda.region import Mapping
    from moonpool.ipc.memory import Region

_lock = threading.Lock()
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
        raise NotImplementedError

    def finish(self, stream: int) -> None:
        """Wait until all that is queued on a stream by now is done. The processor sleeps meanwhile."""
        raise NotImplementedError

    def new_stream(self) -> int:
        """A stream that waits for no other one."""
        raise NotImplementedError

    def close_stream(self, stream: int) -> None:
        """What is queued there is done all the same."""
        raise NotImplementedError

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Queue a copy between any two addresses of devices, or of memory that is pinned."""
        raise NotImplementedError

    def pin(self, region: Region) -> bool:
        """Let copies to and from a region of ordinary memory run without a detour, until it is unmapped.

        May be called many times. False where the driver refuses: copies work all the same.
        """
        raise NotImplementedError

    def tidy(self) -> None:
        """Unmap what was let go of and is no longer in use. Never waits."""
        raise NotImplementedError

    def _has(self, attribute: int) -> bool:
        value = c_int()
        self.driver.cuDeviceGetAttribute(byref(value), attribute, self.ordinal)
        return bool(value.value)

    def _granularity(self) -> int:
        raise NotImplementedError
