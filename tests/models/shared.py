"""Does with its input X what its input HOW names; several processes may send it batches."""

import os
import threading

import numpy as np
import triton_python_backend_utils as pb_utils
from moonpool.ipc.arena import Keep

# The stub gives back at once the memory that it grew by.
pb_utils.memory_in_use().keep = Keep(0.05, 0.05)

KEPT = []
SEEN = []


def until_cancelled(request, x):
    print("waits for its cancellation", flush=True)
    while not request.is_cancelled():
        threading.Event().wait(0.001)
    SEEN.append("cancelled")
    return x


def until_told(request, x):
    """Report that it has begun, and go on when the file is gone."""
    gate = os.environ["GATE"]
    open(gate + ".begun", "w").close()
    while os.path.exists(gate):
        threading.Event().wait(0.001)
    return x


def keep(request, x):
    KEPT.append(x)
    return x


def in_memory(request, x):
    array = pb_utils.empty(x.shape, x.dtype)
    array[...] = x + 1
    return array


def ask(request, x):
    asked = pb_utils.InferenceRequest(
        model_name="square", inputs=[pb_utils.Tensor("X", x)], requested_output_names=["Y"]
    ).exec()
    if asked.has_error():
        raise pb_utils.TritonModelException(asked.error().message())
    return pb_utils.get_output_tensor_by_name(asked, "Y").as_numpy()


def die(request, x):
    os._exit(3)


HOW = {
    "same": lambda request, x: x,
    "twice": lambda request, x: x * 2,
    "slowly": lambda request, x: (threading.Event().wait(0.02), x)[1],
    "seen": lambda request, x: np.array([len(SEEN)], np.float32),
    "kept": lambda request, x: np.concatenate(KEPT) if KEPT else x[:0],
    "forget": lambda request, x: (KEPT.clear(), x)[1],
    "big": lambda request, x: np.full(1 << 20, x[0], np.float32),
    "until cancelled": until_cancelled,
    "until told": until_told,
    "keep": keep,
    "in memory": in_memory,
    "ask": ask,
    "die": die,
}


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            how = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy()[0].decode()
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            y = HOW[how](request, x)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]))
            del x, y
        return responses
