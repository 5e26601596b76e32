"""Doubles; a row that begins with a negative number fails its request, with -row as the code's place."""

import triton_python_backend_utils as pb_utils

CODES = "UNKNOWN INTERNAL NOT_FOUND INVALID_ARG UNAVAILABLE UNSUPPORTED ALREADY_EXISTS CANCELLED".split()


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            first = int(x[0, 0])
            if first < 0:
                code = getattr(pb_utils.TritonError, CODES[-first - 1])
                error = pb_utils.TritonError(f"refused {first}", code)
                responses.append(pb_utils.InferenceResponse(error=error))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * 2)]))
        return responses
