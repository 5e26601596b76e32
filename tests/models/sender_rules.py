"""Breaks the rules of response senders as its input HOW says, and answers with the texts of the errors."""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
KEPT = {}


def response(*texts):
    output = np.array([text.encode() for text in texts], np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("TEXTS", output)])


def good(sender):
    sender.send(response("good"), flags=FINAL)


def apart(sender):
    sender.send(response("apart"))
    sender.send(flags=FINAL)


def late(sender):
    threading.Thread(target=apart, args=(sender,)).start()


def told(sender):
    sender.send(response(*KEPT.pop("texts", ["nothing"])), flags=FINAL)


def unused(sender):
    return response("returned")


def without_final(sender):
    sender.send(response("sent"))


def wait_cancelled(sender):
    while not sender.is_cancelled():
        threading.Event().wait(0.002)
    KEPT["texts"] = ["cancelled"]
    sender.send(response("nobody"), flags=FINAL)


HOW = {name: value for name, value in globals().items() if callable(value)}


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            how = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy()[0].decode()
            responses.append(HOW[how](request.get_response_sender()))
        return responses if any(responses) else None
