"""Shared memory of a client, with a name under which a server on the same machine finds it."""

from __future__ import annotations

import itertools
import mmap
import os

import posix_ipc

from moonpool.ipc.errors import MoonpoolError

_numbers = itertools.count()


class NoSharedMemory(MoonpoolError):
    """The machine has not so much of it."""

    code = "UNAVAILABLE"


class Region:
    """Made with its contents, and deleted by `close`."""

    def __init__(self, size_bytes: int, contents: bytes = b"") -> None:
        """Raises `NoSharedMemory`."""
        self.name = f"moonpool-bench-{os.getpid()}-{next(_numbers)}"
        self.key = f"/{self.name}"
        # A region must have a size, also that of tensors of nothing.
        self.size_bytes = max(1, size_bytes)
        memory = posix_ipc.SharedMemory(self.key, posix_ipc.O_CREX)
        try:
            # So that a server meets no page that is not there.
            os.posix_fallocate(memory.fd, 0, self.size_bytes)
            with mmap.mmap(memory.fd, self.size_bytes) as mapped:
                mapped[: len(contents)] = contents
        except OSError as error:
            posix_ipc.unlink_shared_memory(self.key)
            raise NoSharedMemory(f"{size_bytes} bytes of shared memory: {error}") from error
        finally:
            memory.close_fd()

    def close(self) -> None:
        posix_ipc.unlink_shared_memory(self.key)
