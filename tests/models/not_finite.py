"""Answers with a parameter that is no finite number, which it slips past the library's check."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0]
            response = pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(1, np.int32))])
            response._parameters = {"score": float(text)}
            responses.append(response)
        return responses
