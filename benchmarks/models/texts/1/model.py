"""Decodes its texts, and encodes them again."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("TEXT_OUT", texts)]))
        return responses
