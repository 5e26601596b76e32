"""Holds requests with a true X until they are cancelled. Other requests get the number of cancelled ones, which end
then.
"""

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.held = []
        self.cancelled = 0

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if request.inputs()[0].as_numpy().item():
                self.held.append(sender)
                continue
            over = [each for each in self.held if each.is_cancelled()]
            self.held = [each for each in self.held if each not in over]
            self.cancelled += len(over)
            for each in over:
                error = pb_utils.TritonError("nobody waits", pb_utils.TritonError.CANCELLED)
                each.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
            output = pb_utils.Tensor("Y", np.array([self.cancelled], np.int32))
            sender.send(pb_utils.InferenceResponse([output]), flags=FINAL)
