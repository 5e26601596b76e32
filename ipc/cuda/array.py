"""Arrays in device memory: what callers and models hold, and what they pass in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import CapsuleType

    from moonpool.ipc.cuda.device import Device
    from moonpool.ipc.cuda.region import DeviceLease


class DeviceArray:
    """A C-contiguous array on a device. cupy, torch and others take it without a copy, by `__dlpack__` or
    `__cuda_array_interface__`, in the order of their own streams.

    Its memory stays valid as long as it or anything made of it lives. A stream that it was handed out on must live as long,
    too. Not to be changed by two threads at a time; else thread-safe.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "datatype",
        "device",
        "is_read_only",
        "lease",
        "owner",
        "shape",
        "stream",
    )

    address: int
    shape: tuple[int, ...]
    # The code in `ipc.tensors`.
    datatype: int
    device: Device
    # The block of ours that it lies in; None for memory of somebody else, which `owner` keeps.
    lease: DeviceLease | None
    owner: object
    # The stream of the owner's that made it; 0 where nothing has to be waited for. For foreign memory only.
    stream: int
    is_read_only: bool

    @classmethod
    def over(
        cls, lease: DeviceLease, offset: int, datatype: int, shape: tuple[int, ...]
    ) -> DeviceArray:
        """An array in a block of ours, which the caller has checked."""
        raise NotImplementedError

    @classmethod
    def of(cls, source: object, stream: int = 0) -> DeviceArray | None:
        """What an object says of its device memory, without a copy; None for one that has none.

        `source` is a `DeviceArray`, has `__dlpack__` or `__cuda_array_interface__`, or is a capsule of DLPack.
        Where it can, it is asked to be ready for `stream`; else `array.stream` says what to wait for. `enter` does either.
        Raises `BadTensor` for what is not C-contiguous or has no datatype of ours, `CudaUnavailable`.
        """
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    @property
    def is_cpu(self) -> bool:
        """False: an array in ordinary memory is numpy's."""
        return False

    def enter(self, stream: int) -> None:
        """Let work that is queued on `stream` from now on come after all that was done to the array."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until all that was done to the array is over: for a user who does not say on which stream he works.

        In a block of ours, the default stream counts as one that the block is used on.
        """
        raise NotImplementedError

    def to_host(self) -> NDArray[Any]:
        """A copy in ordinary memory; waits for it. BYTES never lie on a device."""
        raise NotImplementedError

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """As the array API's standard has it: None and 1 are the default stream, 2 the thread's, -1 waits for nothing."""
        raise NotImplementedError

    def __dlpack_device__(self) -> tuple[int, int]:
        raise NotImplementedError

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3. Its `stream` says what to wait for. It is not known who asks, so what the caller queues on the default stream,
        or on streams that wait for that one, is waited for; others use `__dlpack__`."""
        raise NotImplementedError
