"""Attempts of a model that has a GPU, on what it was not given of it. They use the driver directly."""

import ctypes
import errno
import os
import signal

from tries_kernel import LIBC

DESCRIPTOR = 1


class Refused(OSError):
    """An error of the driver."""


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


_library = None


def cuda(name, *arguments):
    """Call the driver; whole numbers are passed as 64 bits."""
    global _library
    if _library is None:
        _library = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        cuda("cuInit", 0)
        cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        cuda("cuCtxPushCurrent_v2", context)
    words = [ctypes.c_uint64(each) if isinstance(each, int) else each for each in arguments]
    number = getattr(_library, name)(*words)
    if number:
        text = ctypes.c_char_p()
        _library.cuGetErrorName(number, ctypes.byref(text))
        raise Refused(errno.EACCES, f"{name}: {(text.value or b'').decode()} ({number})")


def open_node(path):
    """Open a device node for reading and writing."""
    os.close(os.open(path, os.O_RDWR))
    return path


def list_folder(path):
    return sorted(os.listdir(path))


def steal_region(pid, fd, size):
    """Take the descriptor of a region from the runtime, and read the region's first byte."""
    pidfd = LIBC.syscall(434, pid, 0)
    taken = LIBC.syscall(438, pidfd, fd, 0) if pidfd >= 0 else -1
    if taken < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    allocation, address = ctypes.c_uint64(), ctypes.c_uint64()
    cuda(
        "cuMemImportFromShareableHandle",
        ctypes.byref(allocation), ctypes.c_void_p(taken), DESCRIPTOR,
    )  # fmt: skip
    cuda("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
    cuda("cuMemMap", address, size, 0, allocation, 0)
    cuda("cuMemSetAccess", address, size, ctypes.byref(Access(Location(1, 0), 3)), 1)
    return read(address.value)


def read(address):
    found = (ctypes.c_ubyte * 64)()
    cuda("cuMemcpyDtoHAsync_v2", found, address, 64, 1)
    cuda("cuStreamSynchronize", 1)
    return found[0]


def open_event(handle):
    """Open an event by its 64 bytes, as if they had been guessed."""
    event = ctypes.c_void_p()
    given = Handle.from_buffer_copy(bytes.fromhex(handle))
    cuda("cuIpcOpenEventHandle", ctypes.byref(event), given)
    return "opened"


def open_memory(handle):
    """Open memory of the older kind by its 64 bytes, as if they had been guessed."""
    address = ctypes.c_uint64()
    given = Handle.from_buffer_copy(bytes.fromhex(handle))
    cuda("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, 1)
    return read(address.value)


def fill(piece):
    """Allocate device memory until there is none; return the bytes."""
    taken = 0
    while piece >= 1 << 20:
        address = ctypes.c_uint64()
        try:
            cuda("cuMemAlloc_v2", ctypes.byref(address), piece)
            taken += piece
        except Refused:
            piece //= 2
    return taken


def spin(ptx, seconds, dies=False):
    """Run a kernel of this length, and wait for it or be killed in it."""
    launch(ptx, b"spin", round(seconds * 1e9))
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    cuda("cuStreamSynchronize", 1)
    return seconds


def fault(ptx):
    """Run a kernel that writes where nothing is."""
    launch(ptx, b"poke", 4096)
    cuda("cuStreamSynchronize", 1)
    return read_own()


def read_own():
    address = ctypes.c_uint64()
    cuda("cuMemAlloc_v2", ctypes.byref(address), 64)
    return read(address.value)


def launch(ptx, kernel, argument):
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    cuda("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(ptx.encode() + b"\0"))
    cuda("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(kernel))
    word = ctypes.c_uint64(argument)
    words = (ctypes.c_void_p * 1)(ctypes.addressof(word))
    cuda("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 1, words, ctypes.c_void_p())
