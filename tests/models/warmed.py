"""Writes down what it executes, and fails, hangs or dies in its first batch as its parameters say."""

import json
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self._config = json.loads(args["model_config"])
        parameters = self._config["parameters"]
        self._does = parameters.get("does", {}).get("string_value", "")
        self._log = parameters["log"]["string_value"]
        self._name = args["model_instance_name"]
        self._note("initialize")

    def _note(self, what):
        with open(self._log, "a") as log:
            log.write(f"{self._name} {os.getpid()} {what}\n")

    def execute(self, requests):
        shown = [{tensor.name(): tensor.as_numpy().tolist() for tensor in request.inputs()} for request in requests]
        self._note(f"execute {shown!r}")
        if self._does == "raise":
            raise ValueError("on purpose")
        if self._does == "die":
            os._exit(7)
        if self._does == "hang":
            time.sleep(3600)
        if self._does == "refuse":
            return [
                pb_utils.InferenceResponse(error=pb_utils.TritonError(f"no {number}"))
                for number, _ in enumerate(requests)
            ]
        if self._config.get("model_transaction_policy", {}).get("decoupled"):
            for request in requests:
                sender = request.get_response_sender()
                threading.Thread(target=self._send, args=(sender,)).start()
            return None
        return [pb_utils.InferenceResponse([self._y()]) for _ in requests]

    def _y(self):
        return pb_utils.Tensor("Y", np.zeros((1, 1), np.float32))

    def _send(self, sender):
        if self._does == "die later":
            os._exit(7)
        if self._does == "refuse later":
            error = pb_utils.TritonError("late")
            sender.send(pb_utils.InferenceResponse(error=error))
        else:
            sender.send(pb_utils.InferenceResponse([self._y()]))
        self._note("sent")
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
