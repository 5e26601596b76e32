"""Answers with the number of requests in its batch; a negative number fails its request, zero the batch."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if (x == 0).any():
                raise ValueError("zero")
            if (x < 0).any():
                error = pb_utils.TritonError(f"refused {x.tolist()}", pb_utils.TritonError.NOT_FOUND)
                responses.append(pb_utils.InferenceResponse(error=error))
            else:
                y = np.concatenate([x, np.full_like(x, len(requests))], axis=1)
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]))
        return responses
