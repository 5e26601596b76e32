"""Answers questions about its readiness as X set it, or fails to answer."""

import asyncio
import os
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

GATE = threading.Event()


class TritonPythonModel:
    def initialize(self, args):
        self.how = "True"
        self.asked = 0
        self.instance = args["model_instance_name"]

    def is_ready(self):
        self.asked += 1
        if self.how == "hang":
            GATE.wait()
        if self.how == "die":
            os._exit(3)
        if self.how == "coroutine":
            return self.later()
        return eval(self.how)

    async def later(self):
        await asyncio.sleep(0)
        return threading.current_thread().name == "moonpool-asyncio"

    def execute(self, requests):
        responses = []
        for request in requests:
            how = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy()[0].decode()
            if how == "open":
                GATE.set()
            elif how:
                self.how = how
            said = np.array([f"{self.asked} {self.instance}".encode()], np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SAID", said)]))
        return responses
