"""Copies large buffers past the processor's caches. In C++."""

from mmap import mmap

import numpy as np

def copy(target: mmap | bytearray, offset: int, source: np.ndarray) -> None:
    """Copy a contiguous array to an offset in a map. Raises BufferError if it is not contiguous, ValueError if it does not fit."""
