"""Tests of capsules of inputs in a real stub: they lie in shared memory, and keep it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.e2e.hosting import Config, hosted, tensor

import moonpool

# The model keeps the capsule of its first input, and shows it on command.
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.kept = None

    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "X")
            there = tensor.as_numpy().__array_interface__["data"][0]
            if self.kept is None:
                self.kept = tensor.to_dlpack()
            if np.isnan(tensor.as_numpy()).any():
                tensor = pb_utils.Tensor.from_dlpack("Y", self.kept)
                self.kept = None
            else:
                tensor = pb_utils.Tensor.from_dlpack("Y", tensor)
                found = tensor.as_numpy().__array_interface__["data"][0]
                assert found == there or not tensor.as_numpy().size
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
"""
CONFIG: Config = {"input": [tensor("X", "FP32", -1)], "output": [tensor("Y", "FP32", -1)]}


@pytest.mark.promise("DLPack", "A capsule keeps its memory, that of a request included, and can be used once.")
@pytest.mark.parametrize("size", [0, 4, 100_000])
def test_a_capsule_keeps_its_request_s_memory_until_it_goes(
    runtime: moonpool.Runtime, model_file: Callable[[str], Path], size: int
) -> None:
    first = np.arange(size, dtype=np.float32)

    def infer(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return runtime.infer("m", {"X": x}, timeout_s=60.0)["Y"]

    with hosted(runtime, "m", model_file(MODEL), CONFIG):
        infer(first)
        for number in range(50):
            other = np.full(size, float(number), np.float32)
            assert np.array_equal(infer(other), other)
        again = infer(np.full(1, np.nan, np.float32))

        assert np.array_equal(again, first)
        for _ in range(3):
            assert np.array_equal(infer(first), first)
