"""A call of a model, without the runtime that serves it."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.runtime.stubs.calls.requests import ModelCall


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
