"""Has no configuration but what it completes."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        before = config.as_dict()
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [4], "optional": True})
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [4], "optional": True})
        config.add_input({"name": "Z", "data_type": "TYPE_INT32", "dims": [-1, 2]})
        config.add_output({"name": "CONFIG", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        config.set_model_transaction_policy({"decoupled": False})
        assert config.as_dict() is before
        return config

    def initialize(self, args):
        self.config = args["model_config"]

    def execute(self, requests):
        output = np.array([[self.config]], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("CONFIG", output)]) for _ in requests]
