"""Rows of any length, brought to a mean of 0 and a standard deviation of 1."""

import numpy as np

from moonpool import Batch, Float32, Outputs


class Normalise:
    def __call__(self, X: Float32[Batch, :]) -> Outputs(Y=Float32[Batch, :]):
        mean = X.mean(axis=1, keepdims=True)
        deviation = X.std(axis=1, keepdims=True)
        # A row of equal numbers has no deviation; it becomes zeros.
        return {"Y": (X - mean) / np.maximum(deviation, np.float32(1e-12))}
