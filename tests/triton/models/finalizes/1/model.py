"""Logs in every stage of its life."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def __init__(self):
        pb_utils.Logger.log_warn("made")

    def initialize(self, args):
        pb_utils.Logger.log_info("initialized")

    def execute(self, requests):
        pb_utils.Logger.log_error("executes")
        output = pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", output)])]

    def finalize(self):
        pb_utils.Logger.log_info("finalized")
