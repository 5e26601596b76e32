"""The compiled port makes the requests that Python makes, or none."""

from __future__ import annotations

import copy
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
from moonpool.ipc.tensors import DTYPES, NAMES
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.signature import Signature

DATATYPES = [name for code, name in NAMES.items() if code in DTYPES]
REGION = HeapRegion(1, 1 << 20)


class Never:
    """Stands in for `Spec`: no request is usual."""

    def request(self, _: object) -> None:
        return None


@pytest.fixture(autouse=True)
def _with_the_port() -> None:
    if port.compiled is None:
        pytest.skip("the port is not compiled: python setup.py build_ext --inplace")


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
    assert made(compiled, {"X": np.zeros(1, np.float32)}) == made(
        in_python, {"X": np.zeros(1, np.float32)}
    )


@given(st.integers(0, 1 << 22))
def test_a_block_is_at_most_a_quarter_larger_than_what_it_is_for(size_bytes: int) -> None:
    found = block_bytes(size_bytes)
    assert found % 64 == 0
    assert size_bytes <= found
    assert found - 64 <= size_bytes * 1.25
    assert block_bytes(found) == found
