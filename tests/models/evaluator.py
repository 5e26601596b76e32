"""Evaluates the expressions that it is sent, so that a test can call anything in pb_utils.

A parameter `AT_START` is evaluated in `initialize`; `self.said` has the result. `import_it` fails the import.
"""

import json
import os
import threading

import c_python_backend_utils as c
import numpy as np
import triton_python_backend_utils as pb_utils


def said(expression, model):
    names = {"pb_utils": pb_utils, "c": c, "np": np, "json": json, "os": os, "self": model, "threading": threading}
    try:
        return repr(eval(expression, names))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "CODE", "data_type": "TYPE_STRING", "dims": [-1]})
        config.add_output({"name": "RESULT", "data_type": "TYPE_STRING", "dims": [-1]})
        return config

    def initialize(self, args):
        self.args = args
        parameters = json.loads(args["model_config"])["parameters"]
        at_start = parameters.get("AT_START")
        self.said = said(at_start["string_value"], self) if at_start else None

    def execute(self, requests):
        responses = []
        for request in requests:
            codes = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()
            results = [said(code.decode(), self).encode() for code in codes]
            tensor = pb_utils.Tensor("RESULT", np.array(results, np.object_))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
