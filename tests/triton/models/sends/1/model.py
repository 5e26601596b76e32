"""Answers by a response sender, as the request says in Python; what is refused goes to the log."""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def y(*values, **more):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array(values, np.float32))], **more)


def failed(*args):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(*(args or ["on purpose"])))


def attempt(call, *args, **kwargs):
    try:
        said = repr(call(*args, **kwargs))
    except BaseException as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    pb_utils.Logger.log_info(said)


class TritonPythonModel:
    def execute(self, requests):
        (code,) = pb_utils.get_input_tensor_by_name(requests[0], "CODE").as_numpy()
        names = {**globals(), "requests": requests, "request": requests[0], "model": self}
        names["sender"] = requests[0].get_response_sender()
        exec(compile(code.decode(), "snippet", "exec"), names)
        return names.get("returned")
