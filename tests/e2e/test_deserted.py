"""Requests whose callers have all left keep no model awake, and its deadline holds for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.waiting import wait_until

import moonpool

pytestmark = pytest.mark.promise(
    "Lifecycle",
    "A model is in use while somebody outside of it waits for an answer. A request that it keeps, and whose caller has "
    "left, keeps no model awake.",
)
KEEPS = """
import time

import numpy as np
import triton_python_backend_utils as pb_utils

KEPT = []


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            how = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0]
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(1, np.uint8))]))
            if how == 1:
                KEPT.append(sender)
            elif how == 2:
                time.sleep(1000)
            else:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SIGNATURE = {
    "input": [tensor("X", "UINT8", 1)],
    "output": [tensor("Y", "UINT8", 1)],
    "model_transaction_policy": {"decoupled": True},
}
WAYS = {"keeps it open": 1, "never returns": 2}


def leave(runtime: moonpool.Runtime, way: str) -> None:
    """Ask the model, wait until it has the request, and go."""
    with runtime.stream("keeps", {"X": np.array([WAYS[way]], np.uint8)}) as stream:
        next(stream)


def ask(runtime: moonpool.Runtime, model: str) -> int:
    return len(list(runtime.stream(model, {"X": np.zeros(1, np.uint8)}, timeout_s=60.0)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "model.py"
    file.write_text(KEEPS)
    return file


@pytest.mark.parametrize("way", WAYS)
def test_a_request_that_nobody_waits_for_gives_way(file: Path, way: str) -> None:
    resident = moonpool.Resident(models=1, least_stay_s=0.0)
    with moonpool.Runtime(resident=resident, drain_timeout_s=1.0) as runtime:
        for name in ("keeps", "other"):
            runtime.load(name, file, config=SIGNATURE)
        leave(runtime, way)

        assert ask(runtime, "other") == 1
        # It wakes again as any model does.
        assert ask(runtime, "keeps") == 1


@pytest.mark.parametrize("way", WAYS)
def test_the_deadline_holds_for_a_request_that_nobody_waits_for(file: Path, way: str) -> None:
    with moonpool.Runtime(drain_timeout_s=1.0) as runtime:
        plain, limited = options(SANDBOX="strict"), options(EXECUTE_TIMEOUT_S=0.2, SANDBOX="strict")
        runtime.load("keeps", file, config=SIGNATURE | plain)
        first = runtime.instances("keeps")[0]["pid"]
        leave(runtime, way)
        # The limit holds for what is at work already, and the process stays. It is not there for the other requests.
        runtime.load("keeps", file, config=SIGNATURE | limited)
        wait_until(lambda: runtime.instances("keeps")[0]["restarts"] == 1)
        runtime.load("keeps", file, config=SIGNATURE | plain)

        wait_until(lambda: runtime.instances("keeps")[0]["pid"] not in (None, first))
        assert ask(runtime, "keeps") == 1
