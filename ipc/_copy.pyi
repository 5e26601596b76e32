"""Copies large tensors into shared memory. In C++."""

from mmap import mmap

import numpy as np

def copy(target: mmap | bytearray, offset: int, source: np.ndarray) -> None:
    """Copy a contiguous array to an offset in a map.

    Raises BufferError if it is not contiguous, ValueError if it does not fit.
    """

def copy_past_caches(target: mmap | bytearray, offset: int, source: np.ndarray) -> None:
    """Do what `copy` does, and as it does that for the largest arrays. For tests."""
