"""The instances of one model version: started together, watched, restarted, ended.

An instance that breaks is in exactly one hand at that moment: idle in the scheduler, or in the hand of whoever
drives its batch. That hand reports it here, once, and a thread of its own takes care of it: finds out what
happened, tells the callers, cleans up, waits as the restart policy says, starts it again.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.bucket_counts import BucketCounts
from moonpool.runtime.errors import ClientCutMemory, LoadFailed, ModelUnavailable
from moonpool.runtime.failures import (
    as_load_failure,
    as_moonpool_error,
    is_shortage,
    no_instance_left,
    tell_callers,
    took_too_long,
)
from moonpool.runtime.limits.recycler import Recycler
from moonpool.runtime.limits.recycling import Recycling
from moonpool.runtime.parallel import in_parallel
from moonpool.runtime.restart import GiveUp, RestartAt, RestartPolicy
from moonpool.runtime.seat import Seat
from moonpool.runtime.states import InstanceState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonpool.runtime.backend import Backend, Model, ModelInstance
    from moonpool.runtime.reactor import Reactor
    from moonpool.runtime.request import InferenceRequest
    from moonpool.runtime.scheduler import Scheduler

_log = logging.getLogger("moonpool")
_S = InstanceState
# An execution over its limit is noticed after this part of the limit more, at the latest.
_CHECKS_PER_LIMIT = 20
_TIDY_S = 5.0
_STRANDED_NS = 1_000_000_000
_JOIN_S = 0.1
_RECOVERY_BOUNDS_NS = tuple(
    ms * 1_000_000 for ms in (50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000, 300_000)
)


class Supervisor:
    """Owns the instances of a model version. Any thread may call any method."""

    def __init__(
        self,
        backend: Backend,
        model: Model,
        instances: Sequence[ModelInstance],
        reactor: Reactor,
        tell: Callable[[str, str, str], None],
        give_up: Callable[[str], None],
        come_back: Callable[[], object] = bool,
        goes_on: Callable[[], bool] = bool,
    ) -> None:
        """`tell` gets the name, state and reason of an instance whenever they change.

        `give_up` gets the reason when no instance is left. While `goes_on` is true, which it is not by default,
        instances that were given up are started again after a rest, and `come_back` is called when one is ready.
        """
        options = model.options
        self._policy = RestartPolicy(
            max_restarts=options.max_restarts,
            window_s=options.restart_window_s,
            backoff_s=options.restart_backoff_s,
            backoff_max_s=options.restart_backoff_max_s,
        )
        self._backend = backend
        self._model = model
        self._reactor = reactor
        self._tell = tell
        self._give_up_model = give_up
        self._come_back = come_back
        self._goes_on = goes_on
        # How long an instance that was given up rests before it is started again.
        self.rest_s = max(options.restart_window_s, options.restart_backoff_max_s)
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self.seats = [Seat(i, options.max_restarts + 1) for i in instances]
        self._seat_of = {seat.instance: seat for seat in self.seats}
        self._scheduler: Scheduler | None = None
        self.recycling = Recycling(options)
        # How long instances were away.
        self.recoveries = BucketCounts(_RECOVERY_BOUNDS_NS)

    def serve(self, scheduler: Scheduler) -> None:
        """From now on, ready instances go to this scheduler."""
        self._scheduler = scheduler
        recycler = Recycler(self, scheduler)
        for seat in self.seats:
            recycler.watch(seat)
            seat.instance.report_broken = self._reporter(seat.instance)
            seat.instance.respond = partial(scheduler.outcomes.respond, seat.instance)

    def _reporter(self, instance: ModelInstance) -> Callable[[BaseException], None]:
        def report(error: BaseException) -> None:
            if self._scheduler is not None:
                self._scheduler.report(instance, error)

        return report

    def _move(self, seat: Seat, state: InstanceState, because: str) -> None:
        with self._lock:
            seat.machine.move(state, because, time.monotonic())
        self._tell(seat.instance.name, str(state), because)

    def _move_from(
        self, seat: Seat, here: InstanceState, state: InstanceState, because: str
    ) -> bool:
        """Move an instance if it is in a certain state and nobody brings it back at the moment."""
        with self._lock:
            recovery = seat.recovery
            if seat.machine.state is not here:
                return False
            if recovery not in (None, threading.current_thread()) and recovery.is_alive():
                return False
            seat.machine.move(state, because, time.monotonic())
        self._tell(seat.instance.name, str(state), because)
        return True

    # Start

    def start_all(self) -> None:
        """Initialize all instances in parallel. On failure finalizes those that started, and raises.

        Raises `LoadFailed` with the first failure.
        """
        try:
            outcomes = in_parallel(
                self._first_start, self.seats, "moonpool-start", self.give_up_starting
            )
        except BaseException:  # a signal handler raised; in_parallel has waited for all of them
            self.stop_all()
            raise
        errors = [outcome for outcome in outcomes if outcome is not None]
        if errors:
            self.stop_all()
            raise errors[0]
        if self._model.options.execute_timeout_s is not None:
            self._check_overdue()
        self._tidy()

    def give_up_starting(self) -> None:
        """Somebody who waits for the start has had enough, perhaps of a model that never gets ready."""
        for seat in self.seats:
            if seat.machine.state is _S.STARTING:
                reason = LoadFailed(f"the start of '{seat.instance.name}' was interrupted")
                self._backend.abort(seat.instance, reason)

    def _first_start(self, seat: Seat) -> BaseException | None:
        self._move(seat, _S.STARTING, "load")
        try:
            self._backend.model_instance_initialize(seat.instance)
        except BaseException as error:  # a backend may raise SystemExit, and its siblings must end
            wrapped = as_load_failure(error, seat.instance.name)
            self._move(seat, _S.FAILED, str(wrapped))
            return wrapped
        self._ready(seat, "initialized")
        return None

    def _ready(self, seat: Seat, because: str) -> None:
        instance = seat.instance
        self.recycling.begin(instance)
        instance.is_healthy = instance.accepts = True
        self._move(seat, _S.READY, because)
        if self._scheduler is not None:
            self._scheduler.add(instance)
            self._come_back()

    # Failure

    def lost(
        self, instance: ModelInstance, requests: Sequence[InferenceRequest], error: BaseException
    ) -> None:
        """An instance broke, and with it these requests. Does not block."""
        seat = self._seat_of[instance]
        instance.accepts = instance.is_healthy = False
        self.recycling.end_turn(instance)
        seat.unrecovered = partial(self._recover, seat, requests, error)
        self._recover_apart(seat)

    def _recover_apart(self, seat: Seat) -> None:
        """On a thread. Where there is none to be had, later: whoever reports a loss may hold locks."""
        with self._lock:
            recover = seat.unrecovered
            if recover is None or self.begin(seat, recover, "recover"):
                seat.unrecovered = None
            else:
                self._reactor.call_later(_JOIN_S, partial(self._recover_apart, seat))

    def begin(self, seat: Seat, act: Callable[[], None], name: str) -> bool:
        """Act on a thread that has the instance in its hand, and is waited for when that is to end.

        False where there is no thread to be had.
        """
        name = f"moonpool-{name}-{seat.instance.name}"
        recovery = threading.Thread(target=act, name=name, daemon=True)
        with self._lock:  # whoever finds it must find it started
            seat.recovery = recovery
            try:
                recovery.start()
            except RuntimeError:
                seat.recovery = None
        return seat.recovery is not None

    def _recover(
        self, seat: Seat, requests: Sequence[InferenceRequest], error: BaseException
    ) -> None:
        seat.broken_ns = time.monotonic_ns()
        try:
            reason = self._backend.explain(seat.instance, error)
        except Exception:
            _log.exception("[%s] nobody can say why it broke", seat.instance.name)
            reason = error
        if not isinstance(reason, ClientCutMemory):
            self._count_failure(seat, error)
        _log.error("[%s] %s", seat.instance.name, str(reason))
        is_draining = self._move_from(seat, _S.DRAINING, _S.STOPPED, str(reason))
        if not is_draining:
            self._move(seat, _S.BACKING_OFF, str(reason))
        self._tell_callers(seat, requests, as_moonpool_error(reason))
        self._finalize(seat)
        if is_draining:
            return
        while not self._restart(seat):
            pass

    def _tell_callers(
        self, seat: Seat, requests: Sequence[InferenceRequest], reason: MoonpoolError
    ) -> None:
        if self._scheduler is not None:
            tell_callers(self._scheduler, self._model.options, seat.instance, requests, reason)

    @staticmethod
    def _count_failure(seat: Seat, error: BaseException) -> None:
        """Count a death, unless the model had no part in it."""
        if is_shortage(error):
            seat.shortages += 1
        else:
            seat.shortages = 0
            seat.deaths_s.append(time.monotonic())

    def next_start(self, seat: Seat) -> RestartAt | GiveUp:
        """When an instance that died is started again, if it is."""
        now_s = time.monotonic()
        if seat.shortages:
            return RestartAt(now_s + self._policy.pause_after_s(seat.shortages))
        if not seat.deaths_s:  # the model was not to blame for its end
            return RestartAt(now_s)
        return self._policy.decide(list(seat.deaths_s), now_s)

    def _restart(self, seat: Seat) -> bool:
        """Try once; False if the try failed and another one is due."""
        decision = self.next_start(seat)
        if isinstance(decision, GiveUp):
            self._give_up(seat, decision.reason)
            if not self._goes_on() or self._stopping.wait(self.rest_s):
                return True
            because = f"it was given up, and {self.rest_s:g} s have passed"
            return self._start_again(seat, because, "restarted", restarts=1)
        if self._stopping.wait(max(0.0, decision.at_s - time.monotonic())):
            self._move(seat, _S.STOPPED, "unload")
            return True
        because = f"restart after: {seat.machine.because}"
        return self._start_again(seat, because, "restarted", restarts=1)

    def _start_again(self, seat: Seat, because: str, done: str, *, restarts: int) -> bool:
        self._move(seat, _S.STARTING, because)
        seat.instance.broken = None
        try:
            self._backend.model_instance_initialize(seat.instance)
        except BaseException as error:
            _log.error("[%s] restart failed: %s", seat.instance.name, error)
            self._count_failure(seat, error)
            self._move(seat, _S.BACKING_OFF, f"restart failed: {error}")
            return False
        seat.restarts += restarts
        seat.shortages = 0
        with self._lock:
            self.recoveries.add(time.monotonic_ns() - seat.broken_ns)
        self._ready(seat, done)
        return True

    def _give_up(self, seat: Seat, reason: str) -> None:
        last = seat.machine.because
        self._move(seat, _S.FAILED, f"{reason}; the last time: {last}")
        self.check_given_up()

    def check_given_up(self) -> None:
        """Refuse requests from now on if no instance is left, nor will be."""
        if self._scheduler is None or any(s.machine.state is not _S.FAILED for s in self.seats):
            return
        seat = self.seats[-1]
        why = f"{seat.instance.name} {seat.machine.because}"
        error = no_instance_left(self._model.name, why)
        self._scheduler.refuse(error)
        self._scheduler.drop(error)
        self._give_up_model(why)
        # An instance that came back meanwhile has not undone this: its `_come_back` was too early.
        if any(each.machine.state is _S.READY for each in self.seats):
            self._come_back()

    # Recycling

    @property
    def is_stopping(self) -> bool:
        """Whether all instances are about to end."""
        return self._stopping.is_set()

    def withdraw(self, instance: ModelInstance, timeout_s: float) -> bool:
        """As `Backend.withdraw`."""
        return self._backend.withdraw(instance, timeout_s)

    def renew(self, seat: Seat) -> None:
        """End a process that is well, and start another one."""
        because = self.recycling.why(seat.instance)
        _log.info("[%s] is started anew: %s", seat.instance.name, because)
        seat.instance.accepts = False
        self._move(seat, _S.RECYCLING, because)
        self.recycling.recycled(seat.instance)
        self._finalize(seat)
        seat.broken_ns = time.monotonic_ns()
        if self._stopping.is_set():
            self._move(seat, _S.STOPPED, "unload")
        elif not self._start_again(seat, because, f"recycled: {because}", restarts=0):
            while not self._restart(seat):
                pass

    # Watching

    def _check_overdue(self) -> None:
        limit_s = self._model.options.execute_timeout_s
        if limit_s is None or self._scheduler is None or self._stopping.is_set():
            return
        since_ns = time.monotonic_ns() - int(limit_s * 1e9)
        for execution in self._scheduler.executing_since(since_ns):
            if execution.began_before(since_ns):
                instance = execution.instance
                self._backend.abort(instance, took_too_long(instance.name, limit_s))
        self._reactor.call_later(limit_s / _CHECKS_PER_LIMIT, self._check_overdue)

    def _tidy(self) -> None:
        if self._scheduler is None or self._stopping.is_set():
            return
        self.rescue()
        for seat in self.seats:
            instance = seat.instance
            if self._scheduler.take(instance):
                try:
                    self._backend.tidy(instance)
                except (MoonpoolError, OSError) as error:
                    self._scheduler.lose(instance, error)
                else:
                    self._scheduler.add(instance)
        self._reactor.call_later(_TIDY_S, self._tidy)

    def rescue(self) -> None:
        """Drive what nobody drives: an event loop may end between being asked and doing it."""
        if self._scheduler is not None:
            since_ns = time.monotonic_ns() - _STRANDED_NS
            for execution in self._scheduler.executing_since(since_ns):
                if not execution.instance.blocks and execution.claim(self):
                    execution.drive_in_reactor()

    # End

    def stop_all(self) -> None:
        """Finalize all instances in parallel; those that execute are waited for first, if need be ended."""
        self._stopping.set()
        in_parallel(self._stop, self.seats, "moonpool-stop")

    def _stop(self, seat: Seat) -> None:
        self._end_recovery(seat)
        while seat.machine.state is _S.READY:
            if self._move_from(seat, _S.READY, _S.DRAINING, "unload"):
                self._drain(seat)
            self._end_recovery(seat)
        if self._move_from(seat, _S.DRAINING, _S.FINALIZING, "drained"):
            self._finalize(seat)
        if not seat.machine.ended:
            self._move(seat, _S.STOPPED, "unload")

    def _end_recovery(self, seat: Seat) -> None:
        """Wait until nobody tries to bring an instance back; a restart on its way is broken off."""
        with self._lock:
            recover, seat.unrecovered = seat.unrecovered, None
        if recover is not None:
            recover()
        while seat.recovery is not None and seat.recovery.is_alive():
            if seat.machine.state is _S.STARTING:
                error = ModelUnavailable(f"model '{self._model.name}' is being unloaded")
                self._backend.abort(seat.instance, error)
            # The restart may have begun, and have nothing yet that could be broken off.
            seat.recovery.join(_JOIN_S)

    def _drain(self, seat: Seat) -> None:
        """Take an instance out of the scheduler once it executes nothing."""
        scheduler, instance = self._scheduler, seat.instance
        if scheduler is None:
            return
        instance.accepts = False
        if scheduler.retire(instance):
            return
        if not scheduler.wait_idle(instance, time.monotonic()):
            error = ModelUnavailable(f"model '{self._model.name}' is being unloaded")
            self._backend.abort(instance, error)
            scheduler.wait_idle(instance, time.monotonic() + 10.0)

    def _finalize(self, seat: Seat) -> None:
        try:
            self._backend.model_instance_finalize(seat.instance)
        except Exception as error:
            _log.exception("[%s] finalizing the instance failed: %s", seat.instance.name, error)
