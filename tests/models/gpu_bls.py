"""Calls another model with tensors on the GPU, and returns its outputs.

INPUT0 and INPUT1 go to the model `callee` of the parameters as they came, OUTPUT0 and OUTPUT1 come back as they are;
SEEN says where this model saw inputs and outputs: "gpu" or "cpu" for each.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.callee = parameters["callee"]["string_value"]
        self.number = int(args["model_instance_device_id"])

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        response = pb_utils.InferenceRequest(
            model_name=self.callee,
            inputs=request.inputs(),
            requested_output_names=["OUTPUT0", "OUTPUT1"],
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, self.number),
        ).exec()
        if response.has_error():
            return response
        outputs = response.output_tensors()
        seen = ["cpu" if t.is_cpu() else "gpu" for t in [*request.inputs(), *outputs]]
        outputs.append(pb_utils.Tensor("SEEN", np.array([" ".join(seen)], np.object_)))
        return pb_utils.InferenceResponse(outputs)
