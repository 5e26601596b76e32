"""Logs what the request says in Python."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        pb_utils.Logger.log_info("initialized")

    def execute(self, requests):
        logger = pb_utils.Logger
        (code,) = pb_utils.get_input_tensor_by_name(requests[0], "CODE").as_numpy()
        exec(compile(code.decode(), "model.py", "exec"), {"logger": logger, "pb_utils": pb_utils})
        output = pb_utils.Tensor("Y", np.zeros(1, np.int32))
        return [pb_utils.InferenceResponse([output])]
