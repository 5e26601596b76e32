"""The text of a model whose answer says when its execution began and ended."""

TIMES = """
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        began = time.monotonic()
        time.sleep(0.002)
        times = np.array([began, time.monotonic()])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("T", times)]) for _ in requests]
"""
