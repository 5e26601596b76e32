"""Tests of the states of sequences that the runtime keeps: what a response may bring, and the memory that it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moonpool.ipc.port import RequestTensor, Shapes
from moonpool.ipc.tensors import BYTES, CODES, DTYPES, encode_bytes
from moonpool.runtime.errors import ModelError
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import Details, InferenceRequest, Response, WireTensor
from moonpool.runtime.process.usage import MemoryAccount
from moonpool.runtime.schedule.sequence_states import VALUE_BYTES, SequenceStates

pytestmark = pytest.mark.promise(
    "Sequences",
    "States take no more memory than `MOONPOOL_STATE_LIMIT_BYTES`, whatever a model answers, and none once their "
    "sequences have ended.",
)

LIMIT = 1 << 16
# A state of one number, such as the one at the start.
LEAST = VALUE_BYTES + 4


def states_of(
    datatype: str = "FP32",
    dims: tuple[int, ...] = (-1,),
    rows: int = 4,
    outputs: int = 1,
    account: MemoryAccount | None = None,
) -> SequenceStates:
    state = {"input_name": "I", "output_name": "O", "data_type": f"TYPE_{datatype}", "dims": list(dims)}
    others = ["Y", "O"][:outputs]
    config = ModelConfig.from_dict(
        {
            "name": "m",
            "backend": "python",
            "max_batch_size": rows,
            "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],
            "output": [{"name": name, "data_type": f"TYPE_{datatype}", "dims": [-1]} for name in others],
            "sequence_batching": {"state": [state]},
        }
    )  # fmt: skip
    code = CODES["BYTES" if datatype == "STRING" else datatype]
    shape = (1, 1) if rows else (1,)
    zero = np.zeros(4, np.uint8) if code == BYTES else np.zeros(shape, DTYPES[code])
    return SequenceStates(config, [WireTensor(code, shape, zero)], LIMIT, account or MemoryAccount())


def request_of(states: SequenceStates, outputs: list[int] | None = None) -> InferenceRequest:
    shapes = Shapes([RequestTensor(0, CODES["FP32"], [1, 1], 4)], 1, None, is_shared=True)
    request = InferenceRequest([np.zeros((1, 1), np.float32)], shapes, Details(outputs=outputs))
    states.begin(request, states.initial)
    return request


def accepted(states: SequenceStates, output: Any) -> InferenceRequest:
    request = request_of(states)
    response = Response({"Y": np.zeros(1), "O": output})
    assert states.accept(request, response) is response
    assert list(response.outputs) == ["Y"]
    return request


@given(
    array=arrays.arrays(st.sampled_from(["f4", "i8", "?", "f2"]), arrays.array_shapes(max_dims=4, max_side=5)),
    rows=st.sampled_from([0, 4]),
    is_wire=st.booleans(),
)
def test_a_state_is_a_copy_of_what_fits_and_an_error_otherwise(
    array: np.ndarray[Any, Any], rows: int, is_wire: bool
) -> None:
    states = states_of(rows=rows)
    wanted = array.dtype == np.float32 and array.ndim == 1 + bool(rows) and (not rows or len(array) == 1)
    request = request_of(states)
    given_output = WireTensor.of(array)
    output: Any = given_output if is_wire else array
    answer = states.accept(request, Response({"O": output}))
    assert request.states is not None
    if not wanted:
        assert isinstance(answer, ModelError)
        assert request.states.new is None
        return
    (value,) = request.states.new.values
    expected = array.copy()
    array[...] = 0  # the stub writes into its memory
    assert value.shape == expected.shape
    assert value.raw.tobytes() == expected.tobytes()
    assert states.used_bytes == LEAST + expected.nbytes + VALUE_BYTES


@given(texts=st.lists(st.binary(max_size=8), min_size=1, max_size=5), cut=st.integers(-4, 4))
def test_texts_are_checked(texts: list[bytes], cut: int) -> None:
    states = states_of("STRING")
    raw = np.frombuffer(encode_bytes(np.array(texts, object)), np.uint8)
    raw = raw[:cut] if cut < 0 else np.concatenate([raw, np.zeros(cut, np.uint8)])
    request = request_of(states)
    outputs: Any = {"O": WireTensor(BYTES, (1, len(texts)), raw)}
    answer = states.accept(request, Response(outputs))
    assert isinstance(answer, ModelError) == (cut != 0)


@pytest.mark.parametrize("output", [None, "text", 1])
def test_an_answer_that_is_no_tensor_is_an_error_of_its_request(output: Any) -> None:
    states = states_of()
    request = request_of(states)
    answer = states.accept(request, Response({"O": output}))
    assert isinstance(answer, ModelError)
    assert "cannot be kept" in str(answer)
    assert request.states is not None
    assert request.states.new is None


def test_memory_is_counted_until_nothing_refers_to_it() -> None:
    states = states_of()
    assert states.used_bytes == LEAST
    count = LIMIT // (4096 + VALUE_BYTES)
    kept = [accepted(states, np.zeros((1, 1024), np.float32)) for _ in range(count)]
    # Small values count with what they take beside their bytes.
    least = range((LIMIT - states.used_bytes) // LEAST)
    kept += [accepted(states, np.zeros((1, 1), np.float32)) for _ in least]
    assert LIMIT - LEAST < states.used_bytes <= LIMIT
    late = request_of(states)
    answer = states.accept(late, Response({"O": np.zeros((1, 1), np.float32)}))
    assert isinstance(answer, ModelError)
    assert "MOONPOOL_STATE_LIMIT_BYTES allows 65536" in str(answer)
    del kept[0]
    accepted(states, np.zeros((1, 1), np.float32))
    kept.clear()
    assert states.used_bytes == LEAST


def test_versions_of_a_model_have_one_limit_together() -> None:
    account = MemoryAccount()
    first, second = states_of(account=account), states_of(account=account)
    half = np.zeros((1, LIMIT // 8), np.float32)
    kept = accepted(first, half)
    late = request_of(second)
    answer = second.accept(late, Response({"O": half}))
    assert isinstance(answer, ModelError)
    assert answer.code == "UNAVAILABLE"
    assert "of model 'm', in all its versions, would take" in str(answer)
    del kept
    accepted(second, half)


@pytest.mark.parametrize("datatype", ["FP32", "STRING"])
def test_a_state_beyond_the_limit_is_refused_before_it_is_copied(datatype: str) -> None:
    """It has a terabyte, of which no copy could be made."""
    states = states_of(datatype)
    output: Any = np.broadcast_to(np.float32(0), (1, 1 << 38))
    if datatype == "STRING":
        output = WireTensor(BYTES, (1, 1 << 38), output[0])
    request = request_of(states)
    answer = states.accept(request, Response({"O": output}))
    assert isinstance(answer, ModelError)
    assert "MOONPOOL_STATE_LIMIT_BYTES allows 65536" in str(answer)


@pytest.mark.parametrize(
    ("outputs", "asked", "told", "hidden"),
    [
        (1, None, None, {"O"}),
        (1, [0], [0, 1], {"O"}),
        (1, [], [1], {"O"}),
        (2, None, None, set()),
        (2, [0], [0, 1], {"O"}),
        (2, [1], [1], set()),
    ],
)
def test_the_model_gives_states_that_its_caller_does_not_get(
    outputs: int, asked: list[int] | None, told: list[int] | None, hidden: set[str]
) -> None:
    states = states_of(outputs=outputs)
    request = request_of(states, asked)
    assert request.details is not None
    assert request.details.outputs == told
    assert request.states is not None
    assert request.states.hidden == hidden
    # It is executed once more.
    states.begin(request, states.initial)
    assert request.states.hidden == hidden
