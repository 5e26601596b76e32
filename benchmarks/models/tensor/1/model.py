"""Returns as many bytes as it gets; the parameter `answer` says in which memory."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.answer = getattr(self, config["parameters"]["answer"]["string_value"])
        self.kept = np.zeros(0, np.uint8)

    def own(self, array):
        """Return an array that the model keeps, so that the trip alone is measured."""
        if self.kept.size != array.size:
            self.kept = np.ones(array.size, np.uint8)
        return self.kept

    def copy(self, array):
        """Return a new array."""
        return array.copy()

    def placed(self, array):
        """Return an array in the memory from which the runtime reads."""
        answer = pb_utils.empty(array.shape, array.dtype)
        np.copyto(answer, array)
        return answer

    def through(self, array):
        """Return the input itself."""
        return array

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", self.answer(tensor.as_numpy()))])
            for request in requests
            for tensor in request.inputs()
        ]
