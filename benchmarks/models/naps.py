"""A model that waits for twenty milliseconds, as one does that asks another machine."""

import time

from moonpool import Batch, Float32


class Naps:
    def __call__(self, X: Float32[Batch, 1]) -> Float32[Batch, 1]:  # noqa: N803
        time.sleep(0.02)
        return X
