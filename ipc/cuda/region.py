"""Regions in device memory, and leases on blocks of them.

The memory contract is that of `ipc.memory`; what differs is that a lease is no array but an address, that bytes are copied
by `write` and `read`, and that whoever lets go of a lease may have queued work that still touches the block. So a lease knows
the streams that it was handed out on, and its lane waits for them before anybody else touches the block.

A region is made by the runtime and shared by descriptor, as a memfd is: it has no name, cannot be guessed, and works for any
user and in any namespace. Where the device has no such descriptors, `handle` has the 64 bytes of the older way: whoever has read
them can open the memory (same user and PID namespace), and its maker may close such a region only when every process that it
was sent to has ended. Why: docs/decisions/0019-device-memory-by-descriptor.md.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from ctypes import byref, c_int, c_ulonglong, c_void_p
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.cuda import driver as api
from moonpool.ipc.cuda.lane import lane_of, order
from moonpool.ipc.cuda.mapping import Mapping, Origin
from moonpool.ipc.errors import Closed, CudaError, OutOfMemory, RemoteProtocolError
from moonpool.ipc.memory import Region

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonpool.ipc.cuda.device import Device
    from moonpool.ipc.cuda.lane import Lane


class DeviceLease:
    """One block on a device, until the last reference to this is gone.

    `give_back` is called with `token` once, as that of `ipc.memory.Lease` is: it must not block nor take a lock. The lane waits for
    the streams that used the block before that. A stream must live as long as it is named here: to the driver, the handle of one
    that was destroyed is any address.
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
        lane: Lane | None,
    ) -> None:
        """For `DeviceRegion.lease` alone."""
        self.mapping = region.open()
        self.region = region
        # Where it lies, and how many bytes it has.
        self.address = self.mapping.address + offset
        self.offset = offset
        self.size = size_bytes
        # What orders it, which may be set later; None where nobody else touches the region.
        self.lane = lane
        # By who uses it there: the streams that may touch it, each with its lane where it is one's; that of the lease's own lane is
        # not among them.
        self.users: dict[object, tuple[int, Lane | None]] = {}
        self.give_back = give_back
        self.token = token

    def use(self, stream: int, user: object = None) -> None:
        """From now on, work that is queued on `stream` may touch the block: it comes after all that was there before.

        Until `done` with the same `user`; without one, as long as the lease lives.
        """
        self.wait_on(stream)
        self.note(stream, user)

    def note(self, stream: int, user: object = None) -> None:
        """As `use`, for work that waits for nothing."""
        if self.lane is None or stream != self.lane.stream:
            self.users[stream if user is None else user] = stream, lane_of(stream)

    def done(self, user: object) -> None:
        """What that user queued by now is all that he did. Raises `CudaError`."""
        found = self.users.pop(user, None)
        if found is not None:
            self._order(*found)

    def wait_on(self, stream: int) -> None:
        """Let `stream` wait for all that was done to the block, without being one that uses it."""
        if self.lane is not None:
            self.lane.enter(stream)
        for other in self.streams:
            order(self.mapping.device, other, stream)

    @property
    def streams(self) -> set[int]:
        """Those that may touch it; not that of its own lane."""
        return {stream for stream, _ in list(self.users.values())}

    def _order(self, stream: int, lane: Lane | None) -> None:
        """Let whoever has the block next wait for what is queued on a stream by now."""
        if self.lane is None:
            self.mapping.wait_for(stream, lane)
        else:
            order(self.mapping.device, stream, self.lane.stream)

    def __del__(self) -> None:
        try:
            give_back = self.give_back
        except AttributeError:  # it never came to be
            return
        if self.lane is not None:
            self.mapping.lanes.add(self.lane)
        # A device that has failed does nothing more.
        with suppress(CudaError, OutOfMemory):
            for stream, lane in set(self.users.values()):
                self._order(stream, lane)
        give_back(self.token)


class DeviceRegion(Region):
    """A piece of device memory. Never resized: growth is another region. It has no `buffer`."""

    __slots__ = ("_mapping", "_sharing", "device", "fd", "handle", "is_private")

    # Whether nobody but its two ends may see it.
    is_private: bool

    def __init__(
        self, region_id: int, size_bytes: int, mapping: Mapping, fd: int, handle: bytes
    ) -> None:
        """For `create` and `adopt` alone."""
        self.id = region_id
        self.size_bytes = size_bytes
        self.device = mapping.device
        # The descriptor to be sent, -1 where there is none, and what stands for it where the device has none.
        self.fd = fd
        self.handle = handle
        self.is_private = False
        self.buffer = None
        self._mapping: Mapping | None = mapping
        self._sharing = threading.Lock()

    @classmethod
    def create(cls, region_id: int, size_bytes: int, device: Device) -> DeviceRegion:
        """A new region, all zeros, of `device.rounded(size_bytes)` bytes. Raises `OutOfMemory`, `CudaError`."""
        device.tidy()
        size_bytes = device.rounded(size_bytes)
        try:
            # Whether virtual memory needs a current context NVIDIA's text leaves open.
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
            # What others left in the memory is nobody's to see.
            device.fill(mapping.address, 0, size_bytes)
        except BaseException:
            region.close()
            raise
        return region

    @classmethod
    def adopt(
        cls, region_id: int, size_bytes: int, device: Device, fd: int, handle: bytes
    ) -> DeviceRegion:
        """A region that the peer made and sent. Owns `fd` (-1: none) at once, also when it raises.

        Raises `RemoteProtocolError` where it is no memory of that device and size.
        """
        try:
            device.tidy()
            with device:
                if handle:
                    mapping = _open_legacy(device, size_bytes, handle)
                else:
                    mapping = _import(device, size_bytes, fd)
        except (CudaError, ValueError) as error:
            raise RemoteProtocolError(
                f"region {region_id} is no memory of {size_bytes} bytes on device {device.ordinal}: {error}"
            ) from error
        finally:
            if fd >= 0:
                os.close(fd)
        return cls(region_id, size_bytes, mapping, -1, b"")

    def open(self) -> Mapping:
        """The memory at its address. Raises `Closed` after `close`."""
        if self._mapping is None:
            raise Closed(f"region {self.id} was closed")
        return self._mapping

    @property
    def is_closed(self) -> bool:
        return self._mapping is None

    @property
    def address(self) -> int:
        """Where it begins. Raises `Closed` after `close`."""
        return self.open().address

    def memory(self) -> memoryview:
        """Raises TypeError: the processor cannot look at it."""
        raise TypeError(
            f"region {self.id} lies on device {self.device.ordinal}: use read and write"
        )

    def lease(  # type: ignore[override]
        self,
        offset: int,
        size_bytes: int,
        give_back: Callable[[object], object],
        token: object,
        lane: Lane | None = None,
    ) -> DeviceLease:
        """A lease on a block, which the lane orders. The memory stays mapped while the lease lives, also after `close`.

        Raises TypeError for what does not lie in the region, and `Closed` after `close`.
        """
        if not 0 <= offset <= offset + size_bytes <= self.size_bytes:
            raise TypeError(
                f"{size_bytes} bytes at {offset} do not lie in a region of {self.size_bytes} bytes"
            )
        return DeviceLease(self, offset, size_bytes, give_back, token, lane)

    def write(self, offset: int, array: np.ndarray) -> None:
        """Copy the bytes of an array, in C order, to `offset`, which the caller has checked; waits for the copy.

        Ordered after nothing. Raises `Closed` after `close`.
        """
        mapping = self.open()
        whole = np.ascontiguousarray(array)
        self.device.write(mapping.address + offset, whole)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Copy bytes out, which the caller has checked; waits for the copy. Ordered after nothing.

        Raises `Closed` after `close`.
        """
        array = np.empty(size_bytes, np.uint8)
        address = self.open().address + offset
        with self.device.borrowed_stream() as stream:
            self.device.read(array, address, stream)
        return array.tobytes()

    def share(self, send: Callable[[DeviceRegion], object]) -> bool:
        """Let `send` hand `fd` or `handle` to a peer; False, and nothing is done, after `close` and `forget_fd`.

        `send` must not block: nobody can close the region meanwhile.
        """
        with self._sharing:
            if self.fd < 0 and not self.handle:
                return False
            send(self)
            return True

    def forget_fd(self) -> None:
        """Close the descriptor and keep the memory: nobody else is to be sent this region."""
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
        # The memory lives as long as it is mapped somewhere or a descriptor of it is open.
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
    device.driver.cuIpcGetMemHandle(byref(handle), address)
    return mapping, bytes(handle)


def _open_legacy(device: Device, size_bytes: int, handle: bytes) -> Mapping:
    if len(handle) != api.HANDLE_BYTES:
        raise ValueError(f"its handle has {len(handle)} bytes")
    address = c_ulonglong()
    opened = api.IpcHandle.from_buffer_copy(handle)
    device.driver.cuIpcOpenMemHandle_v2(byref(address), opened, api.LAZY_PEER_ACCESS)
    return Mapping(device, address.value, size_bytes, Origin.OPENED)
