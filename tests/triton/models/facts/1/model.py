"""Says what it knows of its request and of itself."""

import json
import os
import sys

import numpy as np
import triton_python_backend_utils as pb_utils

# Both ways to import a neighbour work. A module that is imported in both ways exists twice.
from . import neighbour
import neighbour as plain
import common


class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        responses = []
        for request in requests:
            facts = {
                "request_id": request.request_id(),
                "correlation_id": request.correlation_id(),
                "flags": request.flags(),
                "timeout": request.timeout(),
                "parameters": json.loads(request.parameters()),
                "outputs": sorted(request.requested_output_names()),
                "inputs": [(x.name(), x.shape()) for x in request.inputs()],
                "args": {k: v for k, v in self.args.items() if k != "model_config"},
                "arg_types": sorted({type(v).__name__ for v in self.args.values()}),
                "config": json.loads(self.args["model_config"]),
                "model_dir": pb_utils.get_model_dir(),
                "module": __name__,
                "package": __package__,
                "file": __file__,
                "neighbours": [neighbour.__name__, plain.__name__, neighbour is plain],
                "common": common.__name__,
                "path": [p for p in sys.path if "repository" in p],
                "main": sys.modules["__main__"].__name__,
                "utils": ["triton_python_backend_utils" in sys.modules, "c_python_backend_utils" in sys.modules],
                "cwd_is_absolute": os.path.isabs(os.getcwd()),
            }
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            outputs = [
                pb_utils.Tensor("FACTS", np.array([json.dumps(facts, sort_keys=True)], object)),
                pb_utils.Tensor("X_AGAIN", x),
            ]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
