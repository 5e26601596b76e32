"""Ends its process at a chosen message: the parameter DIE_AT counts them, before and after each is sent or read.

It does so once: the file MARKER says that it was done.
"""

import gc
import json
import os
import signal
import threading

import numpy as np
import triton_python_backend_utils as pb_utils
from moonpool.ipc.channel import Channel

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Fate:
    def __init__(self, at, marker):
        self.left, self.marker = at, marker
        self.lock = threading.Lock()

    def step(self):
        with self.lock:
            self.left -= 1
            if self.left == 0:
                open(self.marker, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

    def around(self, action):
        def act(*arguments):
            self.step()
            result = action(*arguments)
            self.step()
            return result

        return act


def arm(at, marker):
    fate = Fate(at, marker)
    for each in gc.get_objects():
        if type(each) is Channel:
            each._send, each._receive = fate.around(each._send), fate.around(each._receive)
    Channel.receive_with_fds = fate.around(Channel.receive_with_fds)


def said(text, **parameters):
    tensor = pb_utils.Tensor("SAID", np.array([text], np.object_))
    return pb_utils.InferenceResponse([tensor], parameters=parameters or None)


def late(sender):
    sender.send(said("late"))
    sender.send(said("later"), FINAL)


def until_cancelled(sender):
    while not sender.is_cancelled():
        threading.Event().wait(0.001)
    sender.send(flags=FINAL)


def ask(how):
    """Ask the other model; returns the texts of its responses."""
    tensor = pb_utils.Tensor("HOW", np.array([how.encode()], np.object_))
    request = pb_utils.InferenceRequest(inputs=[tensor], requested_output_names=["SAID"], model_name="other")
    return [
        response.output_tensors()[0].as_numpy()[0]
        for response in request.exec(decoupled=True)
        if response.output_tensors()
    ]


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        marker = parameters["MARKER"]["string_value"]
        if not os.path.exists(marker):
            arm(int(parameters["DIE_AT"]["string_value"]), marker)

    def execute(self, requests):
        for request in requests:
            how = request.inputs()[0].as_numpy()[0].decode()
            sender = request.get_response_sender()
            if how == "large":
                sender.send(said("x" * 3_000_000))
            elif how == "large remark":
                sender.send(said("x", remark="y" * 300_000))
            elif how == "log":
                pb_utils.Logger.log_info("something")
            elif how in ("ask", "ask late"):
                for text in ask("late" if how == "ask late" else "plain"):
                    sender.send(said(text))
            elif how == "ask lost":
                # The iterator is dropped unread, so the runtime learns that nobody wants the rest.
                tensor = pb_utils.Tensor("HOW", np.array([b"until cancelled"], np.object_))
                pb_utils.InferenceRequest(inputs=[tensor], requested_output_names=["SAID"], model_name="other").exec(
                    decoupled=True
                ).cancel()
            elif how == "error":
                raise ValueError("on purpose")
            elif how in ("late", "until cancelled"):
                run = late if how == "late" else until_cancelled
                threading.Thread(target=run, args=(sender,)).start()
                continue
            sender.send(said("last"), FINAL)
