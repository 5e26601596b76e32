"""Arrays in device memory: what callers and models hold, and what they pass in."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from moonpool.ipc import dlpack
from moonpool.ipc.cuda import driver as api
from moonpool.ipc.cuda.device import device, device_of
from moonpool.ipc.cuda.lane import order
from moonpool.ipc.errors import BadTensor, CudaError, OutOfMemory
from moonpool.ipc.tensors import BF16, DTYPES, NAMES, check_shape, code_of, size_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import CapsuleType

    from moonpool.ipc.cuda.device import Device
    from moonpool.ipc.cuda.region import DeviceLease

_ON_DEVICE = (dlpack.CUDA, dlpack.CUDA_MANAGED)
# By the package that an array comes from: the stream that its work goes on for a device, and its handle.
_CURRENT: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "torch": (lambda torch, ordinal: torch.cuda.current_stream(ordinal), "cuda_stream"),
    "cupy": (lambda cupy, ordinal: cupy.cuda.get_current_stream(ordinal), "ptr"),
}


class DeviceArray:
    """A C-contiguous array on a device. cupy, torch and others take it without a copy, by `__dlpack__` or
    `__cuda_array_interface__`, in the order of their own streams.

    Its memory stays valid as long as it or anything made of it lives. A stream that it was handed out on must live until
    whoever took it there lets go. Thread-safe as far as the bytes are not changed by two threads.
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
        """For `over` and `of` alone."""
        self.device = device
        self.address = address
        # The code in `ipc.tensors`, and sizes in elements.
        self.datatype = datatype
        self.shape = shape
        # The block of ours that it lies in; None for memory of somebody else, which `owner` keeps.
        self.lease = lease
        self.owner = owner
        # Of foreign memory: the stream that its owner works on; 0 where there is nothing to wait for.
        self.stream = stream
        self.is_read_only = is_read_only

    @classmethod
    def over(
        cls, lease: DeviceLease, offset: int, datatype: int, shape: tuple[int, ...]
    ) -> DeviceArray:
        """An array in a block of ours, which the caller has checked."""
        return cls(lease.mapping.device, lease.address + offset, datatype, shape, lease=lease)

    @classmethod
    def of(cls, source: object, stream: int | None = None) -> DeviceArray | None:
        """What an object says of its device memory, without a copy; None for one that has none.

        `source` is a `DeviceArray`, has `__dlpack__` or `__cuda_array_interface__`, or is a capsule of DLPack.
        `stream` is one of ours on which the array will be touched, for sources that want to know it; all the same call
        `enter` before that is done, and `leave` afterwards. Raises `BadTensor` for what is not C-contiguous or has no datatype of ours,
        `CudaUnavailable`, and whatever the source raises.
        """
        if isinstance(source, DeviceArray):
            return source
        if hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__"):
            kind, ordinal = source.__dlpack_device__()
            if int(kind) not in _ON_DEVICE:
                return None
            # PyTorch hands out what lies on its current device alone, which is the one whose context is.
            with device(int(ordinal)):
                capsule = dlpack.capsule_of(source, stream)
            return _of_capsule(capsule, source)
        interface = getattr(source, "__cuda_array_interface__", None)
        if interface is not None:
            return _of_interface(interface, source)
        return _of_capsule(source, source)

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return size_bytes(self.datatype, self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """As numpy calls it."""
        return DTYPES[self.datatype]

    @property
    def is_cpu(self) -> bool:
        """False: an array in ordinary memory is numpy's."""
        return False

    def part(self, offset: int, shape: tuple[int, ...]) -> DeviceArray:
        """The same memory from `offset` on, in bytes, in another shape; the caller has checked that it lies in this one."""
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
        """The same memory in another shape; the caller has checked that it is as large."""
        return self.part(0, shape)

    def enter(self, stream: int) -> None:
        """Let work that is queued on `stream` from now on come after all that was done to the array."""
        if self.lease is not None:
            self.lease.use(stream)
        elif self.stream:
            self.device.order(self.stream, stream)

    def leave(self, stream: int) -> None:
        """Let what others queue from now on, on the streams that they had the array on, come after what is queued on `stream`."""
        if self.lease is not None:
            for other in self.lease.streams:
                order(self.device, stream, other)
        elif self.stream:
            order(self.device, stream, self.stream)

    def to_host(self, into: NDArray[Any] | None = None) -> NDArray[Any]:
        """A copy in ordinary memory; waits for it, and for all that was done to the array before.

        `into` is an array of the same shape and datatype, without gaps, to be filled and returned.
        """
        array = np.empty(self.shape, DTYPES[self.datatype]) if into is None else into
        self._reach()
        with self.device.borrowed_stream() as stream:
            self._wait_on(stream)
            self.device.read(array, self.address, stream)
        return array

    def settle(self) -> None:
        """Wait until all that was done to the array is over: for a user who does not say on which stream he works.

        In a block of ours, the default stream counts as one that the block is used on.
        """
        self._reach()
        with self.device.borrowed_stream() as stream:
            self._wait_on(stream)
            self.device.finish(stream)
        if self.lease is not None:
            self.lease.note(api.LEGACY_STREAM)

    def _reach(self) -> None:
        """Wait for what another process does to the array. Raises `CudaError` where that died before it was done."""
        if self.lease is not None and self.lease.lane is not None:
            self.lease.lane.reach()

    def _wait_on(self, stream: int) -> None:
        """As `enter`, for a stream that is done with the array before anybody else goes on."""
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
        """As the array API's standard has it: None and 1 are the default stream, 2 the thread's, -1 waits for nothing."""
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(
                f"The array is on device {self.device.ordinal} and not on {dl_device}."
            )
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
        """Version 3.

        It is not known who asks. He is told to wait for the default stream, which waits for what was done to the array; and what he
        queues there, or on streams that wait for it as those that are not non-blocking do, is waited for. For others there is
        `__dlpack__`.
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
    """What a reader of an array in a block of ours keeps until he is done with it.

    What he queued on his stream by then comes before whatever is done to the block next. Who waits for nothing (-1) works on some
    stream all the same: the default one is assumed.
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
        raise BadTensor("an array with a mask is no tensor")
    address, is_read_only = interface["data"]
    size = size_bytes(datatype, shape)
    here = device_of(int(address)) if size else device(0)
    if here is None:
        return None
    # Before version 3 nobody said, and everybody used the default one.
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
    """The stream that a library works on now, and what is to be kept as long as that is named: cupy's go with their objects.

    The default one where the library does not say.
    """
    module = sys.modules.get(package)
    if package not in _CURRENT or module is None:
        return api.LEGACY_STREAM, None
    ask, handle = _CURRENT[package]
    stream = ask(module, where.ordinal)
    return int(getattr(stream, handle)) or api.LEGACY_STREAM, stream


def _package(source: object) -> str:
    return type(source).__module__.partition(".")[0]
