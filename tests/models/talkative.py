"""Answers with a parameter as long as the request's id says. If the id is `pid`, it answers with an error that has its
process id.
"""

import os

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.response(request) for request in requests]

    def response(self, request):
        if request.request_id() == "pid":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"process {os.getpid()}"))
        given = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        text = "x" * int(request.request_id() or 0)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT_X", given)], parameters={"text": text})
