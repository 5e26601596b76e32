"""Inputs of usual requests: they are placed as those of any request, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.heap_region import HeapRegion

from moonpool.ipc.arena import Arena, Block
from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.memory import SHARED_BYTES
from moonpool.stub.hosts.call_tensors import Placed, UsualInputs
from moonpool.stub.pb_utils.request import InferenceRequest, InferenceTrace
from moonpool.stub.pb_utils.tensor import MemoryType, PreferredMemory, Tensor
from moonpool.stub.peers.regions import Regions

SIZE = 1 << 14


def regions(size_bytes: int = SIZE) -> Regions:
    made = Regions(lambda *_, **__: None)

    def grow(_: int) -> Any:
        raise OutOfMemory("no more")

    made.arena = Arena(grow)
    made.arena.add(HeapRegion(9, size_bytes))
    return made


def contents(made: Regions, blocks: list[list[int]], rows: list[list[Any]]) -> list[bytes]:
    """Return the bytes of each input."""
    memory = made.arena.regions()[0].memory()
    starts = [blocks[block][1] + offset for *_, block, offset, _ in rows]
    return [bytes(memory[at : at + row[-1]]) for at, row in zip(starts, rows, strict=True)]


def request(inputs: list[Tensor], **fields: Any) -> InferenceRequest:
    return InferenceRequest(
        **{"model_name": "m", "inputs": inputs, "requested_output_names": ["Y"], **fields}
    )


ARRAYS = st.builds(
    lambda dtype, shape, value, step: np.full([2 * each for each in shape], value, dtype)[
        tuple(slice(None, None, step) for _ in shape)
    ],
    st.sampled_from(["f4", "i8", "?", "u1", "f2"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 1),
    st.integers(1, 2),
)
WORDS = st.builds(lambda texts: np.array(texts, object), st.lists(st.text(max_size=3), max_size=3))


@settings(max_examples=200, deadline=None)
@given(kinds=st.lists(st.lists(ARRAYS | WORDS, max_size=3), min_size=1, max_size=3), data=st.data())
def test_a_request_is_placed_as_any_other(kinds: list[list[Any]], data: st.DataObject) -> None:
    ours, theirs = regions(), regions()
    usual = UsualInputs(ours)
    for _ in range(4):
        arrays = [np.array(each) for each in data.draw(st.sampled_from(kinds))]
        for each in arrays:
            if each.dtype != object:
                each[...] = data.draw(st.integers(0, 1))
        asked = request([Tensor(f"X{i}", each) for i, each in enumerate(arrays)])
        expected = Placed(theirs, asked._inputs)
        taken: list[Block] = []
        found = usual.place(asked, taken)
        if found is None:
            placed = Placed(ours, asked._inputs)
            usual.learn(asked, placed)
            # Strings are never usual.
            is_plain = bool(arrays) and all(each.dtype != object for each in arrays)
            assert (usual.place(asked) is not None) == is_plain
            if is_plain:
                ours._collect()
            blocks, rows = placed.blocks, placed.rows
        else:
            blocks, rows = found
        assert rows == expected.rows
        assert [size for *_, size in blocks] == [size for *_, size in expected.blocks]
        assert contents(ours, blocks, rows) == contents(theirs, expected.blocks, expected.rows)
        if found is not None:
            ours.take_back(taken)
            ours._collect()


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": "i"},
        {"correlation_id": 1},
        {"flags": 1},
        {"timeout": 1},
        {"parameters": {}},
        {"trace": InferenceTrace("t")},
        {"preferred_memory": PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_request_with_more_than_inputs_is_not_usual(fields: dict[str, Any]) -> None:
    made = regions()
    usual = UsualInputs(made)
    inputs = [Tensor("X", np.zeros(4))]
    plain, other = request(inputs), request(inputs, **fields)
    usual.learn(plain, Placed(made, inputs))

    assert usual.place(plain) is not None
    assert usual.place(other) is None
    usual.learn(other, Placed(made, inputs))
    assert usual.place(other) is None


def test_inputs_in_shared_memory_stay_there() -> None:
    made = regions(4 * SHARED_BYTES)
    usual = UsualInputs(made)
    array = np.ndarray(SHARED_BYTES, np.uint8, made.empty(SHARED_BYTES))
    for inputs in ([Tensor("X", array)], [Tensor("X", array), Tensor("Z", np.zeros(4))]):
        asked = request(inputs)
        usual.learn(asked, Placed(made, inputs))
        assert usual.place(asked) is None


def test_small_inputs_in_shared_memory_are_copied() -> None:
    made = regions(4 * SHARED_BYTES)
    usual = UsualInputs(made)
    asked = request([Tensor("X", np.ndarray(SHARED_BYTES - 1, np.uint8, made.empty(SHARED_BYTES)))])
    placed = Placed(made, asked._inputs)
    usual.learn(asked, placed)

    assert not placed.has_shared
    assert usual.place(asked) is not None


def test_fields_that_the_model_has_changed_are_not_usual() -> None:
    made = regions()
    usual = UsualInputs(made)
    asked = request([Tensor("X", np.zeros(4))])
    asked._inputs[0]._shape = [4]
    usual.learn(asked, Placed(made, asked._inputs))

    assert usual.place(asked) is None


def test_a_request_without_room_takes_nothing() -> None:
    made = regions()
    usual = UsualInputs(made)
    asked = request([Tensor("X", np.zeros(SIZE - 64, np.uint8))])
    placed = Placed(made, asked._inputs)
    usual.learn(asked, placed)

    with pytest.raises(OutOfMemory, match="no more"):
        usual.place(asked)
    made.take_back(placed.ours)
    assert usual.place(asked) is not None
