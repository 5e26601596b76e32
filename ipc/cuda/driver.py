"""The functions of NVIDIA's driver that we use, by the names in its header, with errors in words.

It uses the driver and no toolkit. `libcuda.so.1` comes with every driver, so nothing has to be installed, and
this module works in the interpreter of any model. Names and meanings: CUDA Driver API,
https://docs.nvidia.com/cuda/cuda-driver-api/.

Every function raises `OutOfMemory` if the device has no memory left, and `CudaError` for every other refusal. Any
thread may call them, and other threads of the interpreter run meanwhile. If NVIDIA's text asks for a current context,
call the function inside `with device`.

Theory of operation. `_lock` makes sure that the library is loaded and initialized once. The process in which that
happened is kept beside it, because the driver cannot be used in a fork of that process: there, `load` raises an error.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ushort, c_void_p
from typing import Any

from moonpool.ipc.errors import CudaError, CudaUnavailable, OutOfMemory

LIBRARY = "libcuda.so.1"
# The oldest driver, by the version of CUDA that it reports, and in words.
_OLDEST, _NEEDED = 12_000, "moonpool needs NVIDIA's driver 525 or later, which is of CUDA 12.0"
HANDLE_BYTES = 64

# CUresult
INVALID_VALUE, OUT_OF_MEMORY, NOT_READY = 1, 2, 600
# The default stream, which has no object.
LEGACY_STREAM = 1
# CUdevice_attribute
HAS_VIRTUAL_MEMORY, HAS_DESCRIPTORS = 102, 103
# CUpointer_attribute
POINTER_KIND, POINTER_DEVICE = 2, 9
# CUmemorytype
DEVICE_MEMORY = 2
# CUmemAllocationGranularity_flags, CUmemHostRegister flags, CUmemAccess_flags, CUipcMem_flags
MINIMUM = 0
PORTABLE = 1
READ_WRITE = 3
LAZY_PEER_ACCESS = 1
# CUmemAllocationHandleType, CUmemAllocationType, CUmemLocationType
DESCRIPTOR = 1
_PINNED, _ON_DEVICE = 1, 1
# CUstream_flags, CUevent_flags
NON_BLOCKING = 0x1
BLOCKING_SYNC, DISABLE_TIMING, INTERPROCESS = 0x1, 0x2, 0x4

_HANDLE = c_ubyte * HANDLE_BYTES
_ALLOCATION = ctypes.c_ulonglong
_ADDRESS = ctypes.c_ulonglong


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle."""

    _fields_ = (("reserved", _HANDLE),)


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(ctypes.Structure):
    """The last part of CUmemAllocationProp."""

    _fields_ = (("compression", c_ubyte), ("gpu_direct_rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", AllocationFlags),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


def device_properties(ordinal: int) -> AllocationProperties:
    """Return the properties of memory on that device that can be shared by descriptor."""
    location = Location(_ON_DEVICE, ordinal)
    return AllocationProperties(type=_PINNED, handle_types=DESCRIPTOR, location=location)


def device_access(ordinal: int) -> Access:
    """Return the access for reading and writing from that device."""
    return Access(Location(_ON_DEVICE, ordinal), READ_WRITE)


_POINTER_OUT = POINTER(c_void_p)
_ADDRESS_OUT = POINTER(_ADDRESS)
_INT_OUT = POINTER(c_int)
_SIZE_OUT = POINTER(c_size_t)
# Each function with its arguments. A suffix such as `_v2` is part of the name in the library; the header's macros add
# it.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (_INT_OUT,),
    "cuDeviceGetCount": (_INT_OUT,),
    "cuDeviceGet": (_INT_OUT, c_int),
    "cuDeviceGetName": (POINTER(c_char), c_int, c_int),
    "cuDeviceGetAttribute": (_INT_OUT, c_int, c_int),
    "cuDeviceTotalMem_v2": (_SIZE_OUT, c_int),
    "cuDeviceGetPCIBusId": (POINTER(c_char), c_int, c_int),
    "cuDeviceGetUuid_v2": (POINTER(c_ubyte), c_int),
    "cuDevicePrimaryCtxRetain": (_POINTER_OUT, c_int),
    "cuDevicePrimaryCtxGetState": (c_int, POINTER(c_uint), _INT_OUT),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (_POINTER_OUT,),
    "cuStreamCreate": (_POINTER_OUT, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuEventCreate": (_POINTER_OUT, c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuIpcGetEventHandle": (POINTER(IpcHandle), c_void_p),
    "cuIpcOpenEventHandle": (_POINTER_OUT, IpcHandle),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), _ADDRESS),
    "cuIpcOpenMemHandle_v2": (_ADDRESS_OUT, IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuMemGetInfo_v2": (_SIZE_OUT, _SIZE_OUT),
    "cuMemAlloc_v2": (_ADDRESS_OUT, c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemGetAllocationGranularity": (_SIZE_OUT, POINTER(AllocationProperties), c_int),
    "cuMemCreate": (POINTER(_ALLOCATION), c_size_t, POINTER(AllocationProperties), ctypes.c_ulonglong),
    "cuMemRelease": (_ALLOCATION,),
    "cuMemExportToShareableHandle": (c_void_p, _ALLOCATION, c_int, ctypes.c_ulonglong),
    "cuMemImportFromShareableHandle": (POINTER(_ALLOCATION), c_void_p, c_int),
    "cuMemGetAllocationPropertiesFromHandle": (POINTER(AllocationProperties), _ALLOCATION),
    "cuMemAddressReserve": (_ADDRESS_OUT, c_size_t, c_size_t, _ADDRESS, ctypes.c_ulonglong),
    "cuMemAddressFree": (_ADDRESS, c_size_t),
    "cuMemMap": (_ADDRESS, c_size_t, c_size_t, _ALLOCATION, ctypes.c_ulonglong),
    "cuMemUnmap": (_ADDRESS, c_size_t),
    "cuMemSetAccess": (_ADDRESS, c_size_t, POINTER(Access), c_size_t),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _ADDRESS, c_size_t, c_void_p),
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, c_size_t, c_void_p),
    "cuMemsetD8Async": (_ADDRESS, c_ubyte, c_size_t, c_void_p),
    "cuPointerGetAttribute": (c_void_p, c_int, _ADDRESS),
}


class Driver:
    """The library. Each function of the table above is an attribute, and raises if it fails."""

    def __init__(self, library: Any) -> None:
        self._names = library.cuGetErrorName
        self._texts = library.cuGetErrorString
        for function in (self._names, self._texts):
            function.argtypes, function.restype = (c_int, POINTER(c_char_p)), c_int
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
            function.errcheck = self._check
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not in the table of the driver's functions")

    def _check(self, result: int, function: Any, _: object) -> int:
        if result:
            self._refuse(result, function.__name__)
        return result

    def _refuse(self, number: int, function: str) -> None:
        name, text = self._word(self._names, number), self._word(self._texts, number)
        words = f"{function}: {text} ({name}, {number})"
        if number == OUT_OF_MEMORY:
            raise OutOfMemory(f"the device is out of memory; {words}")
        raise CudaError(words, name, number)

    @staticmethod
    def _word(function: Any, number: int) -> str:
        found = c_char_p()
        function(number, ctypes.byref(found))
        return (found.value or b"unknown").decode()


_lock = threading.Lock()
# The library, and the process in which it was loaded.
_loaded: tuple[Driver, int] | None = None


def load() -> Driver:
    """Return the initialized driver, the same at each call.

    Raises `CudaUnavailable`, which says why and what to do, if there is no driver on this machine, no device in this
    container, or if this process was forked from one that had used the driver.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load(), os.getpid()
        driver, pid = _loaded
    if pid != os.getpid():
        raise CudaUnavailable(
            "the driver of the GPU was used before this process was forked, and cannot be used in a fork"
        )
    return driver


def _load() -> Driver:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise CudaUnavailable(
            f"there is no driver of NVIDIA here ({error}), and {_NEEDED}; install it, start the container with its "
            "GPUs (docker run --gpus all), or let the model run with KIND_CPU"
        ) from error
    version = _version(library)
    try:
        driver = Driver(library)
    except AttributeError as error:
        raise _too_old(f"is {_of(version)} and lacks a function ({error})") from error
    if version < _OLDEST:
        raise _too_old(f"is {_of(version)}")
    try:
        driver.cuInit(0)
    except (CudaError, OutOfMemory) as error:
        raise CudaUnavailable(
            f"no GPU can be used: {error}; the driver is {_of(version)}; look whether nvidia-smi lists a GPU here and "
            "whether CUDA_VISIBLE_DEVICES leaves it visible"
        ) from error
    return driver


def _version(library: Any) -> int:
    """Return the version of CUDA that a driver reports, such as 12040 for 12.4; 0 if it reports none."""
    version = c_int()
    try:
        library.cuDriverGetVersion(ctypes.byref(version))
    except AttributeError:
        return 0
    return version.value


def _of(version: int) -> str:
    return f"of CUDA {version // 1000}.{version % 1000 // 10}" if version else "of no version"


def _too_old(found: str) -> CudaUnavailable:
    return CudaUnavailable(
        f"NVIDIA's driver here is too old: it {found}, and {_NEEDED}; update it, or let the model run with KIND_CPU"
    )
