"""Attempts on memory."""

import ctypes
import mmap
import os
import sys

from tries_kernel import LIBC, call


def allocate(count_bytes):
    """Allocate memory and touch it."""
    taken = bytearray(count_bytes)
    taken[:: mmap.PAGESIZE] = b"x" * len(taken[:: mmap.PAGESIZE])
    return len(taken)


def allocate_in_pieces(count_bytes):
    """Allocate until no memory is left, or so much was allocated."""
    pieces = []
    while len(pieces) << 24 < count_bytes:
        pieces.append(bytearray(os.urandom(1)) * (1 << 24))
    return len(pieces) << 24


def map_shared(count_bytes):
    """Map anonymous shared memory, which no limit on data counts."""
    with mmap.mmap(-1, count_bytes) as pages:
        for at in range(0, count_bytes, mmap.PAGESIZE):
            pages[at] = 1
        return len(pages)


def memory_file(count_bytes):
    fd = os.memfd_create("hidden")
    try:
        os.posix_fallocate(fd, 0, count_bytes)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def system_v(count_bytes):
    """Make shared memory that stays when its processes are gone."""
    identifier = call("shmget", 0, count_bytes, 0o1600)
    LIBC.shmctl(identifier, 0, None)
    return identifier


def lock_all():
    """Lock all memory: MCL_CURRENT | MCL_FUTURE."""
    if LIBC.mlockall(3) != 0:
        raise OSError(ctypes.get_errno(), "mlockall")
    LIBC.munlockall()


def timers(count):
    """Make so many timers; returns how many were made."""
    timers = [ctypes.c_int() for _ in range(count)]
    made = 0
    try:
        for timer in timers:
            call("timer_create", 1, None, ctypes.byref(timer))
            made += 1
    except BlockingIOError:
        pass
    for timer in timers[:made]:
        call("timer_delete", timer.value)
    return made


def stack_overflow():
    """Recurse in C, where no interpreter counts."""
    array = (ctypes.c_int * 2)(1, 0)
    sys.setrecursionlimit(10**8)
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    again = compare(lambda a, b: LIBC.qsort(array, 2, 4, again) or 0)
    LIBC.qsort(array, 2, 4, again)
