"""Models that run in a tritonserver whose backend is this moonpool: by name, the configuration and the text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(r, "X").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array.copy())]) for array in arrays]
"""

# The model obeys its input, and answers with its process number.
ORDERS = """
import ctypes, os, signal, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.obey(request) for request in requests]

    def obey(self, request):
        order = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0]
        if order == b"kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if order == b"exit":
            os._exit(3)
        if order == b"crash":
            ctypes.string_at(0)
        if order == b"sleep":
            time.sleep(1000)
        if order == b"wait":
            pb_utils.Logger.log_info("waits")
            while not request.is_cancelled():
                time.sleep(0.01)
            pb_utils.Logger.log_info("was cancelled")
        if order.startswith(b"log "):
            for number in range(int(order[4:])):
                pb_utils.Logger.log_info(f"line {number}")
        if order == b"raise":
            raise ValueError("as it was told")
        if order == b"no number":
            # Past the check of the library, as a hostile process would send it.
            response = pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([os.getpid()]))])
            response._parameters = {"score": float("nan")}
            return response
        if order == b"refuse":
            error = pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND)
            return pb_utils.InferenceResponse(error=error)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([os.getpid()]))])
"""

COUNTS = """
import threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            until = int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0])
            sender = request.get_response_sender()
            threading.Thread(target=self.count, args=(request, sender, until)).start()

    def count(self, request, sender, until):
        number = 0
        while number != until and not request.is_cancelled():
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([number]))]))
            number += 1
            # Nothing that it says shows that its client has left.
            while until < 0 and not request.is_cancelled():
                time.sleep(0.01)
        if number != until:
            pb_utils.Logger.log_info("was cancelled")
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def _config(x: str, y: str, dims: int, more: str = "") -> str:
    return (
        'backend: "moonpool"\ninstance_group [ { kind: KIND_CPU } ]\n'
        f'input [ {{ name: "X" data_type: {x} dims: [ {dims} ] }} ]\n'
        f'output [ {{ name: "Y" data_type: {y} dims: [ {dims} ] }} ]\n{more}'
    )


_LIMIT = 'parameters { key: "MOONPOOL_EXECUTE_TIMEOUT_S" value { string_value: "1" } }'
_RENEWAL = 'parameters { key: "MOONPOOL_RECYCLE_REQUESTS" value { string_value: "3" } }'
MODELS = {
    "identity": (_config("TYPE_UINT8", "TYPE_UINT8", -1), IDENTITY),
    "batched": (
        _config(
            "TYPE_UINT8",
            "TYPE_UINT8",
            -1,
            "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 200000 }",
        ),
        IDENTITY,
    ),
    "orders": (_config("TYPE_STRING", "TYPE_INT64", 1), ORDERS),
    "limited": (_config("TYPE_STRING", "TYPE_INT64", 1, _LIMIT), ORDERS),
    "renewed": (_config("TYPE_STRING", "TYPE_INT64", 1, _RENEWAL), ORDERS),
    "counts": (_config("TYPE_INT64", "TYPE_INT64", 1, "model_transaction_policy { decoupled: true }"), COUNTS),
    "broken": (_config("TYPE_UINT8", "TYPE_UINT8", -1), "raise ImportError('of no use')\n"),
}


def write(repository: Path, names: Iterable[str] = MODELS) -> None:
    """Make a model repository of them."""
    for name in names:
        config, text = MODELS[name]
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
        (repository / name / "1" / "model.py").write_text(text)
