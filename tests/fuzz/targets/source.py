"""Answers of processes that run source."""

from __future__ import annotations

import contextlib

from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.source import values
from moonpool.runtime.sandboxes.sandbox import _check_answer

_SIZE_BYTES = 4096


def source_answer(data: bytes) -> None:
    """Read a packet, with a memory of zeros beside it."""

    def mapped(size_bytes: int) -> memoryview:
        if size_bytes > _SIZE_BYTES:
            raise RemoteProtocolError("too much")
        return memoryview(bytearray(size_bytes))

    with contextlib.suppress(RemoteProtocolError):
        _check_answer(values.unpacked(data, mapped))


def source_value(data: bytes) -> None:
    """Read a document whose arrays lie in a memory of zeros."""
    with contextlib.suppress(RemoteProtocolError):
        values.read(data, memoryview(bytearray(_SIZE_BYTES)))
