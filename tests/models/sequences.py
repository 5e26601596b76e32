"""A model with state: Y says, as JSON, how each request came, and the sum of its sequence so far.

The parameter `gate` names a file that it waits for. An X below 0 ends the process.
"""

import json
import os
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
        self.is_batched = json.loads(args["model_config"])["max_batch_size"] > 0
        self.instance = args["model_instance_name"]
        self.sums = {}

    def execute(self, requests):
        told = [self.told(place, request) for place, request in enumerate(requests)]
        for request in requests:
            parameters = json.loads(request.parameters())
            if "gate" in parameters:
                wait_for(parameters["gate"])
        for each in told:
            each["batch"] = [other["id"] for other in told]
        return [self.response(each) for each in told]

    def told(self, place, request):
        which = request.correlation_id()
        if not which:  # an empty slot, whose inputs have no meaning
            return {"id": ""}
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        x = float(tensors.pop("X").ravel()[0])
        if x < 0:
            os._exit(3)
        if request.flags() & 1:
            self.sums[which] = 0.0
        self.sums[which] = self.sums.get(which, 0.0) + x
        return {
            "id": request.request_id(),
            "place": place,
            "which": which,
            "flags": request.flags(),
            "wanted": sorted(request.requested_output_names()),
            "instance": self.instance,
            "sum": self.sums[which],
            "x": x,
            "controls": {
                name: [str(array.dtype), list(array.shape), str(array.ravel()[0])] for name, array in tensors.items()
            },
        }

    def response(self, told):
        text = np.array([json.dumps(told)], dtype=object)
        tensor = pb_utils.Tensor("Y", text.reshape(1, 1) if self.is_batched else text)
        return pb_utils.InferenceResponse([tensor])
