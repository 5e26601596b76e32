"""The same model as `weights.py` with PyTorch, of which it uses a layer."""

import json
import os

import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.weights = torch.ones(int(parameters["mib"]["string_value"]) << 20, dtype=torch.uint8)
        self.layer = torch.nn.Linear(16, 16)

    def execute(self, requests):
        with torch.inference_mode():
            self.layer(torch.ones(1, 16))
        pid = torch.tensor([os.getpid() * int(self.weights[0])], dtype=torch.int64).numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("PID", pid)]) for _ in requests]
