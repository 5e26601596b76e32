import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sends COUNT responses of SIZE bytes each, then an error if FAIL, then the final flag alone."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for index in range(_of(request, "COUNT", 0)):
                if request.is_cancelled():
                    break
                outputs = [
                    pb_utils.Tensor("INDEX", np.array([index], np.int32)),
                    pb_utils.Tensor("FILL", np.zeros(_of(request, "SIZE", 0), np.uint8)),
                ]
                sender.send(pb_utils.InferenceResponse(outputs))
            if _of(request, "FAIL", 0):
                error = pb_utils.TritonError("on purpose", pb_utils.TritonError.NOT_FOUND)
                sender.send(pb_utils.InferenceResponse(error=error))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _of(request, name, default):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else int(tensor.as_numpy()[0])
