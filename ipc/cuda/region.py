"""Regions in device memory, and leases on blocks of them.

The memory contract is that of `ipc.memory`, with three differences: a lease has an address and is no array, `write` and
`read` copy bytes, and when a lease ends, queued work may still touch the block. So a lease knows the streams on which
it is used, and its lane waits for them before the next user touches the block.

The runtime makes a region and shares it by descriptor, as it does with a memfd: it has no name, cannot be guessed, and
works for any user and in any namespace. If the device has no such descriptors, `handle` has the 64 bytes of the older
way. A process that has read them can open the memory (same user and PID namespace), and the runtime may close such a
region only after every process to which it was sent has ended. Why: docs/decisions/0019-device-memory-by-descriptor.md.

Theory of operation. As in `ipc.region`, `_sharing` guards the descriptor between the thread that sends it and the
thread that closes it. The address is harder: to unmap memory that a kernel on the device still touches breaks the
context of the whole process, and waiting for the device is not possible in a finalizer, which takes no lock and must
not block. So memory ends in two steps. When nobody refers to a `Mapping` any more, its finalizer puts it on the
device's list. `Device.tidy`, which is called when regions are made and closed, then asks the driver if all streams that
had used the memory are done, and unmaps it only then.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_int, c_ulonglong, c_void_p
from enum import IntEnum

import numpy as np

from moonpool.ipc.cuda import driver as api
from moonpool.ipc.cuda.device import Device
from moonpool.ipc.cuda.lane import DeviceLane, lane_of, order
from moonpool.ipc.errors import Closed, CudaError, CudaUnavailable, OutOfMemory, RemoteProtocolError
from moonpool.ipc.memory import Region


class Origin(IntEnum):
    """The way by which the memory was obtained. It decides how the memory is freed."""

    MAPPED = 1
    ALLOCATED = 2
    OPENED = 3


class Mapping:
    """Device memory at an address of this process. It is unmapped after the last reference and the last queued work."""

    def __init__(self, device: Device, address: int, size_bytes: int, origin: Origin) -> None:
        self.device = device
        self.address = address
        self.size_bytes = size_bytes
        self._origin = origin
        # All lanes of its leases.
        self.lanes: set[DeviceLane] = set()
        # Events for the work of users of leases without a lane, with their devices.
        self._marked: deque[tuple[Device, list[int]]] = deque()
        self._is_marked = False

    def wait_for(self, stream: int, lane: DeviceLane | None) -> None:
        """Keep the memory mapped until the work queued on a stream until now is done. Raises `CudaError`.

        The stream is the device's, or on the device of `lane`.
        """
        device = self.device if lane is None else lane.device
        self._marked.append((device, device.mark([stream])))

    def end(self) -> bool:
        """Unmap it, and return True, unless queued work may still touch it. For `Device.tidy`."""
        device = self.device
        if any(lane.is_over for lane in self.lanes):
            return False
        if not self._is_marked:
            self._is_marked = True
            for lane in self.lanes:
                self.wait_for(lane.stream, lane)
        if not all(where.are_done(events) for where, events in self._marked):
            return False
        driver = device.driver
        with device:
            if self._origin is Origin.MAPPED:
                driver.cuMemUnmap(self.address, self.size_bytes)
                driver.cuMemAddressFree(self.address, self.size_bytes)
            elif self._origin is Origin.ALLOCATED:
                driver.cuMemFree_v2(self.address)
            else:
                driver.cuIpcCloseMemHandle(self.address)
        self.lanes.clear()
        return True

    def __del__(self) -> None:
        # The list keeps it alive, and Python calls a finalizer once.
        if hasattr(self, "_is_marked"):
            self.device.dying.append(self)


class DeviceLease:
    """One block on a device, until the last reference to this object is gone.

    `give_back` is called with `token` once, and must neither block nor take a lock, as in `ipc.memory.Lease`. Before
    that, the lane is made to wait for the streams that used the block. A stream must live as long as it is named here:
    the driver takes the handle of a destroyed stream for any address.
    """

    __slots__ = (
        "__weakref__", "address", "give_back", "lane", "mapping", "offset", "region", "size", "token", "users",
    )  # fmt: skip

    def __init__(
        self,
        region: DeviceRegion,
        offset: int,
        size_bytes: int,
        give_back: Callable[[object], object],
        token: object,
        lane: DeviceLane | None,
    ) -> None:
        """Called by `DeviceRegion.lease` only."""
        self.mapping = region.open()
        self.region = region
        # Its address, its offset in the region, and its bytes.
        self.address = self.mapping.address + offset
        self.offset = offset
        self.size = size_bytes
        # The lane that orders it, which may be set later; None if no peer touches the region.
        self.lane = lane
        # For each user: the stream that may touch the block, with its lane if it belongs to one. The stream of the
        # lease's own lane is not among them.
        self.users: dict[object, tuple[int, DeviceLane | None]] = {}
        self.give_back = give_back
        self.token = token

    def use(self, stream: int, user: object = None) -> None:
        """Let work that is queued on `stream` from now on touch the block. It runs after all earlier work on the block.

        It ends with `done` for the same `user`; without a user, with the lease.
        """
        self.wait_on(stream)
        self.note(stream, user)

    def note(self, stream: int, user: object = None) -> None:
        """Note a use of the block by work that waits for nothing."""
        if self.lane is None or stream != self.lane.stream:
            self.users[stream if user is None else user] = stream, lane_of(stream)

    def done(self, user: object) -> None:
        """End a use: the work queued until now is all. Raises `CudaError`."""
        found = self.users.pop(user, None)
        if found is not None:
            self._order(*found)

    def wait_on(self, stream: int) -> None:
        """Let `stream` wait for all work on the block, without counting as a user."""
        if self.lane is not None:
            self.lane.enter(stream)
        for other in self.streams:
            order(self.mapping.device, other, stream)

    @property
    def streams(self) -> set[int]:
        """The streams that may touch it, without that of its own lane."""
        return {stream for stream, _ in list(self.users.values())}

    def _order(self, stream: int, lane: DeviceLane | None) -> None:
        """Let the next user of the block wait for the work queued on a stream until now."""
        if self.lane is None:
            self.mapping.wait_for(stream, lane)
        elif not self.lane.is_over:
            order(self.mapping.device, stream, self.lane.stream)

    def __del__(self) -> None:
        try:
            give_back = self.give_back
        except AttributeError:  # its __init__ raised
            return
        if self.lane is not None:
            self.mapping.lanes.add(self.lane)
        # A device that has failed does nothing more.
        with suppress(CudaError, OutOfMemory):
            for stream, lane in set(self.users.values()):
                self._order(stream, lane)
        give_back(self.token)


class DeviceRegion(Region):
    """A piece of device memory of fixed size. It has no `buffer`."""

    __slots__ = ("_mapping", "_sharing", "device", "fd", "handle", "is_private")

    # True if no process but its two ends may see it.
    is_private: bool

    def __init__(self, region_id: int, size_bytes: int, mapping: Mapping, fd: int, handle: bytes) -> None:
        """Called by `create` and `adopt` only."""
        self.id = region_id
        self.size_bytes = size_bytes
        self.device = mapping.device
        # The descriptor to send, -1 for none, and the handle that replaces it if the device has no descriptors.
        self.fd = fd
        self.handle = handle
        self.is_private = False
        self.buffer = None
        self._mapping: Mapping | None = mapping
        self._sharing = threading.Lock()

    @classmethod
    def create(cls, region_id: int, size_bytes: int, device: Device) -> DeviceRegion:
        """Make a new region of `device.rounded(size_bytes)` bytes, all zeros.

        Raises `OutOfMemory`, `CudaError`; `CudaUnavailable` if the device shares no memory.
        """
        device.tidy()
        size_bytes = device.rounded(size_bytes)
        try:
            # NVIDIA's text does not say if virtual memory needs a current context.
            with device:
                if device.has_descriptors:
                    mapping, fd = _create(device, size_bytes)
                    region = cls(region_id, size_bytes, mapping, fd, b"")
                else:
                    mapping, handle = _create_legacy(device, size_bytes)
                    region = cls(region_id, size_bytes, mapping, -1, handle)
        except OutOfMemory as error:
            free, total = device.memory_info()
            raise OutOfMemory(
                f"cannot set aside {size_bytes} bytes on device {device.ordinal}: {free} of its {total} "
                f"bytes are free ({error})"
            ) from error
        try:
            # The memory may have bytes of other processes, which a model must not see.
            device.fill(mapping.address, 0, size_bytes)
        except BaseException:
            region.close()
            raise
        return region

    @classmethod
    def adopt(cls, region_id: int, size_bytes: int, device: Device, fd: int, handle: bytes) -> DeviceRegion:
        """Map a region that the peer made and sent. Owns `fd` (-1 for none) at once, even if it raises.

        Raises `RemoteProtocolError` if it is no memory of that device and size.
        """
        try:
            device.tidy()
            with device:
                mapping = _open_legacy(device, size_bytes, handle) if handle else _import(device, size_bytes, fd)
        except (CudaError, ValueError) as error:
            raise RemoteProtocolError(
                f"region {region_id} is not memory of {size_bytes} bytes on device {device.ordinal}: {error}"
            ) from error
        finally:
            if fd >= 0:
                os.close(fd)
        return cls(region_id, size_bytes, mapping, -1, b"")

    def open(self) -> Mapping:
        """Return the mapped memory. Raises `Closed` after `close`."""
        if self._mapping is None:
            raise Closed(f"region {self.id} was closed")
        return self._mapping

    @property
    def is_closed(self) -> bool:
        return self._mapping is None

    @property
    def address(self) -> int:
        """The address of its first byte. Raises `Closed` after `close`."""
        return self.open().address

    def memory(self) -> memoryview:
        """Raise TypeError, because the processor cannot read the memory of a device."""
        raise TypeError(f"region {self.id} lies on device {self.device.ordinal}: use read and write")

    def lease(  # type: ignore[override]
        self,
        offset: int,
        size_bytes: int,
        give_back: Callable[[object], object],
        token: object,
        lane: DeviceLane | None = None,
    ) -> DeviceLease:
        """Return a lease on a block, which the lane orders. The memory stays mapped while the lease lives, even after
        `close`.

        Raises TypeError if the block does not lie in the region, and `Closed` after `close`.
        """
        if not 0 <= offset <= offset + size_bytes <= self.size_bytes:
            raise TypeError(f"{size_bytes} bytes at {offset} do not lie in a region of {self.size_bytes} bytes")
        return DeviceLease(self, offset, size_bytes, give_back, token, lane)

    def write(self, offset: int, array: np.ndarray) -> None:
        """Copy the bytes of an array, in C order, to `offset`, which the caller has checked, and wait for the copy.

        Waits for no other stream. Raises `Closed` after `close`.
        """
        mapping = self.open()
        whole = np.ascontiguousarray(array)
        self.device.write(mapping.address + offset, whole)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return a copy of bytes at `offset`, which the caller has checked; wait for the copy, and for no other stream.

        Raises `Closed` after `close`.
        """
        array = np.empty(size_bytes, np.uint8)
        address = self.open().address + offset
        with self.device.borrowed_stream() as stream:
            self.device.read(array, address, stream)
        return array.tobytes()

    def share(self, send: Callable[[DeviceRegion], object]) -> bool:
        """Call `send`, which sends `fd` or `handle` to a peer. After `close` or `forget_fd`, does nothing and returns
        False.

        `send` must not block, because the region cannot be closed meanwhile.
        """
        with self._sharing:
            if self.fd < 0 and not self.handle:
                return False
            send(self)
            return True

    def forget_fd(self) -> None:
        """Close the descriptor and keep the memory. The region can no longer be sent."""
        with self._sharing:
            fd, self.fd, self.handle = self.fd, -1, b""
            if fd >= 0:
                os.close(fd)

    def close(self) -> None:
        self._mapping = None
        self.forget_fd()
        self.device.tidy()


def _create(device: Device, size_bytes: int) -> tuple[Mapping, int]:
    driver = device.driver
    allocation, fd = c_ulonglong(), c_int(-1)
    properties = api.device_properties(device.ordinal)
    driver.cuMemCreate(byref(allocation), size_bytes, byref(properties), 0)
    try:
        driver.cuMemExportToShareableHandle(byref(fd), allocation, api.DESCRIPTOR, 0)
        os.set_inheritable(fd.value, False)
        return _map(device, size_bytes, allocation), fd.value
    except BaseException:
        if fd.value >= 0:
            os.close(fd.value)
        raise
    finally:
        # The memory lives as long as it is mapped in some process, or a descriptor of it is open.
        driver.cuMemRelease(allocation)


def _import(device: Device, size_bytes: int, fd: int) -> Mapping:
    driver = device.driver
    allocation, properties = c_ulonglong(), api.AllocationProperties()
    driver.cuMemImportFromShareableHandle(byref(allocation), c_void_p(fd), api.DESCRIPTOR)
    try:
        driver.cuMemGetAllocationPropertiesFromHandle(byref(properties), allocation)
        if properties.location.id != device.ordinal:
            raise ValueError(f"it lies on device {properties.location.id}")
        return _map(device, size_bytes, allocation)
    finally:
        driver.cuMemRelease(allocation)


def _map(device: Device, size_bytes: int, allocation: c_ulonglong) -> Mapping:
    driver = device.driver
    address = c_ulonglong()
    access = api.device_access(device.ordinal)
    is_mapped = False
    driver.cuMemAddressReserve(byref(address), size_bytes, 0, 0, 0)
    try:
        driver.cuMemMap(address, size_bytes, 0, allocation, 0)
        is_mapped = True
        driver.cuMemSetAccess(address, size_bytes, byref(access), 1)
    except BaseException:
        if is_mapped:
            driver.cuMemUnmap(address, size_bytes)
        driver.cuMemAddressFree(address, size_bytes)
        raise
    return Mapping(device, address.value, size_bytes, Origin.MAPPED)


def _create_legacy(device: Device, size_bytes: int) -> tuple[Mapping, bytes]:
    address, handle = c_ulonglong(), api.IpcHandle()
    device.driver.cuMemAlloc_v2(byref(address), size_bytes)
    mapping = Mapping(device, address.value, size_bytes, Origin.ALLOCATED)
    try:
        device.driver.cuIpcGetMemHandle(byref(handle), address)
    except CudaError as error:
        raise CudaUnavailable(
            f"device {device.ordinal} ({device.name}) shares memory with other processes neither by descriptor "
            f"({device.why_no_descriptors}) nor by handle ({error}), and moonpool needs one of them; let the model run "
            "with KIND_CPU"
        ) from error
    return mapping, bytes(handle)


def _open_legacy(device: Device, size_bytes: int, handle: bytes) -> Mapping:
    if len(handle) != api.HANDLE_BYTES:
        raise ValueError(f"its handle has {len(handle)} bytes")
    address = c_ulonglong()
    opened = api.IpcHandle.from_buffer_copy(handle)
    device.driver.cuIpcOpenMemHandle_v2(byref(address), opened, api.LAZY_PEER_ACCESS)
    return Mapping(device, address.value, size_bytes, Origin.OPENED)
