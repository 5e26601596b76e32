"""Takes as long as X says, in seconds; Y are the timeouts of all requests so far. Below 0 they are forgotten then."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.seen = []

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        seconds = pb_utils.get_input_tensor_by_name(request, "X").as_numpy().item()
        time.sleep(max(seconds, 0))
        if seconds >= 0:
            self.seen.append(request.timeout())
        y = pb_utils.Tensor("Y", np.array([self.seen], np.int64))
        if seconds < 0:
            self.seen = []
        return pb_utils.InferenceResponse([y])
