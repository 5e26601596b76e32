"""Answers other models in the way that its file's parameter MODE names."""

import json
import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.mode = json.loads(args["model_config"])["parameters"]["MODE"]["string_value"]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        if self.mode == "slow":
            time.sleep(0.3)
        elif self.mode == "dies":
            os._exit(3)
        elif self.mode == "raises":
            raise ValueError("on purpose")
        elif self.mode == "refuses":
            error = pb_utils.TritonError("not today", pb_utils.TritonError.ALREADY_EXISTS)
            return pb_utils.InferenceResponse(error=error)
        elif self.mode == "told":
            said = [
                request.request_id(),
                request.correlation_id(),
                request.flags(),
                request.timeout(),
                json.loads(request.parameters()),
            ]
            array = np.array([json.dumps(said)], object)
            return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", array)])
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * x)])
