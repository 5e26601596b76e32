"""A signal handler that raises while a stream is closed: the model is told to stop all the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import hosted, tensor
from tests.runtime.interrupting import interrupted_everywhere

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
    "Requests", "A signal handler may raise at any point of the end of a stream: a second close ends the request."
)
def test_a_close_that_is_interrupted_ends_the_request(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(ENDLESS)
    with moonpool.Runtime() as runtime, hosted(runtime, "endless", file, CONFIG):
        zeros, ones = ({"X": np.full(1, value, np.float32)} for value in (0, 1))
        streams: list[moonpool.ResponseStream] = []

        def begin() -> None:
            streams[:] = [runtime.stream("endless", ones)]
            next(streams[0])

        def check() -> None:
            streams[0].close()
            # The one instance is free again.
            assert list(runtime.stream("endless", zeros, timeout_s=PATIENCE_S)) == []
            begin()

        begin()
        assert interrupted_everywhere(lambda: streams[0].close(), check, at_lines=False) > 10
        streams[0].close()
