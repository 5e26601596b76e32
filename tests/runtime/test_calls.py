"""A call of a model, without the runtime that serves it."""

from __future__ import annotations

from typing import Any

from moonpool.runtime.calls import Call


class Told:
    """Stands for the scheduler of the model that is asked."""

    def __init__(self) -> None:
        self.cancelled: list[object] = []

    def tell_cancelled(self, request: object) -> None:
        self.cancelled.append(request)


def test_a_model_is_told_once_however_often_the_asker_cancels() -> None:
    call = Call(1, "m", lambda *_: None, takes_many=True, batch=0)
    scheduler: Any = Told()
    request: Any = object()
    call.scheduler, call.request = scheduler, request

    for _ in range(3):
        call.cancel()

    assert scheduler.cancelled == [request]
    assert call.is_cancelled
