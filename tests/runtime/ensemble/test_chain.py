"""A chain goes on whichever comes first: the outcome of a step, or the end of its submission."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from moonpool.runtime.ensemble.chain import ChainRun
from moonpool.runtime.model.request import Response

X = np.zeros(1, np.float32)


class Owner:
    """An ensemble of steps that all have the same model, which is the test."""

    def __init__(self, *, answers_at_once: bool, is_driven_by_caller: bool) -> None:
        self.outcomes: list[object] = []
        self.requests: list[Any] = []
        self.offered: list[object] = []
        self._answers_at_once = answers_at_once
        self._is_driven_by_caller = is_driven_by_caller
        self.caller = SimpleNamespace(
            given=lambda _: {"IN": X}, response=lambda _, tensors: sorted(tensors)
        )
        self._member = SimpleNamespace(
            inputs=lambda inputs: inputs,
            request=lambda *_: SimpleNamespace(),
            hosted=SimpleNamespace(scheduler=SimpleNamespace(submit=self._submit)),
        )

    def member(self, _: int) -> Any:
        return self._member

    def ended(self, _: object, outcome: object) -> None:
        self.outcomes.append(outcome)

    def _submit(self, request: Any) -> object:
        self.requests.append(request)
        if self._answers_at_once:
            self.answer(request)
        if not self._is_driven_by_caller:
            return None
        return SimpleNamespace(offer=lambda: self.offered.append(request))

    def answer(self, request: Any) -> None:
        request.waiter.resolve(Response({"OUT": X}, {}))


@pytest.mark.parametrize("answers_at_once", [False, True])
@pytest.mark.parametrize("is_driven_by_caller", [False, True])
def test_a_step_may_end_before_it_is_submitted(
    answers_at_once: bool, is_driven_by_caller: bool
) -> None:
    owner = Owner(answers_at_once=answers_at_once, is_driven_by_caller=is_driven_by_caller)
    waiter = SimpleNamespace(interruptible=False, gather=lambda *_: False, appoint=lambda _: True)
    flow = SimpleNamespace(
        given=["IN"], chain=[(number, ("X",), "OUT") for number in range(3)], last="Y", name="e"
    )
    run = ChainRun(cast(Any, owner), cast(Any, SimpleNamespace(waiter=waiter)), cast(Any, flow))

    execution = run.begin()

    assert (execution is not None) is is_driven_by_caller
    for number in range(3):
        if not answers_at_once:
            assert owner.outcomes == []
            owner.answer(owner.requests[number])
    assert owner.outcomes == [["Y"]]
    assert len(owner.requests) == 3
    # The caller drives the first one without being asked.
    assert len(owner.offered) == 2 * is_driven_by_caller
