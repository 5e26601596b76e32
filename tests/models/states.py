"""A model without state of its own: the runtime keeps the sum of a sequence, and gives it as TOTAL_IN with each
request.

The parameter `answer` names another way to answer, and `gate` a file that it waits for. An X below 0 ends the process.
"""

import json
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

PATIENCE_S = 60.0


def wait_for(gate):
    deadline = time.monotonic() + PATIENCE_S
    while not os.path.exists(gate):
        if time.monotonic() > deadline:
            raise TimeoutError(gate)
        time.sleep(0.002)


class TritonPythonModel:
    def initialize(self, args):
        self.instance = args["model_instance_name"]

    def execute(self, requests):
        for request in requests:
            parameters = json.loads(request.parameters())
            if "gate" in parameters:
                wait_for(parameters["gate"])
        return [self.respond(request, requests) for request in requests]

    def respond(self, request, requests):
        how = json.loads(request.parameters()).get("answer", "")
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        if (x < 0).any():
            os._exit(3)
        before = pb_utils.get_input_tensor_by_name(request, "TOTAL_IN").as_numpy()
        total = before + x
        if how == "grow":
            total = np.concatenate([before, x], axis=-1)
        elif how == "huge":
            total = np.zeros((*before.shape[:-1], 1 << 18), before.dtype)
        elif how == "shape":
            total = np.zeros((*before.shape, 2), before.dtype)
        elif how == "type":
            total = total.astype(np.int64)
        elif how == "place":
            before += x
            total = before
        told = {"before": before.ravel().tolist()[:4], "batch": len(requests), "instance": self.instance}
        tensors = [pb_utils.Tensor("Y", np.array([json.dumps(told)], object).reshape(x.shape))]
        if how != "keep":
            tensors.append(pb_utils.Tensor("TOTAL_OUT", total))
        if how == "error":
            return pb_utils.InferenceResponse(tensors, pb_utils.TritonError("on purpose"))
        response = pb_utils.InferenceResponse(tensors)
        if how == "later":
            sender = request.get_response_sender()
            threading.Thread(target=sender.send, args=(response, 1)).start()
            return None
        return response
