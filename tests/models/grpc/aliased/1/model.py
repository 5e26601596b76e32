"""Answers with as many outputs as its configuration was completed with, all of them the same memory."""

import numpy as np
import triton_python_backend_utils as pb_utils

OUTPUTS, BYTES = 70, 32 << 20


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "N", "data_type": "TYPE_INT32", "dims": [1]})
        for number in range(OUTPUTS):
            config.add_output({"name": f"Y{number}", "data_type": "TYPE_UINT8", "dims": [-1]})
        config.set_max_batch_size(0)
        return config

    def execute(self, requests):
        responses = []
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
            memory = pb_utils.empty((BYTES,), np.uint8)
            memory[:] = 7
            outputs = [pb_utils.Tensor(f"Y{number}", memory) for number in range(count)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
