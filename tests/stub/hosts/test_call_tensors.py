"""Inputs of requests to other models: where they lie when the runtime reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.heap_region import HeapRegion

from moonpool.ipc.arena import Arena, Block
from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.memory import SHARED_BYTES
from moonpool.stub.hosts.call_tensors import Placed
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.stub.peers.regions import Regions


def regions(size_bytes: int = 4 * SHARED_BYTES) -> Regions:
    made = Regions(lambda *_, **__: None)

    def grow(_: int) -> Any:
        raise OutOfMemory("no more")

    made.arena = Arena(grow)
    made.arena.add(HeapRegion(9, size_bytes))
    return made


@pytest.mark.parametrize("size", [SHARED_BYTES - 1, SHARED_BYTES])
def test_inputs_in_shared_memory_stay_there_if_they_are_large(size: int) -> None:
    made = regions()
    lease = made.empty(SHARED_BYTES)
    placed = Placed(made, [Tensor("X", np.ndarray(size, np.uint8, lease))])
    (block,) = placed.blocks
    assert (block[1] == lease.offset) == (size == SHARED_BYTES)


def test_inputs_that_are_copied_lie_in_one_block() -> None:
    made = regions()
    arrays: list[Any] = [np.arange(4, dtype=np.float32), np.arange(3)[::2], np.zeros(0, np.int8)]
    placed = Placed(made, [Tensor(f"X{i}", each) for i, each in enumerate(arrays)])
    ((region, start, size),) = placed.blocks
    assert (region, size) == (9, 128)
    memory = made.arena.regions()[0].memory()
    for row, array in zip(placed.rows, arrays, strict=True):
        at = start + row[4]
        assert bytes(memory[at : at + row[5]]) == array.tobytes()


def test_a_request_without_room_takes_nothing() -> None:
    made = regions()
    ours: list[Block] = []
    with pytest.raises(OutOfMemory, match="no more"):
        Placed(made, [Tensor("X", np.zeros(5 * SHARED_BYTES, np.uint8))], ours)
    assert ours == []
    assert made.arena.used_bytes == 0
