"""Keeps the senders of requests with an N, and answers one without N with the number of cancelled ones."""

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if request.inputs()[0].as_numpy().item():
                self.kept.append(sender)
                continue
            cancelled = sum(each.is_cancelled() for each in self.kept)
            output = pb_utils.Tensor("Y", np.array([cancelled], np.int32))
            sender.send(pb_utils.InferenceResponse([output]), flags=FINAL)
            if cancelled == len(self.kept):
                for each in self.kept:
                    each.send(flags=FINAL)
                self.kept.clear()
