"""A signal handler that raises while a stream is closed: the model is told to stop all the same."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import hosted, tensor
from tests.runtime.interrupting import Interrupted, RaisesAt

import moonpool

PATIENCE_S = 60.0
# Answers until its caller has left if X is not 0, and ends at once otherwise.
ENDLESS = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            goes_on = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0] != 0
            while goes_on and not sender.is_cancelled():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(1, np.float32))]))
                time.sleep(0.005)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = {
    "input": [tensor("X", "FP32", 1)],
    "output": [tensor("Y", "FP32", 1)],
    "model_transaction_policy": {"decoupled": True},
}


@pytest.mark.promise(
    "Requests",
    "A signal handler may raise at any point of the end of a stream: a second close ends the request.",
)
def test_a_close_that_is_interrupted_ends_the_request(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(ENDLESS)
    with moonpool.Runtime() as runtime, hosted(runtime, "endless", file, CONFIG):
        number, is_over = 0, False
        while not is_over:
            number += 1
            stream = runtime.stream("endless", {"X": np.ones(1, np.float32)})
            next(stream)
            raises = RaisesAt(number, at_lines=False)
            with contextlib.suppress(Interrupted), raises:
                stream.close()
            is_over = not raises.is_over
            stream.close()
            # The one instance is free again.
            zeros = {"X": np.zeros(1, np.float32)}
            assert list(runtime.stream("endless", zeros, timeout_s=PATIENCE_S)) == []
    assert number > 10
