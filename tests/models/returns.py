"""Returns what its input HOW names from `execute`, most of it wrong."""

import numpy as np
import triton_python_backend_utils as pb_utils

GOOD = np.array([1, 2], np.float32)


def response(name="Y", array=GOOD, **more):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array)], **more)


class Response(pb_utils.InferenceResponse):
    pass


class List(list):
    pass


RETURNS = {
    "a response": lambda: [response()],
    "nothing": lambda: None,
    "a list of nothing": lambda: [None],
    "an unknown output": lambda: [response("Z")],
    "no outputs": lambda: [pb_utils.InferenceResponse([])],
    "an output twice": lambda: [
        pb_utils.InferenceResponse([pb_utils.Tensor("Y", GOOD), pb_utils.Tensor("Y", GOOD + 1)])
    ],
    "another datatype": lambda: [response(array=GOOD.astype(np.int64))],
    "another shape": lambda: [response(array=GOOD.reshape(1, 2, 1))],
    "33 dimensions": lambda: [response(array=GOOD[:1].reshape((1,) * 33))],
    "a complex array": lambda: [response(array=GOOD.astype(np.complex64))],
    "an array of lists": lambda: [response(array=np.array([[1], None], object))],
    "no array": lambda: [response(array=[1, 2])],
    "a nameless tensor": lambda: [response("")],
    "a subclass of a list": lambda: List([response()]),
    "a subclass of a response": lambda: [Response([pb_utils.Tensor("Y", GOOD)])],
    "a parameter too large": lambda: [response(parameters={"x": 2**70})],
    "a parameter that is no Unicode": lambda: [response(parameters={"x": "\ud800"})],
    "parameters": lambda: [response(parameters={"x": 1, "y": "z", "w": True})],
    "an error without Unicode": lambda: [pb_utils.InferenceResponse(error=pb_utils.TritonError("\ud800 on purpose"))],
    "an error of a megabyte": lambda: [pb_utils.InferenceResponse(error=pb_utils.TritonError("on purpose " * 100_000))],
    "an error beside outputs": lambda: [response(error=pb_utils.TritonError("on purpose"))],
}


class TritonPythonModel:
    def execute(self, requests):
        how = pb_utils.get_input_tensor_by_name(requests[0], "HOW").as_numpy()[0].decode()
        return RETURNS[how]()
