"""A pipeline through three memories: numpy here, the GPU of another model, numpy here again.

X is doubled here and goes to the model `callee` of the parameters as INPUT0, with ones as INPUT1. Y is the sum of both
outputs, which are asked for in ordinary memory: (2x + 1) + (2x - 1) = 4x.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.callee = parameters["callee"]["string_value"]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        inputs = [pb_utils.Tensor("INPUT0", 2 * x), pb_utils.Tensor("INPUT1", np.ones_like(x))]
        response = pb_utils.InferenceRequest(
            model_name=self.callee,
            inputs=inputs,
            requested_output_names=["OUTPUT0", "OUTPUT1"],
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU),
        ).exec()
        if response.has_error():
            return response
        total, difference = (pb_utils.get_output_tensor_by_name(response, name) for name in ("OUTPUT0", "OUTPUT1"))
        assert total.is_cpu()
        assert difference.is_cpu()
        y = total.as_numpy() + difference.as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])
