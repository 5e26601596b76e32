"""Ways to share device memory: what its maker does, and what the process does that opens it.

Each step leaves the microseconds of its call in `times`. A process that opens memory may close it and open it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_uint64, c_void_p

from tests.card import cuda
from tests.card.cuda import Access, Cuda, Handle, PoolProperties

Times = dict[str, list[float]]


class Memory:
    """Device memory in this process, of this size. Not open or made before `make` or `open`."""

    # True if it can be opened for reading only.
    has_access = True

    def __init__(self, driver: Cuda, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.address = 0
        self.times: Times = {}
        self._driver = driver

    def _call(self, step: str, name: str, *arguments: object) -> None:
        self._driver(name, *arguments)
        self.times.setdefault(step, []).append(self._driver.us)

    def make(self) -> None:
        """Allocate and map the memory. Raises `Refused`, as all of these."""
        raise NotImplementedError

    def export(self) -> tuple[bytes, list[int]]:
        """Return bytes and descriptors to send."""
        raise NotImplementedError

    def open(self, data: bytes, fds: Sequence[int], flags: int) -> None:
        """Map the memory that another process has sent."""
        raise NotImplementedError

    def close(self) -> None:
        """Undo `open`, or `make`."""
        raise NotImplementedError


class Virtual(Memory):
    """Memory of `cuMemCreate`, by descriptor."""

    handle_type = cuda.DESCRIPTOR

    def __init__(self, driver: Cuda, size_bytes: int) -> None:
        super().__init__(driver, size_bytes)
        self._allocation = c_uint64()

    def make(self) -> None:
        wanted = cuda.properties(self.handle_type)
        self._call("create", "cuMemCreate", byref(self._allocation), self.size_bytes, byref(wanted), 0)
        self._map(cuda.READ_WRITE)

    def export(self) -> tuple[bytes, list[int]]:
        fd = c_int()
        self._call("export", "cuMemExportToShareableHandle", byref(fd), self._allocation, self.handle_type, 0)
        return b"", [fd.value]

    def open(self, data: bytes, fds: Sequence[int], flags: int) -> None:
        del data
        self._import(c_void_p(fds[0]), flags)

    def _import(self, handle: object, flags: int) -> None:
        self._call("import", "cuMemImportFromShareableHandle", byref(self._allocation), handle, self.handle_type)
        self._map(flags)

    def _map(self, flags: int) -> None:
        address, size_bytes = c_uint64(), self.size_bytes
        self._call("reserve", "cuMemAddressReserve", byref(address), size_bytes, 0, 0, 0)
        self._call("map", "cuMemMap", address, size_bytes, 0, self._allocation, 0)
        access = Access(cuda.HERE, flags)
        self._call("set access", "cuMemSetAccess", address, size_bytes, byref(access), 1)
        self.address = address.value

    def close(self) -> None:
        self._call("unmap", "cuMemUnmap", self.address, self.size_bytes)
        self._call("free address", "cuMemAddressFree", self.address, self.size_bytes)
        self._call("release", "cuMemRelease", self._allocation)


class Fabric(Virtual):
    """Memory of `cuMemCreate`, by a handle that the fabric manager knows."""

    handle_type = cuda.FABRIC

    def export(self) -> tuple[bytes, list[int]]:
        handle = Handle()
        self._call("export", "cuMemExportToShareableHandle", byref(handle), self._allocation, self.handle_type, 0)
        return bytes(handle), []

    def open(self, data: bytes, fds: Sequence[int], flags: int) -> None:
        del fds
        self._import(byref(Handle.from_buffer_copy(data)), flags)


class Legacy(Memory):
    """Memory of `cuMemAlloc`, by 64 bytes."""

    has_access = False

    def __init__(self, driver: Cuda, size_bytes: int) -> None:
        super().__init__(driver, size_bytes)
        self._is_opened = False

    def make(self) -> None:
        address = c_uint64()
        self._call("create", "cuMemAlloc_v2", byref(address), self.size_bytes)
        self.address = address.value

    def export(self) -> tuple[bytes, list[int]]:
        handle = Handle()
        self._call("export", "cuIpcGetMemHandle", byref(handle), self.address)
        return bytes(handle), []

    def open(self, data: bytes, fds: Sequence[int], flags: int) -> None:
        del fds, flags
        address = c_uint64()
        self._call("open", "cuIpcOpenMemHandle_v2", byref(address), Handle.from_buffer_copy(data), 1)
        self.address, self._is_opened = address.value, True

    def close(self) -> None:
        if self._is_opened:
            self._call("close", "cuIpcCloseMemHandle", self.address)
        else:
            self._call("free", "cuMemFree_v2", self.address)


class Pool(Memory):
    """Memory of a pool, by the pool's descriptor and 64 bytes."""

    def __init__(self, driver: Cuda, size_bytes: int) -> None:
        super().__init__(driver, size_bytes)
        self._pool = c_void_p()
        self._stream: c_void_p | None = None

    def make(self) -> None:
        wanted, address = PoolProperties(1, cuda.DESCRIPTOR, cuda.HERE), c_uint64()
        self._stream = self._driver.stream()
        self._call("create pool", "cuMemPoolCreate", byref(self._pool), byref(wanted))
        self._call("create", "cuMemAllocFromPoolAsync", byref(address), self.size_bytes, self._pool, self._stream)
        self._driver("cuStreamSynchronize", self._stream)
        self.address = address.value

    def export(self) -> tuple[bytes, list[int]]:
        fd, handle = c_int(), Handle()
        self._call("export pool", "cuMemPoolExportToShareableHandle", byref(fd), self._pool, cuda.DESCRIPTOR, 0)
        try:
            self._call("export", "cuMemPoolExportPointer", byref(handle), self.address)
        except cuda.Refused:
            os.close(fd.value)
            raise
        return bytes(handle), [fd.value]

    def open(self, data: bytes, fds: Sequence[int], flags: int) -> None:
        address, access = c_uint64(), Access(cuda.HERE, flags)
        self._call(
            "import pool", "cuMemPoolImportFromShareableHandle", byref(self._pool), c_void_p(fds[0]), cuda.DESCRIPTOR, 0
        )
        self._call("set access", "cuMemPoolSetAccess", self._pool, byref(access), 1)
        self._call("import", "cuMemPoolImportPointer", byref(address), self._pool, byref(Handle.from_buffer_copy(data)))
        self.address = address.value

    def close(self) -> None:
        self._call("free", "cuMemFree_v2", self.address)
        self._call("destroy pool", "cuMemPoolDestroy", self._pool)


KINDS: dict[str, Callable[[Cuda, int], Memory]] = {
    "descriptor": Virtual,
    "fabric": Fabric,
    "legacy handle": Legacy,
    "pool": Pool,
}


def spent(times: Times, place: int) -> float:
    """Return the sum of all steps of one round, in microseconds."""
    return sum(each[place] for each in times.values() if len(each) > place)
