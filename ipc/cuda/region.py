"""Regions in device memory, and leases on blocks of them.

The memory contract is that of `ipc.memory`; what differs is that a lease is no array but an address, that bytes are
copied by `write` and `read`, and that the last to let go of a lease may have work queued that still touches the block. So
a lease knows the streams that it was handed out on, and its lane waits for them before the block is given back.

A region is made by the runtime and shared by descriptor, as a memfd is: it has no name, cannot be guessed, and works for any
user and in any namespace. Where the device has no such descriptors, `handle` has the 64 bytes of the older way: whoever
has read them can open the memory (same user and PID namespace), and its maker may close such a region only when every
process that it was sent to has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.ipc.memory import Region

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from moonpool.ipc.cuda.device import Device
    from moonpool.ipc.cuda.lane import Lane


class Mapping:
    """Device memory at an address of this process. Unmapped when nobody refers to it and the device is done with it."""

    device: Device
    address: int
    size_bytes: int


class DeviceLease:
    """One block on a device, until the last reference to this is gone.

    `give_back` is called with `token` once, as that of `ipc.memory.Lease` is: it must not block nor take a lock. The streams that
    used the block go to the lane before that, and its next `publish` waits for them. A stream must live as long
    as the lease that it was named to.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "give_back",
        "lane",
        "mapping",
        "offset",
        "region",
        "size",
        "streams",
        "token",
    )

    # Where it lies, and how many bytes it has.
    address: int
    region: DeviceRegion
    offset: int
    size: int
    # What has to be waited for before the block may be touched; None where nothing has.
    lane: Lane | None
    streams: set[int]
    give_back: Callable[[object], object]
    token: object
    mapping: Mapping

    def use(self, stream: int) -> None:
        """From now on, work that is queued on `stream` may touch the block: it comes after all that was there before."""
        raise NotImplementedError


class DeviceRegion(Region):
    """A piece of device memory. Never resized: growth is another region. It has no `buffer`."""

    __slots__ = ("device", "fd", "handle", "is_private", "mapping")

    device: Device
    # The descriptor to be sent, -1 where there is none.
    fd: int
    # What stands for the descriptor where the device has none; else empty.
    handle: bytes
    # Whether nobody but its two ends may see it.
    is_private: bool
    mapping: Mapping | None

    @classmethod
    def create(cls, region_id: int, size_bytes: int, device: Device) -> DeviceRegion:
        """A new region, all zeros, of `device.rounded(size_bytes)` bytes. Raises `OutOfMemory`, `CudaError`."""
        raise NotImplementedError

    @classmethod
    def adopt(
        cls, region_id: int, size_bytes: int, device: Device, fd: int, handle: bytes
    ) -> DeviceRegion:
        """A region that the peer made and sent. Owns `fd` (-1: none) at once, also when it raises.

        Raises `RemoteProtocolError` where it is no memory of that device and size.
        """
        raise NotImplementedError

    @property
    def address(self) -> int:
        """Where it begins. Raises `Closed` after `close`."""
        raise NotImplementedError

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
        raise NotImplementedError

    def write(self, offset: int, array: np.ndarray) -> None:
        """Copy the bytes of an array, in C order, to `offset`, which the caller has checked; waits for the copy.

        Ordered after nothing. Raises `Closed` after `close`.
        """
        raise NotImplementedError

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Copy bytes out, which the caller has checked; waits for the copy. Ordered after nothing."""
        raise NotImplementedError

    def share(self, send: Callable[[DeviceRegion], object]) -> bool:
        """As that of `SharedRegion`: `send` may hand `fd` or `handle` to a peer."""
        raise NotImplementedError

    def forget_fd(self) -> None:
        """Close the descriptor and keep the memory: nobody else is to be sent this region."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
