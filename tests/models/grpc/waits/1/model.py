import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Makes PATH.begun, waits for PATH.go or its cancellation, and makes PATH.cancelled then."""

    def execute(self, requests):
        return [_wait(request) for request in requests]


def _wait(request):
    path = pb_utils.get_input_tensor_by_name(request, "PATH").as_numpy()[0].decode()
    _touch(path + ".begun")
    while not os.path.exists(path + ".go") and not request.is_cancelled():
        time.sleep(0.002)
    why = b"cancelled" if request.is_cancelled() else b"go"
    if why == b"cancelled":
        _touch(path + ".cancelled")
    return pb_utils.InferenceResponse([pb_utils.Tensor("WHY", np.array([why], object))])


def _touch(path):
    with open(path, "w"):
        pass
