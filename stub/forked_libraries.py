"""What libraries that a model has imported need around a fork. Nothing is imported here that the model did not."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Callable


def compute_alone() -> Callable[[], object]:
    """Have PyTorch begin no threads, which no fork would have; returns what allows it as many as before."""
    torch = sys.modules.get("torch")
    if torch is None:
        return _nothing
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    return partial(torch.set_num_threads, count)


def reseed() -> None:
    """Let the forks of a process not draw the same numbers. `random` of Python does so by itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))


def _nothing() -> None:
    """There is nobody to allow it to."""
