import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Says the text `count` times, and what parameters it was told; for `count` below zero, an error."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            count = pb_utils.get_input_tensor_by_name(request, "count")
            times = 1 if count is None else int(count.as_numpy()[0])
            told = np.array([request.parameters().encode()], object)
            for _ in range(times):
                outputs = [pb_utils.Tensor("text_output", text), pb_utils.Tensor("told", told)]
                sender.send(pb_utils.InferenceResponse(outputs))
            if times < 0:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("on purpose")))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
