"""The card's driver by ctypes alone: the answers must not depend on what they are to judge, so nothing of moonpool is
used here.

Whole numbers are passed as 64-bit words, so no function needs a table of its arguments. Names, numbers and structures
are those of the CUDA Driver API, https://docs.nvidia.com/cuda/cuda-driver-api/.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"
NOT_READY = "CUDA_ERROR_NOT_READY"
NOT_SUPPORTED = "CUDA_ERROR_NOT_SUPPORTED"
# CUmemAllocationHandleType
DESCRIPTOR, FABRIC = 1, 8
# CUmemAccess_flags
READ, READ_WRITE = 1, 3
# CUevent_flags: DISABLE_TIMING, INTERPROCESS; CUstream_flags: NON_BLOCKING
OF_PROCESSES, NON_BLOCKING = 0x6, 0x1

# A kernel of a known length, in a language that every driver compiles for its own card: no compiler is needed. The
# second one faults.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry spin(.param .u64 duration_ns)
{
    .reg .pred %again;
    .reg .b64 %duration, %began, %now, %passed;
    ld.param.u64 %duration, [duration_ns];
    mov.u64 %began, %globaltimer;
$loop:
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %began;
    setp.lt.u64 %again, %passed, %duration;
    @%again bra $loop;
    ret;
}

.visible .entry poke(.param .u64 address)
{
    .reg .b64 %address;
    .reg .b32 %value;
    ld.param.u64 %address, [address];
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
\0"""


class Refused(Exception):
    """An error of the driver. `name` is what NVIDIA calls it."""

    def __init__(self, call: str, number: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({number})")
        self.call = call
        self.name = name


class Absent(Refused):
    """The driver has no function of that name."""

    def __init__(self, call: str) -> None:
        super().__init__(call, 0, "not in this driver")


class Handle(ctypes.Structure):
    """64 bytes that stand for an event, or for memory: CUipcMemHandle, CUipcEventHandle, CUmemFabricHandle,
    CUmemPoolPtrExportData.
    """

    _fields_ = (("bytes", c_ubyte * 64),)


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", c_ubyte * 8),
    )


class PoolProperties(ctypes.Structure):
    """CUmemPoolProps."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("most_bytes", c_size_t),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 54),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


HERE = Location(1, 0)


def properties(handle_types: int) -> Properties:
    """Return the properties of memory on device 0 that can be exported as these types."""
    return Properties(1, handle_types, HERE)


class Box:
    """The call that each process of a cell is in. It stays readable when a process hangs in the driver, or dies
    there.
    """

    _SLOT_BYTES = 64
    BYTES = mmap.PAGESIZE

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, self.BYTES)
        self._slot = 0
        self._owner = ""

    def take(self, slot: int, owner: str) -> None:
        """Use a slot for this process from now on."""
        self._slot = slot % (self.BYTES // self._SLOT_BYTES)
        self._owner = owner

    def note(self, call: str) -> None:
        """Say that a call begins; "" if it has ended."""
        begin = self._slot * self._SLOT_BYTES
        text = f"{self._owner} in {call}" if call else ""
        self._memory[begin : begin + self._SLOT_BYTES] = text.encode()[:64].ljust(64, b"\0")

    def read(self) -> str:
        """Return the calls that have begun and not ended."""
        step = self._SLOT_BYTES
        found = (self._memory[at : at + step].rstrip(b"\0") for at in range(0, self.BYTES, step))
        return ", ".join(each.decode("utf-8", "replace") for each in found if each)


class Cuda:
    """The driver in this process. A call raises `Refused`, and leaves in `us` what it took."""

    def __init__(self, box: Box) -> None:
        self._box = box
        box.note(f"dlopen {LIBRARY}")
        self._library = ctypes.CDLL(LIBRARY)
        box.note("")
        self._functions: dict[str, Any] = {}
        self._module = c_void_p()
        self.us = 0.0

    def __call__(self, name: str, *arguments: Any) -> None:
        function = self._functions.get(name) or self._found(name)
        words = [c_uint64(each) if isinstance(each, int) else each for each in arguments]
        self._box.note(name)
        began = time.perf_counter_ns()
        number = function(*words)
        self.us = (time.perf_counter_ns() - began) / 1000
        self._box.note("")
        if number:
            raise Refused(name, number, self._name_of(number))

    def has(self, name: str) -> bool:
        """Return True if the library has a function of this name."""
        return hasattr(self._library, name)

    def _found(self, name: str) -> Any:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise Absent(name) from None
        function.restype = c_int
        self._functions[name] = function
        return function

    def _name_of(self, number: int) -> str:
        found = c_char_p()
        self._library.cuGetErrorName(c_int(number), byref(found))
        return (found.value or b"error %d" % number).decode()

    def start(self) -> dict[str, float]:
        """Make the primary context of device 0 and use it in this thread. Returns the µs of both steps."""
        self("cuInit", 0)
        times = {"cuInit": self.us}
        context = c_void_p()
        self("cuDevicePrimaryCtxRetain", byref(context), 0)
        times["cuDevicePrimaryCtxRetain"] = self.us
        self("cuCtxPushCurrent_v2", context)
        return times

    def attribute(self, number: int) -> int:
        """Return an attribute of device 0."""
        found = c_int()
        self("cuDeviceGetAttribute", byref(found), number, 0)
        return found.value

    def stream(self) -> c_void_p:
        """Make a stream that waits for no other one."""
        found = c_void_p()
        self("cuStreamCreate", byref(found), NON_BLOCKING)
        return found

    def event(self) -> c_void_p:
        """Make an event that other processes can open."""
        found = c_void_p()
        self("cuEventCreate", byref(found), OF_PROCESSES)
        return found

    def free_bytes(self) -> int:
        """Return the bytes of device memory that nobody has."""
        free, total = c_size_t(), c_size_t()
        self("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def granularity(self, handle_types: int, *, recommended: bool = False) -> int:
        """Return the number of which sizes of memory must be multiples."""
        found = c_size_t()
        wanted = byref(properties(handle_types))
        self("cuMemGetAllocationGranularity", byref(found), wanted, int(recommended))
        return found.value

    def fill(self, address: int, value: int, size_bytes: int, stream: c_void_p) -> None:
        """Queue a write of these bytes."""
        self("cuMemsetD8Async", address, value, size_bytes, stream)

    def first_byte(self, address: int, stream: c_void_p) -> int:
        """Return the byte at an address, after all that the stream has to do."""
        found = (c_ubyte * 64)()
        self("cuMemcpyDtoHAsync_v2", found, address, 64, stream)
        self("cuStreamSynchronize", stream)
        return found[0]

    def is_ready(self, call: str, thing: c_void_p) -> bool:
        """Return what `cuEventQuery` or `cuStreamQuery` says."""
        try:
            self(call, thing)
        except Refused as refused:
            if refused.name != NOT_READY:
                raise
            return False
        return True

    def launch(self, kernel: bytes, argument: int, stream: c_void_p) -> None:
        """Queue one of the kernels above, with one thread."""
        if self._module.value is None:
            self("cuModuleLoadData", byref(self._module), c_char_p(PTX))
        function = c_void_p()
        self("cuModuleGetFunction", byref(function), self._module, c_char_p(kernel))
        word = c_uint64(argument)
        words = (c_void_p * 1)(ctypes.addressof(word))
        self("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, words, c_void_p())

    def spin(self, duration_s: float, stream: c_void_p) -> None:
        """Keep a stream busy with a kernel for so long."""
        self.launch(b"spin", round(duration_s * 1e9), stream)
