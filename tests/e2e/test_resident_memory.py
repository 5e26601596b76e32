"""Memory of every kind counts for the model that has it, whether or not its process has touched it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.e2e.hosting import options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.waiting import wait_until

import moonpool

HELD_BYTES = 96 << 20
HOLDS = f"""
import numpy as np
import triton_python_backend_utils as pb_utils

SIZE = {HELD_BYTES}


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X")
            kind = x.as_numpy()[:1].tobytes().decode()
            if kind == "h":
                self.held = np.ones(SIZE, np.uint8)
            elif kind == "o":
                self.held = pb_utils.empty((SIZE,), np.uint8)
            elif kind == "i":
                self.held = x.as_numpy()
        y = pb_utils.Tensor("Y", np.zeros(1, np.uint8))
        return [pb_utils.InferenceResponse([y]) for _ in requests]
"""
SIGNATURE = {"input": [tensor("X", "UINT8", -1)], "output": [tensor("Y", "UINT8", 1)]}


def sent(runtime: moonpool.Runtime, kind: str) -> NDArray[np.uint8]:
    """Return a request that lets the model hold memory of this kind."""
    if kind in "ci":
        x = runtime.empty("holder", "X", HELD_BYTES)
        # As a page of zeros is of no account, it is written to.
        x[::4096] = 1
    else:
        x = np.zeros(1, np.uint8)
    x[0] = ord(kind)
    return x


@pytest.mark.promise(
    "Lifecycle",
    "What a model takes is its own memory and all shared memory that was made for it, also what its process has not "
    "touched.",
)
@pytest.mark.parametrize("level", ["standard", "strict"])
@pytest.mark.parametrize("kind", ["heap", "outputs", "inputs", "callers"])
def test_a_model_that_holds_much_leaves_no_room_for_another_one(tmp_path: Path, kind: str, level: str) -> None:
    file = tmp_path / "model.py"
    file.write_text(HOLDS)
    resident = moonpool.Resident(memory=HELD_BYTES, least_stay_s=0.0)
    with moonpool.Runtime(resident=resident) as runtime:
        for name in ("holder", "other"):
            runtime.load(name, file, config=SIGNATURE | options(SANDBOX=level))
        held = sent(runtime, kind[0])
        runtime.infer("holder", {"X": held})
        if kind != "callers":
            del held

        runtime.infer("other", {"X": np.zeros(1, np.uint8)}, timeout_s=60.0)

        def is_one_asleep() -> bool:
            awake = 'moonpool_model_awake{{model="{}",version="1"}} 0'
            metrics = runtime.metrics()
            return any(awake.format(name) in metrics for name in ("holder", "other"))

        wait_until(is_one_asleep, 30.0)
