"""Answers other models in the way that the parameter MODE names."""

import json
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.mode = json.loads(args["model_config"])["parameters"]["MODE"]["string_value"]

    def execute(self, requests):
        if self.mode in ("stream", "endless"):
            for request in requests:
                threading.Thread(target=self.stream, args=(request,)).start()
            return None
        return [self.answer(request) for request in requests]

    def stream(self, request):
        """Send as many responses as X says, or until the request is cancelled."""
        sender = request.get_response_sender()
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        count = int(x[0]) if self.mode == "stream" else 1 << 60
        for number in range(count):
            if sender.is_cancelled():
                break
            y = np.full(len(x), number, np.float32)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]))
            if self.mode == "endless":
                time.sleep(0.001)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with open(os.environ.get("ENDED", os.devnull), "a") as file:
            file.write("ended\n")

    def answer(self, request):
        if self.mode == "slow":
            time.sleep(0.3)
        elif self.mode == "until cancelled":
            while not request.is_cancelled():
                time.sleep(0.002)
        elif self.mode.startswith("until "):
            while not os.path.exists(self.mode.partition(" ")[2]):
                time.sleep(0.002)
        elif self.mode == "dies":
            os._exit(3)
        elif self.mode == "raises":
            raise ValueError("on purpose")
        elif self.mode == "refuses":
            error = pb_utils.TritonError("not today", pb_utils.TritonError.ALREADY_EXISTS)
            return pb_utils.InferenceResponse(error=error)
        elif self.mode == "told":
            said = [
                request.request_id(),
                request.correlation_id(),
                request.flags(),
                request.timeout(),
                json.loads(request.parameters()),
            ]
            array = np.array([json.dumps(said)], object)
            return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", array)])
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * x)])
