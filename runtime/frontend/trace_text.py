"""Tensors as text, as a trace tells them."""

from __future__ import annotations

import struct
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.tensors import BF16, BYTES, DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

# A trace is there to be read.
MAX_ELEMENTS = 4096
MAX_STRING_BYTES = 4096


def tensor_text(datatype: int, array: np.ndarray[Any, Any]) -> str:
    """The elements, in C order and with commas between them; of long tensors the first ones, and dots.

    `array` has the elements, or their bytes as they travel.
    """
    if datatype == BYTES:
        wire = array.reshape(-1).view(np.uint8).data
        strings = list(islice(_strings(wire), MAX_ELEMENTS + 1))
        words = [f'"{each.decode("utf-8", "backslashreplace")}"' for each in strings[:MAX_ELEMENTS]]
        is_cut = len(strings) > MAX_ELEMENTS
    else:
        elements = _elements(datatype, array)
        is_cut = elements.size > MAX_ELEMENTS
        shown = elements[:MAX_ELEMENTS].tolist()
        words = [f"{each:g}" if isinstance(each, float) else str(int(each)) for each in shown]
    return ",".join([*words, "..."] if is_cut else words)


def _elements(datatype: int, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if datatype == BF16:
        # Its bits are the upper ones of a float's.
        words: np.ndarray[Any, Any] = array.reshape(-1).view(np.uint16)[: MAX_ELEMENTS + 1]
        return (words.astype(np.uint32) << 16).view(np.float32)
    return array.reshape(-1).view(DTYPES[datatype])


def _strings(wire: memoryview) -> Iterator[bytes]:
    place = 0
    while place + 4 <= len(wire):
        (size,) = struct.unpack_from("<I", wire, place)
        place += 4
        cut = min(size, MAX_STRING_BYTES)
        yield bytes(wire[place : place + cut]) + (b"..." if cut < size else b"")
        place += size
