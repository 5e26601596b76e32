"""A Python-based backend that says how it was imported and what it was told of its model."""

import sys

PATH = list(sys.path)

import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils


def last(path):
    """Return the end of a path that is the same on both sides."""
    return "/".join(path.split("/")[-2:])


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "SAID", "data_type": "TYPE_STRING", "dims": [1]})
        return config

    def initialize(self, args):
        args["model_repository"] = last(args["model_repository"])
        said = {
            # moonpool has one more behind them, for children of the model.
            "path": [last(entry) for entry in PATH if "/backends/" in entry][-2:],
            "name": __name__,
            "file": os.path.basename(__file__),
            "folder": os.path.basename(os.path.dirname(__file__)),
            "dir": last(pb_utils.get_model_dir()),
            "args": args,
        }
        self.said = np.array([json.dumps(said, sort_keys=True)], object)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SAID", self.said)]) for _ in requests]
