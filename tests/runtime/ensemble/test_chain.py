"""A chain goes on whichever comes first: the outcome of a step, or the end of its submission."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.runtime.recorder import tensor

from moonpool.ipc.port import Shapes
from moonpool.runtime.ensemble.chain import ChainRun
from moonpool.runtime.ensemble.graph import Flow
from moonpool.runtime.ensemble.members import StepModel
from moonpool.runtime.errors import ModelUnavailable
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import InferenceRequest, Response
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.process.threads import trusted_handlers

X = np.zeros(1, np.float32)
CONFIG = ModelConfig.from_dict(
    {"name": "m", "backend": "any", "input": [tensor("X", "FP32", 1)], "output": [tensor("OUT", "FP32", 1)]}
)
TENSORS = ["IN", "A", "B", "Y"]
FLOW = Flow(
    "e",
    sink=3,
    is_decoupled=False,
    given=TENSORS[:1],
    readers={name: (number,) for number, name in enumerate(TENSORS)},
    needs=[1] * 4,
    inputs=[(("X", name),) for name in TENSORS[:3]],
    outputs=[(("OUT", name),) for name in TENSORS[1:]],
    chain=[(number, ("X",), "OUT") for number in range(3)],
    last="Y",
)


@pytest.fixture(autouse=True)
def _no_handler_raises() -> Iterator[None]:
    """Let the steps be taken here: on a thread on which signal handlers may raise, the reactor takes them."""
    with trusted_handlers():
        yield


class Owner:
    """An ensemble of steps that all have the same model, which is the test."""

    def __init__(self, *, answers_at_once: bool, is_driven_by_caller: bool, fails_at: int = -1) -> None:
        """The model of step `fails_at` cannot be looked up."""
        self._fails_at = fails_at
        self.outcomes: list[object] = []
        self.requests: list[Any] = []
        self.offered: list[object] = []
        self._answers_at_once = answers_at_once
        self._is_driven_by_caller = is_driven_by_caller
        self.caller = SimpleNamespace(given=lambda _: {"IN": X}, response=lambda _, tensors: sorted(tensors))
        hosted = SimpleNamespace(
            model=SimpleNamespace(config=CONFIG),
            signature=Signature(CONFIG),
            scheduler=SimpleNamespace(enter=self._submit),
        )
        self._members = [StepModel(cast(Any, hosted), number, ()) for number in range(3)]

    def member(self, number: int) -> Any:
        if number == self._fails_at:
            raise KeyError(number)
        return self._members[number]

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


def request_of(waiter: Any) -> InferenceRequest:
    request = InferenceRequest([], Shapes([], 1, None, is_shared=True))
    request.waiter = waiter
    return request


def run_of(owner: Owner) -> ChainRun:
    """Make a run of three steps."""
    waiter = SimpleNamespace(
        interruptible=False, may_be_told_again=True, gather=lambda *_: False, appoint=lambda _: True
    )
    return ChainRun(cast(Any, owner), request_of(waiter), FLOW)


@pytest.mark.parametrize("answers_at_once", [False, True])
@pytest.mark.parametrize("is_driven_by_caller", [False, True])
def test_a_step_may_end_before_it_is_submitted(answers_at_once: bool, is_driven_by_caller: bool) -> None:
    owner = Owner(answers_at_once=answers_at_once, is_driven_by_caller=is_driven_by_caller)
    run = run_of(owner)

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


@pytest.mark.promise(
    "Ensembles", "If a step of an ensemble cannot be submitted, for whatever reason, its request ends with that error."
)
@pytest.mark.parametrize("answers_at_once", [False, True])
@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_an_error_of_any_kind_ends_the_run(answers_at_once: bool, fails_at: int) -> None:
    owner = Owner(answers_at_once=answers_at_once, is_driven_by_caller=False, fails_at=fails_at)
    run = run_of(owner)

    run.begin()
    for number in range(fails_at):
        if not answers_at_once:
            owner.answer(owner.requests[number])

    (error,) = owner.outcomes
    assert isinstance(error, KeyError)
    assert run.is_over
    assert len(owner.requests) == fails_at


def test_an_error_after_the_end_of_a_run_goes_on_unless_it_is_of_moonpool() -> None:
    owner = Owner(answers_at_once=False, is_driven_by_caller=False, fails_at=1)
    run = run_of(owner)
    run.begin()
    # Another thread ends the run while this one goes on.
    member = owner.member

    def leaving(number: int) -> Any:
        run.fail(ModelUnavailable("unloaded"))
        return member(number)

    owner.member = leaving  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        owner.answer(owner.requests[0])
    assert [type(each) for each in owner.outcomes] == [ModelUnavailable]
