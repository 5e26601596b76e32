"""The scheduler of an ensemble: a model whose requests become requests to other models.

Theory of operation. An ensemble has no instance, no queue and no thread. A request of a caller is a `Run`. Each of its
steps is a request to the scheduler of another model, as that of any caller. What happens next happens on the thread
that has the step's outcome. Nothing here blocks. Most ensembles are chains, whose requests are `ChainRun`s. All others,
and requests that are traced, are `GraphRun`s.

*Who drives the steps.* A caller that waits on a thread or in an event loop drives the execution of a step itself, as it
drives that of a model which it asks directly: `submit` returns the execution of the first step, and each further one is
offered to the caller's own waiter. So a request crosses no more threads than the calls of its steps would.

*Locks.* `Scheduler._lock` guards the requests that are open, the gates and the statistics. It is not held while a
scheduler, a waiter or a run is called upon.

*Who ends a request.* The last step, an error, a caller that leaves and the end of the model may meet. The thread that
takes the run out of `_runs` ends it, and only that one calls the waiter. All others find `is_over`, and what comes of a
step then is dropped.

*Gates.* With `max_inflight_requests`, a step waits at the gate of its number until fewer steps have passed it, in
order. The reactor submits the next one: a thread that may be interrupted does nothing for others. Every step that
passed leaves its gate when it ends or its run is over, and each is there once.

*Signals.* A handler may raise anywhere on the main thread, which then leaves its request. Whatever the run was doing,
`leave` takes all noted steps out of their gates and their schedulers, and gives what the thread was about to drive to
the reactor. Only the thread that leaves may do the last: any other one would take an execution away from a thread that
reads its answer.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from time import monotonic_ns, time_ns
from typing import Any

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.ensemble.chain import ChainRun
from moonpool.runtime.ensemble.graph import EnsembleGraph, Flow
from moonpool.runtime.ensemble.members import EnsembleCaller, StepModels
from moonpool.runtime.ensemble.run import GateStep, GraphRun, Run
from moonpool.runtime.errors import ModelUnavailable, all_of, own
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.request import Details, InferenceRequest, Outcome, Waiter
from moonpool.runtime.observe.statistics import Statistics
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.threads import is_interruptible
from moonpool.runtime.schedule.lane import Execution, Lane
from moonpool.runtime.schedule.request_queue import check_many
from moonpool.runtime.schedule.scheduler import Scheduler
from moonpool.runtime.stubs.calls.requests import Callee, Fetching

_IS_COMPILED = not __file__.endswith(".py")
_LEFT = ModelUnavailable("the caller left")
FindMember = Callable[[str, "int | None"], Callee]


class EnsembleScheduler(Scheduler):
    """The scheduler of an ensemble. All methods may be called from any thread."""

    def __init__(
        self, model: Model, graph: EnsembleGraph, find: FindMember, reactor: Reactor, executor: Executor
    ) -> None:
        """`find` returns the model of a step, as a client would get it at that moment. Raises `MoonpoolError` if there
        is none.
        """
        super().__init__(model, reactor, executor, _no_instance)
        # Its steps are requests of other models. `submit` itself has the reactor do what is not compiled.
        self._is_plain, self.is_atomic = False, _IS_COMPILED
        self.graph = graph
        # For each step: the number of requests that one to its model has open at a time, itself included. Replaced,
        # never changed.
        self.weights: Sequence[int] = [1] * len(graph.steps)
        self._whole = graph.flow()
        self.is_decoupled = model.config.decoupled
        self.fetching = Fetching()
        # What every run needs is in classes that are compiled.
        models, self._open = StepModels(graph, find), OpenRuns(self, self._resolve)
        self.member, self.ended, self._runs = models.of, self._open.ended, self._open.by_request
        mixed = models.mixed([o.name for o in model.config.outputs], None)
        self.caller = EnsembleCaller(model.config, mixed, graph.writer)
        self._gates = [_Gate(graph.most_in_flight) for _ in graph.steps]
        self.has_gates = graph.most_in_flight > 0

    # Requests

    def submit(self, request: InferenceRequest) -> Execution | None:
        if self.is_decoupled:
            check_many(self.name, request)
        request.queued_ns = monotonic_ns()
        flow = self._whole if request.details is None else self._flow_of(request.details)
        is_usual = flow.chain and request.trace is None and not self.has_gates
        run: Run = ChainRun(self, request, flow) if is_usual else GraphRun(self, request, flow)
        self._open.add(run)
        if not is_usual and is_interruptible():
            return self.reactor.ask(run.begin)
        return run.begin()

    def submit_all(self, requests: Sequence[InferenceRequest]) -> None:
        for request in requests:
            try:
                execution = None if request.left else self.submit(request)
            except MoonpoolError as error:
                self._resolve(request, error)
            else:
                if execution is not None:
                    execution.appoint()

    def _flow_of(self, details: Details) -> Flow:
        if details.outputs is None:
            return self._whole
        described = self.graph.config.outputs
        return self.graph.flow(described[number].name for number in details.outputs)

    def leave(self, request: InferenceRequest) -> None:
        self._give_up(request, request.waiter)

    def cancel(self, request: InferenceRequest) -> list[Execution]:
        self._give_up(request)
        return []

    def _give_up(self, request: InferenceRequest, driver: Waiter | None = None) -> None:
        """End a request that nobody waits for any more. `driver` is its caller if this is the caller's thread."""
        with self._lock:
            request.left = True
            run = self._runs.pop(request, None)
            if run is not None:
                fail_ns = monotonic_ns() - request.queued_ns
                self.statistics.record_failures(_now_ms(), 1, fail_ns, "CANCELED")
                self._changed.notify_all()
        if run is not None:
            run.stop(driver)
            self._resolve(request, _LEFT)

    def _resolve(self, request: InferenceRequest, outcome: Outcome | None) -> None:
        """Give a caller the outcome of its request, unless it has left. Each request comes here once."""
        if not request.left:
            request.waiter.resolve(outcome)

    def tell_cancelled(self, request: InferenceRequest) -> None:
        request.is_cancelled = True
        run = self._runs.get(request)
        if run is not None:
            run.tell_cancelled()

    def drop(self, error: MoonpoolError) -> None:
        all_of(lambda run: run.fail(own(error)), list(self._runs.values()))

    def wait_empty(self, deadline: float) -> bool:
        self._changed.wait_for(lambda: self._hurries or not self._runs, deadline)
        return not self._runs

    @property
    def wanted_count(self) -> int:
        return len(self._runs)

    @property
    def limited(self) -> list[Any]:
        found: list[Any] = []
        for number in range(len(self.graph.steps)):
            with contextlib.suppress(MoonpoolError):  # the request meets that, too
                found += self.member(number).hosted.scheduler.limited
        return found

    @property
    def is_used(self) -> bool:
        return bool(self._runs)

    @property
    def in_flight(self) -> int:
        return len(self._runs)

    # For runs

    def passes(self, step: GateStep) -> bool:
        """Return True if a step may be submitted now. If not, it is submitted when its gate lets it pass."""
        if not self.has_gates:
            return True
        with self._lock:
            return self._gates[step.number].take(step)

    def leave_gates(self, steps: Iterable[GateStep]) -> None:
        """Note that these steps have ended, or never will be submitted."""
        if not self.has_gates:
            return
        with self._lock:
            following = [self._gates[step.number].leave(step) for step in steps]
        for step in following:
            if step is not None:
                self.reactor.call_soon(step.submit)

    def responded(self, request: InferenceRequest) -> None:
        """Count a response of a decoupled ensemble. On the reactor's thread."""
        if not request.responses:
            self.statistics.responses.first.add(monotonic_ns() - request.queued_ns)
        request.responses += 1


class OpenRuns:
    """The runs of an ensemble that are open, by their requests. The lock of its lane guards them."""

    def __init__(self, lane: Lane, resolve: Callable[[InferenceRequest, Outcome | None], None]) -> None:
        """`resolve` gives a caller the outcome of its request."""
        self._lane, self._resolve = lane, resolve
        self.by_request: dict[InferenceRequest, Run] = {}

    def add(self, run: Run) -> None:
        """Open a run. Raises the refusal of the lane."""
        lane = self._lane
        lane._acquire()
        try:
            if lane._refusal is not None:
                raise own(lane._refusal)
            self.by_request[run.request] = run
        finally:
            lane._release()

    def ended(self, run: Run, outcome: Outcome | None) -> None:
        """End a run, once: count it, and give its caller the outcome; None if a stream ends."""
        request, lane = run.request, self._lane
        now_ns = monotonic_ns()
        lane._acquire()
        try:
            if self.by_request.pop(request, None) is None:
                return
            _count(lane.statistics, request, run.durations_ns, outcome, now_ns)
            if lane._changed.waiting:
                lane._changed.notify_all()
        finally:
            lane._release()
        sums = request.durations_ns
        if sums is not None:  # a step of another ensemble
            for number, duration_ns in enumerate(run.durations_ns):
                sums[number] += duration_ns
        self._resolve(request, outcome)


def _count(
    statistics: Statistics, request: InferenceRequest, durations_ns: list[int], outcome: Outcome | None, now_ns: int
) -> None:
    """Count a run. As in Triton, the durations are the sums over all steps. Needs the lock."""
    taken_ns = now_ns - request.queued_ns
    if isinstance(outcome, BaseException):
        is_cancelled = getattr(outcome, "code", "") == "CANCELLED"
        reason = "CANCELED" if is_cancelled else "OTHER"
        statistics.record_failures(_now_ms(), 1, taken_ns, reason)
        return
    rows = request.batch_size
    input_ns, infer_ns, output_ns = durations_ns
    statistics.record_batch(_now_ms(), rows, 1, rows, taken_ns, 0, input_ns, infer_ns, output_ns)
    statistics.by_duration[bisect_left(statistics.bounds_ns, taken_ns)] += 1
    if statistics.summaries is not None:
        statistics.summaries.request.add(taken_ns)
        statistics.summaries.queue.add(0)


def _now_ms() -> int:
    return time_ns() // 1_000_000


def _no_instance(*_: object) -> None:
    """Stand in for the supervisor, which would recover instances: an ensemble has none."""


class _Gate:
    """Lets a number of steps pass at a time. The scheduler's lock guards it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._passed: set[GateStep] = set()
        self._waiting: dict[GateStep, None] = {}

    def take(self, step: GateStep) -> bool:
        """Return True if a step passes now. If not, it waits."""
        if len(self._passed) >= self._most:
            self._waiting[step] = None
            return False
        self._passed.add(step)
        return True

    def leave(self, step: GateStep) -> GateStep | None:
        """Note that a step has ended or is given up. Returns the next one that passes, if there is one."""
        self._waiting.pop(step, None)
        if step not in self._passed:
            return None
        self._passed.remove(step)
        following = next(iter(self._waiting), None)
        if following is not None:
            del self._waiting[following]
            self._passed.add(following)
        return following
