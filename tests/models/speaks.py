"""Repeats `text_input` in `count` responses, each with the parameters of the request.

If `count` is 0, it goes on until the request is cancelled; below 0, it answers with an error. The request with the
text "cancelled" gets the number of cancelled requests.
"""

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.cancelled = 0

    def execute(self, requests):
        for request in requests:
            self.speak(request)

    def speak(self, request):
        sender = request.get_response_sender()
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
        count = pb_utils.get_input_tensor_by_name(request, "count")
        times = 1 if count is None else int(count.as_numpy()[0])
        told = request.parameters()
        if text[0] == b"cancelled":
            told = str(self.cancelled)
        if times < 0:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("on purpose")))
        said = 0
        while said < times or times == 0:
            if request.is_cancelled():
                self.cancelled += 1
                break
            outputs = [pb_utils.Tensor("text_output", text), pb_utils.Tensor("told", np.array([told.encode()], object))]
            sender.send(pb_utils.InferenceResponse(outputs))
            said += 1
        sender.send(flags=FINAL)
