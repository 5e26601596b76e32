import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sums what a sequence has sent so far."""

    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy()[0, 0]
        value = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0, 0]
        correlation_id = request.correlation_id()
        self.sums[correlation_id] = (0 if start else self.sums[correlation_id]) + value
        out = np.array([[self.sums[correlation_id]]], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", out)])
