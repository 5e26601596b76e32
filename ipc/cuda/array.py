"""Arrays in device memory, as callers and models hold them, and as they pass them in."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from moonpool.ipc import dlpack
from moonpool.ipc.cuda import driver as api
from moonpool.ipc.cuda.device import Device, device, device_of
from moonpool.ipc.cuda.lane import order
from moonpool.ipc.cuda.region import DeviceLease
from moonpool.ipc.errors import BadTensor, CudaError, OutOfMemory
from moonpool.ipc.tensors import BF16, DTYPES, NAMES, check_shape, code_of, size_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import CapsuleType

_ON_DEVICE = (dlpack.CUDA, dlpack.CUDA_MANAGED)
# For the package of an array: a function that returns its current stream on a device, and the attribute with the
# handle.
_CURRENT: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "torch": (lambda torch, ordinal: torch.cuda.current_stream(ordinal), "cuda_stream"),
    "cupy": (lambda cupy, ordinal: cupy.cuda.get_current_stream(ordinal), "ptr"),
}


class DeviceArray:
    """A C-contiguous array on a device. cupy, torch and others take it without a copy, by `__dlpack__` or
    `__cuda_array_interface__`, in the order of their own streams.

    Its memory stays valid as long as the array, or anything made of it, lives. A stream on which a library took it must
    live until the library drops it. Thread-safe as long as two threads do not change the bytes.
    """

    __slots__ = (
        "__weakref__", "address", "datatype", "device", "is_read_only", "lease", "owner", "shape", "stream",
    )  # fmt: skip

    def __init__(
        self,
        device: Device,
        address: int,
        datatype: int,
        shape: tuple[int, ...],
        *,
        lease: DeviceLease | None = None,
        owner: object = None,
        stream: int = 0,
        is_read_only: bool = False,
    ) -> None:
        """Called by `over` and `of` only."""
        self.device = device
        self.address = address
        # The datatype's code in `ipc.tensors`, and sizes in elements.
        self.datatype = datatype
        self.shape = shape
        # The block of ours that it lies in; None for foreign memory, which `owner` keeps alive.
        self.lease = lease
        self.owner = owner
        # The stream on which the owner of foreign memory works; 0 if there is nothing to wait for.
        self.stream = stream
        self.is_read_only = is_read_only

    @classmethod
    def over(cls, lease: DeviceLease, offset: int, datatype: int, shape: tuple[int, ...]) -> DeviceArray:
        """Return an array in a block of ours, which the caller has checked."""
        return cls(lease.mapping.device, lease.address + offset, datatype, shape, lease=lease)

    @classmethod
    def of(cls, source: object, stream: int | None = None) -> DeviceArray | None:
        """Return an array over an object's device memory, without a copy; None if the object has none.

        `source` is a `DeviceArray`, has `__dlpack__` or `__cuda_array_interface__`, or is a capsule of DLPack. `stream`
        is the stream of ours that will touch the array, for sources that ask for it. In any case, call `enter` before
        that work, and `leave` after it. Raises `BadTensor` for memory that is not C-contiguous or has no datatype of
        ours, `CudaUnavailable`, and all that the source raises.
        """
        if isinstance(source, DeviceArray):
            return source
        if hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__"):
            kind, ordinal = source.__dlpack_device__()
            if int(kind) not in _ON_DEVICE:
                return None
            # PyTorch exports memory of its current device only, and that is the device of the current context.
            with device(int(ordinal)):
                capsule = dlpack.capsule_of(source, stream)
            return _of_capsule(capsule, source)
        interface = getattr(source, "__cuda_array_interface__", None)
        if interface is not None:
            return _of_interface(interface, source)
        return _of_capsule(source, source)

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return size_bytes(self.datatype, self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The datatype as numpy's dtype."""
        return DTYPES[self.datatype]

    @property
    def is_cpu(self) -> bool:
        """Always False. An array in ordinary memory is numpy's."""
        return False

    def part(self, offset: int, shape: tuple[int, ...]) -> DeviceArray:
        """Return an array of another shape over this memory, from `offset` bytes on. The caller has checked that it
        fits.
        """
        return DeviceArray(
            self.device,
            self.address + offset,
            self.datatype,
            shape,
            lease=self.lease,
            owner=self.owner,
            stream=self.stream,
            is_read_only=self.is_read_only,
        )

    def reshape(self, shape: tuple[int, ...]) -> DeviceArray:
        """Return an array of another shape over the same memory. The caller has checked that it is as large."""
        return self.part(0, shape)

    def enter(self, stream: int) -> None:
        """Let work that is queued on `stream` from now on run after all earlier work on the array."""
        if self.lease is not None:
            self.lease.use(stream)
        elif self.stream:
            self.device.order(self.stream, stream)

    def leave(self, stream: int) -> None:
        """Let later work on all streams that use the array run after the work queued on `stream` until now."""
        if self.lease is not None:
            for other in self.lease.streams:
                order(self.device, stream, other)
        elif self.stream:
            order(self.device, stream, self.stream)

    def to_host(self, into: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return a copy in ordinary memory, after all earlier work on the array. Waits for it.

        `into` is a contiguous array of the same shape and datatype, which is filled and returned.
        """
        array = np.empty(self.shape, DTYPES[self.datatype]) if into is None else into
        self._reach()
        with self.device.borrowed_stream() as stream:
            self._wait_on(stream)
            self.device.read(array, self.address, stream)
        return array

    def settle(self) -> None:
        """Wait until all earlier work on the array is done. For users whose stream is not known.

        In a block of ours, the default stream then counts as a user.
        """
        self._reach()
        with self.device.borrowed_stream() as stream:
            self._wait_on(stream)
            self.device.finish(stream)
        if self.lease is not None:
            self.lease.note(api.LEGACY_STREAM)

    def _reach(self) -> None:
        """Wait for another process's work on the array. Raises `CudaError` if that process died before it was done."""
        if self.lease is not None and self.lease.lane is not None:
            self.lease.lane.reach()

    def _wait_on(self, stream: int) -> None:
        """Order work as `enter` does, for a stream whose work the caller waits for."""
        if self.lease is not None:
            self.lease.wait_on(stream)
        elif self.stream:
            self.device.order(self.stream, stream)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """Export the array as the array API's standard says: None and 1 are the default stream, 2 the thread's, -1
        waits for nothing.
        """
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"The array is on device {self.device.ordinal} and not on {dl_device}.")
        if copy:
            raise BufferError("The array is handed out as it is; copy what you get.")
        if stream == 0:
            raise BufferError("Stream 0 may be the default one or the thread's: say 1 or 2.")
        return dlpack.make(
            self if self.lease is None else _Use(self, self.lease, stream),
            self.address,
            self.__dlpack_device__(),
            self.datatype,
            self.shape,
            max_version,
            is_read_only=self.is_read_only,
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CUDA, self.device.ordinal)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The interface in its version 3.

        The interface does not say which stream will use the array. So it names the default stream, which waits for all
        earlier work on the array. Later users wait for work on the default stream, and so for all streams that are
        ordered with it. A library that uses a non-blocking stream has to take the array with `__dlpack__`.
        """
        if self.datatype == BF16:
            raise AttributeError("BF16 has no name in __cuda_array_interface__; use __dlpack__")
        self.enter(api.LEGACY_STREAM)
        return {
            "shape": self.shape,
            "typestr": DTYPES[self.datatype].str,
            "data": (self.address, self.is_read_only),
            "strides": None,
            "version": 3,
            "stream": api.LEGACY_STREAM,
        }

    def __repr__(self) -> str:
        return f"<DeviceArray {NAMES[self.datatype]} {list(self.shape)} on device {self.device.ordinal}>"


class _Use:
    """An object that the consumer of a capsule keeps until it is done with an array in a block of ours.

    The work on its stream until then runs before the next work on the block. A consumer that waits for nothing (-1)
    still uses some stream, and the default one is assumed.
    """

    __slots__ = ("_array", "_lease", "_stream", "_user")

    def __init__(self, array: DeviceArray, lease: DeviceLease, stream: int | None) -> None:
        self._array, self._lease, self._user = array, lease, object()
        self._stream: object = None
        if stream == -1:
            lease.note(api.LEGACY_STREAM, self._user)
            return
        number = stream or api.LEGACY_STREAM
        # A cupy that cannot use the device has no streams.
        with suppress(RuntimeError):
            current, kept = _current_stream("cupy", array.device)
            self._stream = kept if current == number else None
        lease.use(number, self._user)

    def __del__(self) -> None:
        # A device that has failed does nothing more.
        with suppress(CudaError, OutOfMemory):
            self._lease.done(self._user)


def _of_capsule(capsule: object, source: object) -> DeviceArray | None:
    foreign = dlpack.look(capsule)
    if foreign is None:
        return None
    if foreign.major > dlpack.MAJOR:
        raise BadTensor(f"a capsule of DLPack {foreign.major} cannot be read")
    if foreign.device_type not in _ON_DEVICE:
        return None
    datatype = foreign.datatype
    if datatype is None:
        raise BadTensor(
            f"an array of DLPack's type {foreign.code} with {foreign.bits} bits and {foreign.lanes} lanes "
            "is of no datatype"
        )
    check_shape(foreign.shape)
    if not foreign.is_contiguous:
        raise BadTensor(_NOT_CONTIGUOUS)
    foreign.take()
    here = device(foreign.device_id)
    stream, kept = _current_stream(_package(source), here)
    return DeviceArray(
        here,
        foreign.address,
        datatype,
        foreign.shape,
        owner=(foreign, kept),
        stream=stream,
        is_read_only=foreign.is_read_only,
    )


_NOT_CONTIGUOUS = "the array is not contiguous in C order; copy it first (torch: contiguous(), cupy: ascontiguousarray)"


def _of_interface(interface: dict[str, Any], source: object) -> DeviceArray | None:
    shape = tuple(int(size) for size in interface["shape"])
    check_shape(shape)
    dtype = np.dtype(interface["typestr"])
    datatype = code_of(dtype)
    _check_strides(interface.get("strides"), shape, dtype.itemsize)
    if interface.get("mask") is not None:
        raise BadTensor("an array with a mask is not a tensor")
    address, is_read_only = interface["data"]
    size = size_bytes(datatype, shape)
    here = device_of(int(address)) if size else device(0)
    if here is None:
        return None
    # Before version 3 the interface named no stream, and all libraries used the default one.
    stream, kept = _current_stream(_package(source), here)
    named = interface.get("stream")
    return DeviceArray(
        here,
        int(address),
        datatype,
        shape,
        owner=(source, kept),
        stream=stream if named is None else int(named),
        is_read_only=bool(is_read_only),
    )


def _check_strides(strides: Any, shape: tuple[int, ...], itemsize: int) -> None:
    if strides is None or 0 in shape:
        return
    expected = itemsize
    for size, stride in zip(reversed(shape), reversed(tuple(strides))):
        if size != 1 and stride != expected:
            raise BadTensor(_NOT_CONTIGUOUS)
        expected *= size


def _current_stream(package: str, where: Device) -> tuple[int, object]:
    """Return a library's current stream, and its object, which must be kept: cupy destroys the stream with it.

    Returns the default stream if the library does not tell.
    """
    module = sys.modules.get(package)
    if package not in _CURRENT or module is None:
        return api.LEGACY_STREAM, None
    ask, handle = _CURRENT[package]
    stream = ask(module, where.ordinal)
    return int(getattr(stream, handle)) or api.LEGACY_STREAM, stream


def _package(source: object) -> str:
    return type(source).__module__.partition(".")[0]
