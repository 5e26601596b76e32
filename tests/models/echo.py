"""Gives every input back under the name OUT_<input>, whatever its datatype."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            outputs = [pb_utils.Tensor("OUT_" + tensor.name(), tensor.as_numpy()) for tensor in request.inputs()]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
