"""A model that takes as long as it is told to, and may be cut off for it."""

import time

from moonpool import Batch, Float32, Outputs


class Hangs:
    max_batch_size = 1

    def __call__(self, SECONDS: Float32[Batch]) -> Outputs(SLEPT=Float32[Batch]):
        time.sleep(float(SECONDS.sum()))
        return {"SLEPT": SECONDS}
