"""A call of a model, without the runtime that serves it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.runtime.scripted import Pair

from moonpool.runtime.stubs.calls.requests import ModelCall, write_outputs


class Told:
    """Stands for the scheduler of the model that is asked."""

    def __init__(self) -> None:
        self.cancelled: list[object] = []

    def tell_cancelled(self, request: object) -> None:
        self.cancelled.append(request)


@pytest.mark.promise("Requests between models", "`cancel` of an iterator only sets …")
def test_a_model_is_told_once_however_often_the_asker_cancels() -> None:
    call = ModelCall(1, "m", lambda *_: None, takes_many=True, batch=0)
    scheduler: Any = Told()
    request: Any = object()
    call.scheduler, call.request = scheduler, request

    for _ in range(3):
        call.cancel()

    assert scheduler.cancelled == [request]
    assert call.is_cancelled


@pytest.mark.parametrize("size", [1, 63, 64, 65])
def test_outputs_that_are_copied_lie_one_behind_the_other(size: int) -> None:
    pair = Pair()
    given = {name: np.full(size, number, np.uint8) for number, name in enumerate("ABC", 1)}
    blocks: list[list[int]] = []
    rows: list[list[Any]] = []
    write_outputs(given, pair.link.borrowed_blocks, blocks, rows)
    pair.close()

    ((_, _, block_bytes),) = blocks
    places = [(offset, offset + size_bytes) for *_, offset, size_bytes in rows]
    assert places[-1][1] <= block_bytes
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
