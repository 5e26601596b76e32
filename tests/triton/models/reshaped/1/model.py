"""Gives back what it gets, in the shapes that its configuration says; SEEN has those of the inputs."""

import numpy as np
import triton_python_backend_utils as pb_utils

NAMES = ["GRID", "SCALAR", "ROWS", "TEXTS"]


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        arrays = {n: pb_utils.get_input_tensor_by_name(request, n).as_numpy() for n in NAMES}
        rows = len(arrays["GRID"])
        seen = [str(array.shape).encode() for array in arrays.values()]
        outputs = {
            "OUT_GRID": arrays["GRID"].reshape(rows, 6),
            "OUT_SCALAR": arrays["SCALAR"],
            "OUT_ROWS": np.ascontiguousarray(arrays["ROWS"].transpose(0, 2, 3, 1)),
            "OUT_TEXTS": arrays["TEXTS"],
            "SEEN": np.array([seen] * rows, object),
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(n, a) for n, a in outputs.items()])
