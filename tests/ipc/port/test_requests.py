"""The compiled port makes the requests that Python makes, or none."""

from __future__ import annotations

import copy
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.heap_region import HeapRegion
from tests.runtime.recorder import tensor

from moonpool import InvalidRequest
from moonpool.ipc import port
from moonpool.ipc.arena import block_bytes
from moonpool.ipc.tensors import CODES, DTYPES, NAMES
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import Details
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.server.inference.request import InputPlan, RegionPlace, RequestPlan, make_request

DATATYPES = [name for code, name in NAMES.items() if code in DTYPES]
REGION = HeapRegion(1, 1 << 20)

pytestmark = pytest.mark.skipif(port.compiled is None, reason="the port is not compiled")


class Never:
    """Stands in for `Spec`: no request is usual."""

    def request(self, _: object) -> None:
        return None

    def request_in(self, *_: object) -> None:
        return None


def signatures(max_batch_size: int, inputs: list[dict[str, Any]]) -> tuple[Signature, Signature]:
    """Return the signature of a model with these inputs, and one that takes Python's way alone."""
    raw = {
        "name": "m",
        "backend": "any",
        "max_batch_size": max_batch_size,
        "input": inputs,
        "output": [tensor("Y", "FP32", 4)],
    }
    compiled = Signature(ModelConfig.from_dict(raw))
    in_python = copy.copy(compiled)
    in_python.usual = Never()  # type: ignore[assignment]
    return compiled, in_python


def described(request: Any) -> dict[str, Any]:
    """Return all that a request says, arrays by their identity."""
    shapes = request.shapes
    found = {name: getattr(request, name, None) for name in port.PythonRequest.__slots__}
    return {
        **found,
        "arrays": [id(array) for array in request.arrays],
        "shapes": (list(map(tuple, shapes.tensors)), shapes.batch_size, shapes.signature),
        "is_shared": shapes.is_shared,
    }


def made(signature: Signature, inputs: Any) -> Any:
    try:
        return described(signature.request(inputs))
    except InvalidRequest as error:
        return str(error)


def placed(array: np.ndarray, memory: str) -> Any:
    """Return an array with these values in memory of this kind."""
    if memory == "own":
        return array
    if memory == "view":
        return np.concatenate([array.ravel(), array.ravel()])[: array.size].reshape(array.shape)
    token: object = (1, 0) if memory == "output" else "callers"
    lease = REGION.lease(0, max(64, array.nbytes), lambda _: None, token)
    view = np.ndarray(array.shape, array.dtype, lease)
    view[...] = array
    return view


dims = st.lists(st.sampled_from([-1, 1, 2, 3]), min_size=1, max_size=3)
specs = st.lists(st.tuples(st.sampled_from(DATATYPES), dims, st.booleans()), min_size=1, max_size=3)
memories = st.sampled_from(["own", "view", "output", "callers"])


@given(st.data(), st.sampled_from([0, 1, 4]), specs)
def test_the_compiled_port_makes_the_requests_that_python_makes(
    data: st.DataObject, max_batch_size: int, wanted: list[Any]
) -> None:
    inputs = [
        {**tensor(f"X{i}", datatype, *dims), "allow_ragged_batch": ragged and max_batch_size > 0}
        for i, (datatype, dims, ragged) in enumerate(wanted)
    ]
    compiled, in_python = signatures(max_batch_size, inputs)
    rows = data.draw(st.integers(0, 5))
    given_inputs: dict[str, Any] = {}
    for i, (datatype, dims, _) in enumerate(wanted):
        shape = [data.draw(st.integers(0, 4)) if dim < 0 else dim for dim in dims]
        if data.draw(st.integers(0, 9)) == 0:
            shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
        elif max_batch_size:
            shape = [rows, *shape]
        code = next(code for code, name in NAMES.items() if name == datatype)
        array = np.zeros(shape, DTYPES[code])
        given_inputs[f"X{i}"] = placed(array, data.draw(memories))
    assert made(compiled, given_inputs) == made(in_python, given_inputs)


@given(st.data(), st.sampled_from([0, 1, 4]), specs)
def test_the_compiled_port_makes_the_requests_in_messages_that_python_makes(
    data: st.DataObject, max_batch_size: int, wanted: list[Any]
) -> None:
    inputs = [
        {**tensor(f"X{i}", datatype, *dims), "allow_ragged_batch": ragged and max_batch_size > 0}
        for i, (datatype, dims, ragged) in enumerate(wanted)
    ]
    compiled, _ = signatures(max_batch_size, inputs)
    rows, begin = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 9))
    plan, arrays, message = RequestPlan(), {}, b"." * begin
    lent: dict[RegionPlace, Any] = {}
    for i, (datatype, dims, _) in data.draw(st.permutations(list(enumerate(wanted)))):
        shape = [data.draw(st.integers(0, 4)) if dim < 0 else dim for dim in dims]
        if max_batch_size:
            shape = [rows, *shape]
        array = np.arange(np.prod(shape)).reshape(shape).astype(DTYPES[CODES[datatype]])
        place = RegionPlace("r", i * 4096, array.nbytes) if data.draw(st.booleans()) else None
        plan.inputs.append(InputPlan(f"X{i}", CODES[datatype], shape, place, array.nbytes))
        if place is None:
            message += array.tobytes()
        else:
            plan.has_shared = True
            lent[place] = REGION.lease(i * 4096, array.nbytes, lambda _: None, "a client's")
            lent[place][:] = array.reshape(-1).view(np.uint8)
            array = np.ndarray(array.shape, array.dtype, lent[place])
        arrays[f"X{i}"] = array
    hosted: Any = SimpleNamespace(signature=compiled, model=None)
    service: Any = SimpleNamespace(lender=lambda _: lambda *place: lent[RegionPlace(*place)])
    found = plan.usual(service, hosted, message, begin, None, None, has_views=False)
    if rows > max_batch_size > 0 or not all(array.nbytes for array in arrays.values()):
        assert found is None
        return
    assert found is not None
    expected = make_request(hosted, arrays)
    assert {**described(found), "arrays": None} == {**described(expected), "arrays": None}
    for array, like in zip(found.arrays, expected.arrays, strict=True):
        assert (array.dtype, array.shape) == (like.dtype, like.shape)
        assert array.tobytes() == like.tobytes()
        assert array.base is message or any(array.base is lease for lease in lent.values())
        assert not array.flags.writeable
        assert array.flags.aligned == (array.ctypes.data % array.dtype.alignment == 0)


numbers = st.sampled_from([-(1 << 63), -1, 0, 1, 4, 8, 16, 17, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1])  # fmt: skip


@given(numbers, numbers, st.lists(numbers, max_size=3), numbers, st.integers(0, 24))
def test_a_lie_about_sizes_places_and_shapes_makes_no_request(
    place: int, size_bytes: int, shape: list[int], offset: int, length: int
) -> None:
    compiled, _ = signatures(0, [tensor("X", "FP32", -1, -1)])
    plan = [InputPlan("X", CODES["FP32"], shape, None, size_bytes)]
    message, begin = bytes(range(length)), min(offset, 1 << 62)
    for sent in (None, [(place, size_bytes)]):
        found = compiled.usual.request_in(plan, message, begin, sent, False)
        at = begin if sent is None else begin + place
        fits = (
            len(shape) == 2
            and min(shape) > 0
            and size_bytes == 4 * prod(shape)
            and min(begin, at, at - begin) >= 0
            and at + size_bytes <= length
            and (sent is not None or at + size_bytes == length)
        )
        assert (found is not None) == fits
        if fits:
            assert found.arrays[0].tobytes() == message[at : at + size_bytes]


@pytest.mark.parametrize(
    "plan",
    [
        [],
        [InputPlan("Y", CODES["FP32"], [1], None, 4)],
        [InputPlan("X", CODES["INT32"], [1], None, 4)],
        [InputPlan("X", CODES["FP32"], [1], RegionPlace("r", 0, 4), 4)],
        [InputPlan("X", CODES["FP32"], [1], None, 4, np.zeros(1, np.float32))],
        [InputPlan("X", CODES["FP32"], [1.0], None, 4)],  # type: ignore[list-item]
        [InputPlan("X", CODES["FP32"], ["1"], None, 4)],  # type: ignore[list-item]
        [InputPlan("X", CODES["FP32"], [1, 1], None, 4)],
        2 * [InputPlan("X", CODES["FP32"], [1], None, 4)],
    ],
)
def test_what_is_not_exactly_the_models_is_left_to_python(plan: list[InputPlan]) -> None:
    compiled, _ = signatures(0, [tensor("X", "FP32", -1)])
    assert compiled.usual.request_in(plan, bytes(4), 0, None, False) is None
    assert compiled.usual.request_in(plan, bytes(4), 0, [(0, 4)] * len(plan), False) is None


def _refuse(*_: object) -> None:
    raise InvalidRequest("no such region")


@pytest.mark.parametrize(
    "lend",
    [
        None,
        lambda *_: None,
        lambda *_: np.zeros(4, np.uint8),
        lambda *_: REGION.lease(0, 8, lambda _: None, "more than it is"),
        _refuse,
    ],
)
def test_memory_of_a_client_that_is_not_lent_as_it_is_described_is_left_to_python(lend: Any) -> None:
    compiled, _ = signatures(0, [tensor("X", "FP32", -1)])
    plan = [InputPlan("X", CODES["FP32"], [1], RegionPlace("r", 0, 4))]
    for sent in (None, list[Any]()):
        assert compiled.usual.request_in(plan, b"", 0, sent, False, lend) is None


def test_a_tensor_in_the_message_beside_one_in_memory_of_a_client_is_not_taken_for_that() -> None:
    compiled, _ = signatures(0, [tensor("X", "FP32", -1)])
    plan = [InputPlan("X", CODES["FP32"], [1], RegionPlace("r", 0, 4))]

    def lend(*_: object) -> Any:
        return REGION.lease(0, 4, lambda _: None, "a client's")

    assert compiled.usual.request_in(plan, bytes(4), 0, None, False, lend) is None
    assert compiled.usual.request_in(plan, bytes(4), 0, [(0, 4)], False, lend) is None
    assert compiled.usual.request_in(plan, bytes(4), 4, None, False, lend).has_views


def test_an_input_twice_is_left_to_python() -> None:
    compiled, _ = signatures(0, [tensor("X", "FP32", -1), tensor("Y", "FP32", -1)])
    plan = 2 * [InputPlan("X", CODES["FP32"], [1], None, 4)]
    assert compiled.usual.request_in(plan, bytes(8), 0, None, False) is None


def test_a_usual_request_in_a_message_is_made_by_the_port() -> None:
    compiled, _ = signatures(8, [tensor("X", "FP32", -1, 2)])
    before = port.compiled.counts()["request_in"]
    for rows in range(1, 9):
        for width in range(1, 200):
            size_bytes = rows * width * 8
            plan = [InputPlan("X", CODES["FP32"], (rows, width, 2), None)]
            message = bytearray(size_bytes + 3)
            made = compiled.request_in(plan, message, 1, [(2, size_bytes)], None, Details("id"), has_views=True)
            assert made is not None
            assert (made.request_id, made.has_views, made.wants_wire) == ("id", True, True)
    assert port.compiled.counts()["request_in"] - before == 8 * 199


def test_a_usual_request_is_made_by_the_port() -> None:
    compiled, _ = signatures(8, [tensor("X", "FP32", -1, 2)])
    before = port.compiled.counts()["request"]
    for rows in range(1, 9):
        for width in range(1, 200):
            compiled.request({"X": np.zeros((rows, width, 2), np.float32)})
    assert port.compiled.counts()["request"] - before == 8 * 199


def test_a_model_without_inputs_gets_requests() -> None:
    compiled, in_python = signatures(0, [])
    assert made(compiled, {}) == made(in_python, {})
    assert made(compiled, {"X": np.zeros(1, np.float32)}) == made(in_python, {"X": np.zeros(1, np.float32)})


@given(st.integers(0, 1 << 22))
def test_a_block_is_at_most_a_quarter_larger_than_what_it_is_for(size_bytes: int) -> None:
    found = block_bytes(size_bytes)
    assert found % 64 == 0
    assert size_bytes <= found
    assert found - 64 <= size_bytes * 1.25
    assert block_bytes(found) == found
