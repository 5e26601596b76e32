"""Models with a sequence batcher get the same inputs in a test's process as in a stub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, tensor

import moonpool
from moonpool import testing

pytestmark = pytest.mark.promise(
    "Testing models",
    "A model with a sequence batcher gets the same control inputs in a test's process as in a "
    "stub, under the same rules.",
)

START, END = 1, 2
CONTROLS = [
    {"name": "START", "control": [{"kind": "CONTROL_SEQUENCE_START", "fp32_false_true": [0, 1]}]},
    {"name": "END", "control": [{"kind": "CONTROL_SEQUENCE_END", "bool_false_true": [False, True]}]},
    {"name": "READY", "control": [{"kind": "CONTROL_SEQUENCE_READY", "int32_false_true": [0, 7]}]},
    {"name": "ID", "control": [{"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_UINT64"}]},
]
LOADS = [testing.load, testing.load_in_stub]


def config(**batching: Any) -> dict[str, Any]:
    return {
        "max_batch_size": 4,
        "input": [tensor("X", "FP32", 1)],
        "output": [tensor("Y", "STRING", 1)],
        "sequence_batching": {"max_sequence_idle_microseconds": 3_600_000_000, **batching},
    }


def request(which: int, x: float, flags: int = 0) -> testing.Request:
    return testing.request({"X": [[x]]}, correlation_id=which, flags=flags, request_id=f"{which}")


OLDEST = {"oldest": {"max_candidate_sequences": 4}, "control_input": CONTROLS}


@pytest.mark.parametrize("batching", [{}, {"control_input": CONTROLS}, OLDEST], ids=["plain", "controls", "oldest"])
def test_a_model_is_told_where_in_its_sequence_a_request_is(batching: dict[str, Any]) -> None:
    def said(load: Callable[..., testing.LoadedModel]) -> Iterator[Any]:
        with load(MODELS / "sequences.py", name="m", config=config(**batching)) as model:
            for each in [
                request(7, 1, START),
                request(7, 2),
                request(8, 5, START),
                request(7, 3, END),
                request(8, 6, END),
                request(7, 1, START | END),
            ]:
                yield json.loads(model.infer(each)["Y"][0, 0])

    here, in_stub = (list(said(load)) for load in LOADS)

    assert [told["sum"] for told in here] == [1, 3, 5, 6, 11, 1]
    assert here == in_stub


def test_requests_of_different_sequences_are_one_batch() -> None:
    with testing.load(MODELS / "sequences.py", config=config(control_input=CONTROLS)) as model:
        batch = [request(7, 1, START), request(8, 2, START), request(7, 3), request(9, 4, START)]
        told = [json.loads(response["Y"][0, 0]) for response in model.infer_batch(batch)]

        assert [each["batch"] for each in told] == [["7", "8", "9"]] * 2 + [["7"]] + [["7", "8", "9"]]
        # Sequence 8 keeps its place, and somebody else's is empty.
        (last,) = model.infer_batch([request(8, 1)])
        assert json.loads(last["Y"][0, 0])["place"] == 1


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (request(0, 1, START), "must specify a non-zero or non-empty correlation ID"),
        (request(3, 1), "must specify the START flag on the first request of the sequence"),
    ],
)
def test_the_rules_of_sequences_hold(
    load: Callable[..., testing.LoadedModel], broken: testing.Request, why: str
) -> None:
    with load(MODELS / "sequences.py", config=config()) as model:
        with pytest.raises(moonpool.InvalidRequest, match=why):
            model.infer(broken)
        model.infer(request(4, 1, START | END))


def test_a_sequence_that_would_have_to_wait_is_refused() -> None:
    with testing.load(MODELS / "sequences.py", config={**config(), "max_batch_size": 1}) as model:
        model.infer(request(1, 1, START))
        with pytest.raises(moonpool.InvalidRequest, match="has 1 sequences at a time"):
            model.infer(request(2, 1, START))
        model.infer(request(1, 1, END))
        model.infer(request(2, 1, START))


ITERATIVE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.seen = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        seen = self.seen.setdefault(request.correlation_id(), [])
        seen.append(request.flags())
        if len(seen) < 3:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        text = np.array([[str(seen)]], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", text)])
"""


@pytest.mark.parametrize("load", LOADS)
def test_a_rescheduled_request_comes_again(load: Callable[..., testing.LoadedModel], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(ITERATIVE)
    with load(tmp_path / "model.py", config=config(iterative_sequence=True)) as model:
        assert model.infer(X=np.ones((1, 1), np.float32))["Y"].tolist() == [[b"[1, 0, 0]"]]


STATES = [{"input_name": "TOTAL_IN", "output_name": "TOTAL_OUT", "data_type": "TYPE_FP32", "dims": [1]}]


@pytest.mark.promise("Sequences", "A model gets the states of …")
def test_a_model_gets_the_states_of_its_sequences() -> None:
    def said(load: Callable[..., testing.LoadedModel]) -> Iterator[Any]:
        with load(MODELS / "states.py", name="m", config=config(state=STATES)) as model:
            for each in [request(7, 1, START), request(8, 5, START), request(7, 2), request(7, 1)]:
                response = model.infer(each)
                assert list(response.outputs) == ["Y"]
                yield json.loads(response["Y"].flat[0])["before"]
            wrong = testing.request({"X": [[1.0]]}, correlation_id=7, parameters={"answer": "shape"})
            with pytest.raises(moonpool.MoonpoolError, match="state 'TOTAL_OUT' of model 'm' has"):
                model.infer(wrong)
            yield json.loads(model.infer(request(7, 1))["Y"].flat[0])["before"]

    assert [list(said(load)) for load in LOADS] == [[[0], [0], [1], [3], [4]]] * 2
