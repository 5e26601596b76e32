"""Runs CODE and returns its value from `execute`: an expression, or statements that set `result`."""

import gc
import os
import sys
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

KEPT = {}


def said(text):
    return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([text.encode()], np.object_))])


class TritonPythonModel:
    def execute(self, requests):
        code = requests[0].inputs()[0].as_numpy()[0].decode()
        names = {
            "E": pb_utils.TritonError,
            "KEPT": KEPT,
            "Q": pb_utils.InferenceRequest,
            "R": pb_utils.InferenceResponse,
            "T": pb_utils.Tensor,
            "gc": gc,
            "model": self,
            "np": np,
            "os": os,
            "pb_utils": pb_utils,
            "request": requests[0],
            "requests": requests,
            "said": said,
            "sys": sys,
            "text": np.array([b"ok"], np.object_),
            "threading": threading,
        }
        try:
            compiled = compile(code, "<code>", "eval")
        except SyntaxError:
            exec(code, names)
            return names["result"]
        return eval(compiled, names)
