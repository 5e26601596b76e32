"""One request of an ensemble of any form, from its first step to its end.

Theory of operation. `ensemble.scheduler` says who drives the steps and who ends a request. `EnsembleExecution` decides
which step runs when, and a `GraphRun` does it. Each step is a request to the scheduler of another model, as that of any
caller, and `_Step` is the caller that waits for it. What happens next happens on the thread that has the step's
outcome.

*Who drives the steps.* A thread can drive one execution at a time, and while it does, it cannot learn that another step
has failed. So the caller's thread drives a step that runs alone, and the reactor drives those that run beside each
other. It also drives all steps of a decoupled ensemble. An event loop drives any number.

*Locks.* `GraphRun._lock` guards the state machine. It is not held while a scheduler, a waiter or the ensemble's
scheduler is called upon. Several steps may end at once on several threads. The thread that finds `_is_submitting` unset
submits what is to be submitted, for the others too, and again until nothing is left. So models that answer at once make
a loop here and no recursion.

*Order.* The responses of a decoupled ensemble reach the caller in the order in which the last steps gave them, since
all of it happens on the reactor's thread. `_Step` brings it there.

*Who leaves.* A run that is over leaves the steps that have not ended. A step is noted before it is submitted. If the
run is over by the time that it was submitted, the thread that submitted it leaves it again, so no order of the two
loses it.

*What waits.* A decoupled model may answer faster than the steps that read its tensors, and each of its responses
becomes a request of such a step. A `ResponseBacklog` bounds them, on the reactor's thread. A request to another
ensemble counts as all those that it has open at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.ensemble.execution import DEADLOCK, EnsembleExecution, StepCall, StepProgress
from moonpool.runtime.ensemble.graph import Flow
from moonpool.runtime.ensemble.members import EnsembleCaller, StepModel, TensorSequence, with_sequence, without_sequence
from moonpool.runtime.errors import ModelError, own
from moonpool.runtime.model.request import InferenceRequest, Outcome, RequestTrace, Response, Waiter
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.schedule.backlog import RESPONSE_BYTES, ResponseBacklog
from moonpool.runtime.schedule.lane import Execution, ThreadWaiter
from moonpool.runtime.schedule.scheduler import Scheduler
from moonpool.runtime.stubs.calls.requests import Fetching

_NOTHING: dict[str, Any] = {}
# A step that waits takes more than its request: its tensors, their leases, and its place in a queue.
_STEP_BYTES = 4 * RESPONSE_BYTES


class Run(Protocol):
    """One request of an ensemble that is open. Any thread may call any method but `begin`."""

    request: InferenceRequest
    # Sums over the steps: compute input, infer and output.
    durations_ns: list[int]

    def begin(self) -> Execution | None:
        """Submit the first steps. Returns an execution, claimed, that the caller should drive, if there is one."""

    def fail(self, error: BaseException) -> None:
        """End the run with an error, unless it is over."""

    def stop(self, driver: Waiter | None = None) -> bool:
        """Give up all steps. Returns False if the run was over already.

        `driver` is the ensemble's caller if this is its thread: it may have been interrupted while it drove a step.
        """

    def tell_cancelled(self) -> None:
        """Let the models of all running steps know that they may stop."""


class RunOwner(Protocol):
    """The scheduler of an ensemble, as its runs see it. `ensemble.scheduler` says what each method is for."""

    name: str
    backlog_bytes: int
    reactor: Reactor
    caller: EnsembleCaller
    fetching: Fetching
    is_decoupled: bool
    has_gates: bool
    weights: Sequence[int]

    def member(self, step: int) -> StepModel: ...
    def passes(self, step: GateStep) -> bool: ...
    def leave_gates(self, steps: Iterable[GateStep]) -> None: ...
    def responded(self, request: InferenceRequest) -> None: ...
    def ended(self, run: Run, outcome: Outcome | None) -> None: ...


class GateStep(Protocol):
    """A step that may have to wait before it is submitted."""

    number: int

    def submit(self) -> None: ...


def of_step(flow: Flow, error: BaseException) -> BaseException:
    """Return the error of a step as one of the ensemble, with the step's code."""
    if not isinstance(error, MoonpoolError):
        return error
    prefix = f"in ensemble '{flow.name}', "
    told = own(error)
    told.args = (f"{prefix}{error}",)
    if error.public_message is not None:
        told.public_message = f"{prefix}{error.public_message}"  # type: ignore[attr-defined]
    return told


def give_up(scheduler: Scheduler, request: InferenceRequest, waiter: Waiter, driver: Waiter | None) -> None:
    """Give the request of a step up, as nobody waits for it. `waiter` waits for its outcome.

    `driver` is the ensemble's caller if this is its thread: it may have been interrupted while it drove the step.
    """
    for execution in scheduler.cancel(request):
        if driver is not None:
            execution.abandon(waiter)
            execution.abandon(driver)
        elif execution.claim(waiter):
            # It was offered to a caller who does not wait any more.
            execution.drive_in_reactor()


class GraphRun:
    """One request of an ensemble of any form."""

    __slots__ = (
        "_backlog",
        "_counted",
        "_is_submitting",
        "_is_thread",
        "_lock",
        "_machine",
        "_own",
        "_steps",
        "_todo",
        "durations_ns",
        "flow",
        "has_sequences",
        "is_over",
        "owner",
        "request",
    )

    def __init__(self, owner: RunOwner, request: InferenceRequest, flow: Flow) -> None:
        self.owner = owner
        self.request = request
        self.flow = flow
        self._machine: EnsembleExecution[Any] = EnsembleExecution(flow, owner.weights)
        self._lock = threading.Lock()
        self._todo: list[StepCall[Any]] = []
        # True while a thread submits what is in `_todo`.
        self._is_submitting = True
        # The steps that have not ended.
        self._steps: set[_Step] = set()
        # Until `begin` returns: the execution that the caller is going to drive.
        self._own: list[Execution] | None = []
        self._is_thread = isinstance(request.waiter, ThreadWaiter)
        self.is_over = False
        # True if a response has named another sequence than its request.
        self.has_sequences = False
        # Sums over the steps: compute input, infer and output.
        self.durations_ns = [0, 0, 0]
        # None if each step runs once. `_counted` steps wait or run, as the backlog knows them.
        self._backlog: ResponseBacklog | None = None
        self._counted = 0
        if owner.is_decoupled:
            self._backlog = ResponseBacklog(owner.name, owner.backlog_bytes, self.fail)

    def begin(self) -> Execution | None:
        """Submit the first steps. Returns an execution, claimed, that the caller should drive, if there is one."""
        progress = self._machine.begin(self.owner.caller.given(self.request))
        self._todo = progress.calls
        if progress.is_over:
            self._deliver(progress)
        self._submit_all()
        own, self._own = self._own, None
        if own and self.is_over:
            # Another step has failed meanwhile. The caller need not wait for this one.
            own[0].drive_in_reactor()
            return None
        return own[0] if own else None

    def took(self, step: _Step, outcome: Outcome | None, *, is_last: bool) -> None:
        """Take a response of a step, or its end, or both."""
        tensors: Mapping[str, Any] | None = None
        if isinstance(outcome, Response):
            tensors = outcome.outputs
            if outcome.parameters:
                tensors = step.sequenced(outcome)
        elif outcome is not None:
            self.fail(of_step(self.flow, outcome))
            return
        with self._lock:
            if self.is_over:
                return
            progress = self._machine.respond(step.number, tensors, is_final=is_last)
            if is_last:
                self._steps.discard(step)
            if progress.calls:
                self._todo += progress.calls
            is_busy, self._is_submitting = self._is_submitting, True
            waiting = self._machine.waiting_count
        if self._backlog is not None:
            self._count(self._backlog, waiting)
        if is_last and self.owner.has_gates:
            self.owner.leave_gates((step,))
        if progress.responses or progress.is_over:
            self._deliver(progress)
        if not is_busy:
            self._submit_all()

    def _count(self, backlog: ResponseBacklog, waiting: int) -> None:
        """Count the steps that wait or run. Too many of them end the run."""
        more, self._counted = waiting - self._counted, waiting
        if more < 0:
            backlog.taken_bytes -= more * _STEP_BYTES
        elif more:
            backlog.came_bytes += more * _STEP_BYTES
            backlog.look()

    # Responses

    def _deliver(self, progress: StepProgress[Any]) -> None:
        if progress.is_deadlock:
            self.fail(of_step(self.flow, ModelError(DEADLOCK, "INVALID_ARG")))
            return
        request, outcome = self.request, None
        for tensors in progress.responses:
            try:
                outcome = self.owner.caller.response(request, tensors)
            except Exception as error:  # an allocator may raise anything
                self.fail(error)
                return
            if self.owner.is_decoupled:
                self.owner.responded(request)
                if not request.left:
                    request.waiter.respond(outcome)
        if progress.is_over:
            self.is_over = True
            if self._backlog is not None:
                self._backlog.close()
            self.owner.ended(self, None if self.owner.is_decoupled else outcome)

    def fail(self, error: BaseException) -> None:
        """End the run with an error, unless it is over."""
        if self.stop():
            self.owner.ended(self, error)

    def broke(self, step: _Step, error: Exception) -> bool:
        """End the run with an error of this thread, which may have an execution of the step in its hands.

        Returns False if the error has to go on: it is not moonpool's, and the run has an outcome already.
        """
        step.leave(step)
        if self.stop():
            self.owner.ended(self, of_step(self.flow, error))
            return True
        return isinstance(error, MoonpoolError)

    # The end

    def stop(self, driver: Waiter | None = None) -> bool:
        """Give up all steps. Returns False if the run was over already. `driver` is that of `_Step.leave`."""
        with self._lock:
            was_over, self.is_over = self.is_over, True
            steps = list(self._steps)
            self._steps.clear()
            self._todo.clear()
        if self._backlog is not None:
            self._backlog.close()
        self.owner.leave_gates(steps)
        for step in steps:
            step.leave(driver)
        return not was_over

    def tell_cancelled(self) -> None:
        """Let the models of all running steps know that they may stop."""
        with self._lock:
            steps = list(self._steps)
        for step in steps:
            step.tell_cancelled()

    # Steps

    def _submit_all(self) -> None:
        """Submit what is to be submitted, until nothing is left. For the thread that has set `_is_submitting`."""
        while True:
            with self._lock:
                if self.is_over or not self._todo:
                    self._is_submitting = False
                    return
                step = _Step(self, self._todo.pop(0))
                self._steps.add(step)
            passes = not self.owner.has_gates or self.owner.passes(step)
            if self.is_over:
                # The thread that ended the run looked for the step in its gate before it was there.
                self.owner.leave_gates((step,))
            elif passes:
                step.submit()

    def drive(self, execution: Execution) -> None:
        """Find a driver for the execution of a step, which the step has claimed."""
        may_be_driven, own = self._may_be_driven(), self._own
        if own is not None and not own and may_be_driven:
            # `begin` returns it to the caller, and nobody else can drive it until then.
            own.append(execution)
            return
        execution.offer()
        if own is None and may_be_driven and self.request.waiter.appoint(execution):
            return
        if execution.claim(self):
            execution.drive_in_reactor()

    def appoint(self, execution: Execution) -> bool:
        """Offer an execution to the caller. Returns True if the caller takes it."""
        if self._own is not None or not self._may_be_driven():
            return False
        return self.request.waiter.appoint(execution)

    def _may_be_driven(self) -> bool:
        """Return True if the caller may drive a step."""
        if self._is_thread:
            return len(self._steps) == 1 and not self._todo and not self.owner.is_decoupled
        return not self.owner.is_decoupled


class _Step(Waiter):
    """One request to the model of a step, and the caller who waits for it."""

    __slots__ = ("_request", "_run", "_scheduler", "_sequence", "_trace", "inputs", "interruptible", "number")
    takes_many = True

    def __init__(self, run: GraphRun, call: StepCall[Any]) -> None:
        self._run = run
        self.number, self.inputs = call
        self.interruptible = run.request.waiter.interruptible
        # The trace of the step's request, if that of the ensemble is traced.
        self._trace: RequestTrace | None = None
        self._request: InferenceRequest | None = None
        self._scheduler: Scheduler
        self._sequence: TensorSequence | None = None

    def submit(self) -> None:
        """Send the request. An error ends the run."""
        run = self._run
        if run.is_over:
            return
        try:
            member = run.owner.member(self.number)
            signature = member.hosted.signature
            if run.has_sequences:
                self.inputs, self._sequence = without_sequence(self.inputs)
            inputs = member.inputs(self.inputs)
            if signature.has_to_copy(inputs.values()):
                run.owner.fetching.start(signature, inputs, partial(self._fetched, member))
            else:
                self._send(member, inputs)
        except Exception as error:
            if not run.broke(self, error):
                raise

    def _fetched(self, member: StepModel, inputs: dict[str, Any] | MoonpoolError) -> None:
        """Go on with inputs that were copied from a device."""

        def go_on() -> None:
            try:
                if isinstance(inputs, MoonpoolError):
                    raise inputs
                self._send(member, inputs)
            except Exception as error:
                if not self._run.broke(self, error):
                    raise

        self._run.owner.reactor.call_soon(go_on)

    def _send(self, member: StepModel, inputs: dict[str, Any]) -> None:
        run = self._run
        request = member.request(run.flow, inputs, self._sequence, run.request)
        # The request has the arrays, and gives them up when it ends.
        self.inputs = _NOTHING
        request.waiter = self
        request.durations_ns = run.durations_ns
        self._scheduler = member.hosted.scheduler
        self._request = request
        if run.request.trace is not None:
            self._trace = run.request.trace.child(member.hosted.model, request.request_id)
            self._trace.follow(request)
        execution = self._scheduler.submit(request)
        if execution is not None:
            run.drive(execution)
        if run.is_over:
            self.leave()

    def leave(self, driver: Waiter | None = None) -> None:
        """Give the request up, as nobody waits for it. `driver` is that of `give_up`."""
        request = self._request
        if request is None:
            return
        give_up(self._scheduler, request, self, driver)
        self._end()

    def tell_cancelled(self) -> None:
        """Let the model know that it may stop."""
        if self._request is not None:
            self._scheduler.tell_cancelled(self._request)

    def sequenced(self, response: Response) -> Mapping[str, Any]:
        """Return the tensors of a response whose parameters may name another sequence."""
        request = self._request
        if request is None:
            return response.outputs
        tensors = with_sequence(response, request)
        self._run.has_sequences |= tensors is not response.outputs
        return tensors

    # The caller

    def appoint(self, execution: Execution) -> bool:
        return self._run.appoint(execution)

    def respond(self, outcome: Outcome) -> None:
        self._tell(outcome, is_last=False)

    def resolve(self, outcome: Outcome | None) -> None:
        self._tell(outcome, is_last=True)

    def _tell(self, outcome: Outcome | None, *, is_last: bool) -> None:
        owner = self._run.owner
        if owner.is_decoupled and not owner.reactor.is_here:
            owner.reactor.call_soon(lambda: self._take(outcome, is_last=is_last))
        else:
            self._take(outcome, is_last=is_last)

    def _take(self, outcome: Outcome | None, *, is_last: bool) -> None:
        try:
            self._run.took(self, outcome, is_last=is_last)
        except Exception as error:  # a backend may answer with nonsense
            if not self._run.broke(self, error):
                raise
        if is_last:
            self._end()

    def _end(self) -> None:
        # The request refers to this object. Unless this reference goes, tensors stay in memory until the collector
        # looks for cycles.
        self._request = None
        if self._trace is not None:
            self._trace.end()
