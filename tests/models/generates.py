"""Counts down from X, once in each execute: a request is rescheduled until it reaches 0. Y is the rest.

If it is decoupled, each step is a response. Each request is appended to the file that the parameter `log` names. It
waits for the file that the parameter `gate` names.
"""

import json
import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils

AGAIN = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.is_decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self.left = {}

    def execute(self, requests):
        responses = [self.step(request) for request in requests]
        return None if self.is_decoupled else responses

    def step(self, request):
        x = request.inputs()[0].as_numpy()
        which = request.correlation_id()
        if not which:  # an empty slot
            return None if self.is_decoupled else pb_utils.InferenceResponse([])
        if request.flags() & 1:
            self.left[which] = int(x.ravel()[0])
        parameters = json.loads(request.parameters())
        with open(parameters["log"], "a") as log:
            log.write(f"{request.request_id()} {which} {request.flags()}\n")
        while "gate" in parameters and not os.path.exists(parameters["gate"]):
            time.sleep(0.002)
        if parameters.get("dies_at") == self.left[which]:
            os._exit(3)
        self.left[which] -= 1
        left = self.left[which]
        response = pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.full_like(x, left))])
        if left > 0:
            request.set_release_flags(AGAIN)
        if self.is_decoupled:
            if not parameters.get("silent"):
                request.get_response_sender().send(response, FINAL if left <= 0 else 0)
            elif left <= 0:
                request.get_response_sender().send(response, FINAL)
            return None
        if parameters.get("answers_too"):
            return response
        return None if left > 0 else response
