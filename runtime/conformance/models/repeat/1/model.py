import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sends COUNT responses, then an error if FAIL, then the final flag alone."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            fail = pb_utils.get_input_tensor_by_name(request, "FAIL")
            for index in range(count):
                tensor = pb_utils.Tensor("INDEX", np.array([index], np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]))
            if fail is not None and fail.as_numpy()[0]:
                error = pb_utils.TritonError("on purpose", pb_utils.TritonError.NOT_FOUND)
                sender.send(pb_utils.InferenceResponse(error=error))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
