"""Returns its process number, or makes the file named by `stalled` and never answers."""

import json
import os
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.stalled = Path(config["parameters"]["stalled"]["string_value"])

    def execute(self, requests):
        for request in requests:
            if pb_utils.get_input_tensor_by_name(request, "STALL").as_numpy()[0]:
                self.stalled.touch()
                time.sleep(3600)
        pid = np.array([os.getpid()], np.int64)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("PID", pid)]) for _ in requests]
