"""One request of an ensemble in which each step reads one tensor of the step before. Most ensembles are such chains.

Theory of operation. It does what a `GraphRun` does for the same flow, in a fraction of the time: one step runs at a
time, so the run itself is the caller who waits for it, and there is nothing to decide and no lock.

*Who goes on.* A step may end before the thread that submits it has come back from that: another thread may have driven
it, or its model answers at once. Both write into `_turn`, an append being atomic: the one the outcome, the other
`_SUBMITTED`. The one that is second goes on. So exactly one of them does, and models that answer at once make a loop
and no recursion.

*Signals.* This module is compiled as it is, as the lane is, and steps are submitted by `enter`. So a chain goes on on
the main thread.

*Who leaves.* The request of a step is noted before it is submitted. If the run is over by the time that it was
submitted, the thread that submitted it leaves it again, so no order of the two loses it.

*Errors.* To submit a step may raise anything: a model is gone, a backend has answered with nonsense, a signal handler
runs. The thread may have an execution in its hands by then, which it gives to the reactor, and the error becomes the
outcome. If the run has an outcome already, an error that is not moonpool's goes on, as nobody else would hear of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.ensemble.graph import Flow
from moonpool.runtime.ensemble.members import (
    SequencedTensor,
    StepModel,
    TensorSequence,
    with_sequence,
    without_sequence,
)
from moonpool.runtime.ensemble.run import RunOwner, give_up, of_step
from moonpool.runtime.model.request import InferenceRequest, Outcome, Response, Waiter
from moonpool.runtime.process.threads import is_interruptible
from moonpool.runtime.schedule.lane import Execution, Lane, ThreadWaiter
from moonpool.runtime.schedule.scheduler import Scheduler

_IS_COMPILED = not __file__.endswith(".py")
_ndarray = np.ndarray
# The step was submitted, and its outcome is to come, or has been looked for.
_SUBMITTED = object()


class ChainRun:
    """One request of a chain, and the caller who waits for each step: a `Waiter`, whose head says what each method is
    for.
    """

    # The run of a caller that an exception interrupts in it is over: it ignores what comes twice.
    may_be_told_again = _IS_COMPILED
    may_block = takes_many = False

    __slots__ = (
        "_at",
        "_chain",
        "_flow",
        "_output",
        "_owner",
        "_request",
        "_scheduler",
        "_turn",
        "durations_ns",
        "interruptible",
        "is_over",
        "request",
    )

    def __init__(self, owner: RunOwner, request: InferenceRequest, flow: Flow) -> None:
        self._owner = owner
        self._flow = flow
        self._chain = flow.chain
        self.request = request
        self.interruptible = request.waiter.interruptible
        # The number of steps that have begun, and the output that is wanted of the last one.
        self._at = 0
        self._output = ""
        self._turn: list[object]
        # The request of the step that runs, and its scheduler.
        self._request: InferenceRequest | None = None
        self._scheduler: Scheduler
        self.is_over = False
        self.durations_ns = [0, 0, 0]

    def begin(self) -> Execution | None:
        """Submit the first step. Returns its execution, claimed, if the caller should drive it."""
        value = self._owner.caller.given(self.request).get(self._flow.given[0])
        if not self._chain:
            self._deliver(value)
            return None
        self._turn = turn = []
        try:
            execution = self._submit(value)
            turn.append(_SUBMITTED)
        except Exception as error:
            if not self._broke(error):
                raise
            return None
        # A model that responds apart from its batch may be quicker than this thread, which then has an execution to
        # drive all the same.
        self._follow(turn[0])
        return execution

    def _follow(self, outcome: object) -> None:
        """Go on with the outcome of the last step that was submitted, if it is there, and with those that follow at
        once.
        """
        if not self._goes_on_here():
            self._owner.reactor.call_soon(partial(self._follow, outcome))
            return
        while outcome is not _SUBMITTED:
            outcome = self._took(outcome)

    def _goes_on_here(self) -> bool:
        """Return True if the run loses nothing where a signal handler raises on this thread."""
        is_safe = _IS_COMPILED and self.request.waiter.may_be_told_again
        return is_safe or not is_interruptible()

    def _took(self, outcome: object) -> object:
        """Go on with the outcome of a step. Returns that of the next one if it is there already."""
        request, self._request = self._request, None
        if not isinstance(outcome, Response):
            self.fail(of_step(self._flow, outcome))  # type: ignore[arg-type]
            return _SUBMITTED
        if self.is_over:
            return _SUBMITTED
        try:
            tensors: Any = outcome.outputs
            if outcome.parameters and request is not None:
                tensors = with_sequence(outcome, request)
            value = tensors.get(self._output)
            if self._at < len(self._chain):
                self._turn = turn = []
                execution = self._submit(value)
                if execution is not None:
                    self._offer(execution)
                turn.append(_SUBMITTED)
                return turn[0]
        except Exception as error:
            if not self._broke(error):
                raise
            return _SUBMITTED
        self._deliver(value)
        return _SUBMITTED

    def _broke(self, error: Exception) -> bool:
        """End the run with an error of this thread, which may have an execution in its hands.

        Returns False if the error has to go on.
        """
        if self.stop(self):
            self._owner.ended(self, of_step(self._flow, error))
            return True
        return isinstance(error, MoonpoolError)

    def _submit(self, value: Any) -> Execution | None:
        """Submit the next step, which reads this tensor; None if it is left out. May raise anything."""
        number, names, self._output = self._chain[self._at]
        self._at += 1
        inputs = {} if value is None else dict.fromkeys(names, value)
        owner, sequence = self._owner, None
        member = owner.member(number)
        if type(value) is SequencedTensor:
            inputs, sequence = without_sequence(inputs)
        inputs = member.inputs(inputs)
        if type(value) is not _ndarray:
            signature = member.hosted.signature
            if signature.has_to_copy(inputs.values()):
                owner.fetching.start(signature, inputs, partial(self._fetched, member, sequence))
                return None
        return self._send(member, inputs, sequence)

    def _fetched(
        self, member: StepModel, sequence: TensorSequence | None, inputs: dict[str, Any] | MoonpoolError
    ) -> None:
        """Go on with inputs that were copied from a device."""

        def go_on() -> None:
            try:
                if isinstance(inputs, MoonpoolError):
                    raise inputs
                execution = self._send(member, inputs, sequence)
                if execution is not None:
                    self._offer(execution)
            except Exception as error:
                if not self._broke(error):
                    raise

        self._owner.reactor.call_soon(go_on)

    def _send(self, member: StepModel, inputs: dict[str, Any], sequence: TensorSequence | None) -> Execution | None:
        request = member.request(self._flow, inputs, sequence, self.request)
        request.waiter = self
        request.durations_ns = self.durations_ns
        self._scheduler = member.hosted.scheduler
        self._request = request
        if self.request.waiter.gather(self._scheduler, request):
            return None
        execution = self._scheduler.enter(request)
        if self.is_over:
            self._leave(None)
        return execution

    def _offer(self, execution: Execution) -> None:
        """Find a driver for the execution of a step, which the run has claimed."""
        execution.offer()
        if not self.appoint(execution) and execution.claim(self):
            execution.drive_in_reactor()

    # The end

    def _deliver(self, value: Any) -> None:
        owner, tensors = self._owner, {} if value is None else {self._flow.last: value}
        try:
            outcome = owner.caller.response(self.request, tensors)
        except Exception as error:  # an allocator may raise anything
            self.fail(error)
        else:
            self.is_over = True
            owner.ended(self, outcome)

    def fail(self, error: BaseException) -> None:
        """End the run with an error, unless it is over."""
        if self.stop():
            self._owner.ended(self, error)

    def stop(self, driver: Waiter | None = None) -> bool:
        """Give up the step that runs. Returns False if the run was over already. `driver` is that of `Run.stop`."""
        was_over, self.is_over = self.is_over, True
        self._leave(driver)
        return not was_over

    def _leave(self, driver: Waiter | None) -> None:
        request, self._request = self._request, None
        if request is not None:
            give_up(self._scheduler, request, self, driver)

    def tell_cancelled(self) -> None:
        """Let the model of the step that runs know that it may stop."""
        request = self._request
        if request is not None:
            self._scheduler.tell_cancelled(request)

    # The caller of the step

    def gather(self, scheduler: Lane, request: InferenceRequest) -> bool:  # noqa: ARG002
        return False

    def respond(self, outcome: Outcome) -> None:
        raise NotImplementedError

    def appoint(self, execution: Execution) -> bool:
        waiter = self.request.waiter
        if isinstance(waiter, ThreadWaiter):
            thread = waiter
            return thread.appoint(execution)
        return waiter.appoint(execution)

    def resolve(self, outcome: Outcome | None) -> None:
        turn = self._turn
        turn.append(outcome)
        if turn[0] is _SUBMITTED:
            self._follow(outcome)
