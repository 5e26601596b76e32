"""The supervisor of one model version: starts its instances together, watches and restarts them, and ends them.

Theory of operation.

*Who has an instance.* One party has an instance at a time: the scheduler while it is idle, the driver of its batch, or
a thread that starts, recovers, recycles or stops it. The party that has it when it breaks reports that to `lost`, once.
Other parties that notice (the reactor sees the end of the process) go through the scheduler, which knows who has it.
`runtime/model/states.py` has the states of an instance record, and what may follow what.

*Recovery.* `lost` may be called with the scheduler's lock held, so it does not block, and starts a thread. The thread
asks the backend for the reason, counts the death, fails or retries the requests, and finalizes what is left. Then it
waits as the restart policy says, and starts the instance again, until that succeeds, the policy gives up, or the model
is unloaded. A start that fails for lack of descriptors, memory or processes counts as no death. If the machine has no
thread for a recovery, the record keeps it (`unrecovered`), and the reactor tries again a little later, or an unload
does it.

*Giving up.* If all instances are FAILED, the scheduler refuses requests and the model is UNAVAILABLE. If nobody could
load the model again (`goes_on`), an instance that was given up rests and is started again, and the model comes back
with it. Giving up and coming back may cross, as two threads do them. Each changes first and looks at the records then,
so the second one undoes what is wrong (`check_given_up`, `HostedModel._come_back`).

*Scaling.* `grow` and `shrink` change `records`, one call of them at a time: the model lock of the registry is held.
`scaling.py` explains how an instance leaves. A record that has left stays in `_record_of`, since its last callbacks may
come later.

*Unload.* `stop_all` sets `_stopping` and then stops all instances in parallel. `stop` sets the event of the record,
which ends its pauses, and first ends a recovery: it breaks off a start that is on its way, again and again, since a
start that has just begun has nothing yet to break off. Then it moves the instance from READY to DRAINING, which
`_move_from` does only while no recovery is alive. An instance that breaks while it drains is recovered once more, and
that recovery ends at STOPPED and not with a restart.

*Locks.* `_lock` guards the states, and the threads of the records: a thread that is found in a record has been started.
It is taken inside the scheduler's lock, so nothing under it calls the scheduler. It is an RLock, as `_recover_apart`
calls `begin`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import CallerInterrupted, ClientCutMemory, LoadFailed, ModelUnavailable, OutOfThreads
from moonpool.runtime.hosting.instance_record import InstanceRecord
from moonpool.runtime.hosting.recycling import Recycler, Recycling
from moonpool.runtime.hosting.scaling import Leave
from moonpool.runtime.hosting.warmup import Warmup
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.backend import Backend, Model, ModelInstance
from moonpool.runtime.model.request import InferenceRequest
from moonpool.runtime.model.states import InstanceState
from moonpool.runtime.observe.distributions import BucketCounts
from moonpool.runtime.process.parallel import in_parallel
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.restart import GiveUp, RestartAt, RestartPolicy
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.schedule.failures import (
    as_load_failure,
    as_moonpool_error,
    is_shortage,
    kept_too_long,
    no_instance_left,
    notify_callers,
    took_too_long,
)
from moonpool.runtime.schedule.scheduler import Scheduler

_log = RuntimeLog("moonpool")
_S = InstanceState
_TIDY_S = 5.0
# An execution that nobody drives after this time is given to the reactor.
_STRANDED_NS = 1_000_000_000
# The pause before a recovery is started, or broken off, again.
_JOIN_S = 0.1
_RECOVERY_BOUNDS_NS = tuple(
    ms * 1_000_000 for ms in (50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000, 300_000)
)


class Supervisor:
    """Starts, watches, restarts and ends the instances of a model version. Any thread may call any method."""

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

        `give_up` gets the reason when no instance is left. While `goes_on` returns True (by default it does not),
        instances that were given up are started again after a rest. `come_back` is called when an instance is ready.
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
        self._warmup: Warmup | None = None
        # The rest of an instance that was given up, before it is started again.
        self.rest_s = max(options.restart_window_s, options.restart_backoff_max_s)
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        # True while `_check_overdue` runs again and again.
        self._is_checking = False
        # Replaced, and never changed, when instances come and go. So any thread may go through it.
        self.records: Sequence[InstanceRecord] = ()
        self._record_of: dict[ModelInstance, InstanceRecord] = {}
        self._recycler: Recycler | None = None
        self._enlist(instances)
        self._scheduler: Scheduler | None = None
        self.recycling = Recycling(options)
        # The times from the end of a process to the next one that is ready.
        self.recoveries = BucketCounts(_RECOVERY_BOUNDS_NS)

    def serve(self, scheduler: Scheduler, warmup: Warmup | None = None) -> None:
        """Give ready instances to this scheduler from now on. `warmup` runs in each new process before it is ready."""
        self._scheduler, self._warmup = scheduler, warmup
        self._recycler = Recycler(self, scheduler)
        for record in self.records:
            self._serve(record)

    def _enlist(self, instances: Sequence[ModelInstance]) -> list[InstanceRecord]:
        records = [InstanceRecord(each, self._model.options.max_restarts + 1) for each in instances]
        with self._lock:
            self._record_of |= {record.instance: record for record in records}
            self.records = (*self.records, *records)
        return records

    def _serve(self, record: InstanceRecord) -> None:
        if self._scheduler is None or self._recycler is None:
            return
        self._recycler.watch(record)
        record.instance.report_broken = self._reporter(record.instance)
        respond = partial(self._scheduler.respond, record.instance)
        record.instance.respond = respond if self._warmup is None else self._warmup.route(respond)

    def _reporter(self, instance: ModelInstance) -> Callable[[BaseException], None]:
        def report(error: BaseException) -> None:
            if self._scheduler is not None:
                self._scheduler.report(instance, error)

        return report

    def _move(self, record: InstanceRecord, state: InstanceState, because: str) -> None:
        with self._lock:
            record.machine.move(state, because, time.monotonic())
        self._tell(record.instance.name, str(state), because)

    def _move_from(self, record: InstanceRecord, here: InstanceState, state: InstanceState, because: str) -> bool:
        """Move an instance if it is in the state `here` and no other thread recovers it. Returns False otherwise."""
        with self._lock:
            recovery = record.recovery
            if record.machine.state is not here:
                return False
            if recovery not in (None, threading.current_thread()) and recovery.is_alive():
                return False
            record.machine.move(state, because, time.monotonic())
        self._tell(record.instance.name, str(state), because)
        return True

    # Start

    def start_all(self) -> None:
        """Initialize all instances in parallel. If one fails, finalize the others and raise the first failure."""
        try:
            outcomes = in_parallel(self._first_start, self.records, "moonpool-start", self.give_up_starting)
        except BaseException:  # a signal handler raised; in_parallel has waited for all of them
            self.stop_all()
            raise
        errors = [outcome for outcome in outcomes if outcome is not None]
        if errors:
            self.stop_all()
            raise errors[0]
        self.watch_deadlines()
        self._tidy()

    def give_up_starting(self) -> None:
        """Let the first start, or a `sleep` or `wake` of the model, fail soon. For a thread that waits for it and was
        interrupted.
        """
        for record in self.records:
            if record.machine.state is _S.STARTING or record.is_in_hook:
                reason = LoadFailed(f"the start of '{record.instance.name}' was interrupted")
                self._backend.abort(record.instance, reason)

    def _first_start(self, record: InstanceRecord) -> BaseException | None:
        self._move(record, _S.STARTING, "load")
        try:
            self._initialize(record)
        except BaseException as error:  # a backend may raise SystemExit; the other instances must be finalized
            wrapped = as_load_failure(error, record.instance.name)
            self._move(record, _S.FAILED, str(wrapped))
            return wrapped
        self._ready(record, "initialized")
        return None

    def _initialize(self, record: InstanceRecord) -> None:
        """Start the process of an instance, and warm it up. If that fails, nothing is left of it."""
        instance, limit_s = record.instance, self._model.options.load_timeout_s
        deadline = None if limit_s is None else time.monotonic() + limit_s
        self._model.check_files()
        self._backend.model_instance_initialize(instance)
        instance.is_healthy = True
        try:
            if self._warmup is not None:
                self._warmup.run(instance, deadline)
        except BaseException:
            self._finalize(record)
            raise

    def _ready(self, record: InstanceRecord, because: str) -> None:
        instance = record.instance
        self.recycling.begin(instance)
        instance.accepts = True
        self._move(record, _S.READY, because)
        if self._scheduler is not None:
            self._scheduler.add(instance)
            self._come_back()

    # Failure

    def lost(self, instance: ModelInstance, requests: Sequence[InferenceRequest], error: BaseException) -> None:
        """Recover an instance that broke, and with it these requests. Does not block."""
        record = self._record_of[instance]
        instance.accepts = instance.is_healthy = False
        self.recycling.end_turn(instance)
        record.unrecovered = partial(self._recover, record, requests, error)
        self._recover_apart(record)

    def _recover_apart(self, record: InstanceRecord) -> None:
        """Start the recovery on a thread, or later if none can be started: the caller may hold locks."""
        with self._lock:
            recover = record.unrecovered
            if recover is None or self.begin(record, recover, "moonpool-recover"):
                record.unrecovered = None
            else:
                self._reactor.call_later(_JOIN_S, partial(self._recover_apart, record))

    def begin(self, record: InstanceRecord, act: Callable[[], None], name: str) -> bool:
        """Call `act` on a thread that has the instance. An unload waits for the thread.

        Returns False if no thread can be started.
        """
        name = f"{name}-{record.instance.name}"
        recovery = threading.Thread(target=act, name=name, daemon=True)
        with self._lock:  # a thread that is found in a record has been started
            record.recovery = recovery
            try:
                start_thread(recovery)
            except OutOfThreads:
                record.recovery = None
        return record.recovery is not None

    def _recover(self, record: InstanceRecord, requests: Sequence[InferenceRequest], error: BaseException) -> None:
        record.broken_ns = time.monotonic_ns()
        try:
            reason = self._backend.explain(record.instance, error)
        except Exception:
            _log.exception("[%s] the backend cannot say why it broke", record.instance.name)
            reason = error
        if not isinstance(reason, ClientCutMemory) and not isinstance(error, CallerInterrupted):
            self._count_failure(record, error)
        _log.error("[%s] %s", record.instance.name, str(reason))
        is_draining = self._move_from(record, _S.DRAINING, _S.STOPPED, str(reason))
        if not is_draining:
            self._move(record, _S.BACKING_OFF, str(reason))
        self._tell_callers(record, requests, as_moonpool_error(reason))
        self._finalize(record)
        if is_draining:
            return
        while not self._restart(record):
            pass

    def _tell_callers(
        self, record: InstanceRecord, requests: Sequence[InferenceRequest], reason: MoonpoolError
    ) -> None:
        if self._scheduler is not None:
            notify_callers(self._scheduler, self._model.options, record.instance, requests, reason)

    @staticmethod
    def _count_failure(record: InstanceRecord, error: BaseException) -> None:
        """Count a death, unless the model had no part in it."""
        if is_shortage(error):
            record.shortages += 1
        else:
            record.shortages = 0
            record.deaths_s.append(time.monotonic())

    def next_start(self, record: InstanceRecord) -> RestartAt | GiveUp:
        """Decide when an instance that died is started again, if ever."""
        now_s = time.monotonic()
        if record.shortages:
            return RestartAt(now_s + self._policy.pause_after_s(record.shortages))
        if not record.deaths_s:  # the model was not to blame
            return RestartAt(now_s)
        return self._policy.decide(list(record.deaths_s), now_s)

    def _restart(self, record: InstanceRecord) -> bool:
        """Try to start an instance again. Returns False if that failed and another try is due."""
        decision = self.next_start(record)
        if isinstance(decision, GiveUp):
            self._give_up(record, decision.reason)
            if not self._goes_on() or record.stopping.wait(self.rest_s):
                return True
            because = f"it was given up, and {self.rest_s:g} s have passed"
            return self._start_again(record, because, "restarted", restarts=1)
        if record.stopping.wait(max(0.0, decision.at_s - time.monotonic())):
            self._move(record, _S.STOPPED, "unload")
            return True
        because = f"restart after: {record.machine.because}"
        return self._start_again(record, because, "restarted", restarts=1)

    def _start_again(self, record: InstanceRecord, because: str, done: str, *, restarts: int) -> bool:
        self._move(record, _S.STARTING, because)
        record.instance.broken = None
        try:
            self._initialize(record)
        except BaseException as error:
            _log.error("[%s] restart failed: %s", record.instance.name, error)
            self._count_failure(record, error)
            self._move(record, _S.BACKING_OFF, f"restart failed: {error}")
            return False
        record.restarts += restarts
        record.shortages = 0
        with self._lock:
            self.recoveries.add(time.monotonic_ns() - record.broken_ns)
        self._ready(record, done)
        return True

    def _give_up(self, record: InstanceRecord, reason: str) -> None:
        last = record.machine.because
        self._move(record, _S.FAILED, f"{reason}; the last time: {last}")
        self.check_given_up()

    def check_given_up(self) -> None:
        """Refuse requests from now on if all instances were given up."""
        if self._scheduler is None or not self.records:
            return
        if any(record.machine.state is not _S.FAILED for record in self.records):
            return
        record = self.records[-1]
        why = f"{record.instance.name} {record.machine.because}"
        error = no_instance_left(self._model.name, why)
        self._scheduler.refuse(error)
        self._scheduler.drop(error)
        self._give_up_model(why)
        # An instance may have come back meanwhile, and called `_come_back` before there was anything to undo.
        if any(each.machine.state is _S.READY for each in self.records):
            self._come_back()

    # Scaling

    def grow(self, instances: Sequence[ModelInstance]) -> None:
        """Start further instances in parallel. If one fails, end them all, and raise the first failure."""
        records = self._enlist(instances)
        for record in records:
            self._serve(record)
        try:
            outcomes = in_parallel(self._first_start, records, "moonpool-start", self.give_up_starting)
        except BaseException:  # a signal handler raised; in_parallel has waited for all of them
            self.shrink(instances, time.monotonic())
            raise
        errors = [outcome for outcome in outcomes if outcome is not None]
        if errors:
            self.shrink(instances, time.monotonic())
            raise errors[0]

    def shrink(self, instances: Sequence[ModelInstance], deadline: float) -> None:
        """End some of the instances, each when nothing is in it any more, in parallel. What is in them at `deadline`
        fails.
        """
        scheduler = self._scheduler
        if scheduler is None or not instances:
            return
        records = [self._record_of[instance] for instance in instances]
        in_parallel(lambda record: Leave(self, scheduler, record).act(deadline), records, "moonpool-stop")
        with self._lock:
            self.records = tuple(each for each in self.records if each not in records)
        if self.records:
            self.check_given_up()

    # Sleep without an end

    @property
    def can_sleep(self) -> bool:
        """True if all instances are ready, and their models may free memory while the processes stay."""
        return bool(self.records) and all(
            record.machine.state is _S.READY
            and record.instance.broken is None
            and self._backend.can_sleep(record.instance)
            for record in self.records
        )

    @property
    def why_broken(self) -> BaseException | None:
        """The error of the first instance that broke and is not recovered yet."""
        broken = (record.instance.broken for record in self.records)
        return next((each for each in broken if each is not None), None)

    def sleep_all(self) -> BaseException | None:
        """Call the `sleep` of all instances, which the scheduler has given up, in parallel. Returns the first
        failure.
        """
        sleep = self._backend.model_instance_sleep
        outcomes = in_parallel(
            lambda record: self._in_hook(record, sleep), self.records, "moonpool-sleep", self.give_up_starting
        )
        return next((each for each in outcomes if each is not None), None)

    def wake_all(self) -> BaseException | None:
        """Call the `wake` of all instances after `sleep_all`, in parallel. Returns the first failure.

        Each takes requests as soon as it is awake. One that fails is recovered, as if it had broken while it was idle.
        """
        scheduler = self._scheduler
        if scheduler is None:
            return None
        outcomes = in_parallel(
            lambda record: self._wake(record, scheduler), self.records, "moonpool-wake", self.give_up_starting
        )
        return next((each for each in outcomes if each is not None), None)

    def _wake(self, record: InstanceRecord, scheduler: Scheduler) -> BaseException | None:
        instance = record.instance
        # One that broke while it slept has no process to ask; the scheduler has it recovered.
        if instance.broken is None:
            failure = self._in_hook(record, self._backend.model_instance_wake)
            if failure is not None:
                scheduler.lose(instance, failure)
                return failure
        scheduler.add(instance)
        return None

    @staticmethod
    def _in_hook(record: InstanceRecord, hook: Callable[[ModelInstance], None]) -> BaseException | None:
        record.is_in_hook = True
        try:
            hook(record.instance)
        except BaseException as error:  # a backend may raise SystemExit
            return error
        finally:
            record.is_in_hook = False
        return None

    # Recycling

    @property
    def is_stopping(self) -> bool:
        """True if all instances are about to end."""
        return self._stopping.is_set()

    def renew(self, record: InstanceRecord) -> None:
        """End the process of a healthy instance, and start another one."""
        because = self.recycling.why(record.instance)
        _log.info("[%s] is started anew: %s", record.instance.name, because)
        record.instance.accepts = False
        self._move(record, _S.RECYCLING, because)
        self.recycling.recycled(record.instance)
        self._finalize(record)
        record.broken_ns = time.monotonic_ns()
        if record.stopping.is_set():
            self._move(record, _S.STOPPED, "unload")
        elif not self._start_again(record, because, f"recycled: {because}", restarts=0):
            while not self._restart(record):
                pass

    # Watching

    def watch_deadlines(self) -> None:
        """End instances whose executions take too long, or that keep requests for as long after all callers have left,
        if there is a limit.
        """
        with self._lock:
            if self._is_checking or self._model.options.execute_timeout_s is None:
                return
            self._is_checking = True
        self._check_overdue()

    def _check_overdue(self) -> None:
        with self._lock:
            limit_s = self._model.options.execute_timeout_s
            self._is_checking = limit_s is not None
        if limit_s is None or self._scheduler is None or self._stopping.is_set():
            return
        now_ns = time.monotonic_ns()
        since_ns = now_ns - int(limit_s * 1e9)
        for execution in self._scheduler.executing_since(since_ns):
            name, taken_s = execution.instance.name, (now_ns - execution.started_ns) / 1e9
            because = took_too_long(name, limit_s, self._model.denials, taken_s)
            self._backend.abort(execution.instance, because)
        for instance in self._scheduler.deserted_since(since_ns):
            self._backend.abort(instance, kept_too_long(instance.name, limit_s))
        is_idle = not self._scheduler.has_begun
        pause_s = self._model.options.overdue_pause_s(is_idle=is_idle)
        self._reactor.call_later(pause_s, self._check_overdue)

    def _tidy(self) -> None:
        """Let idle instances give back what they have not needed lately, every few seconds."""
        if self._scheduler is None or self._stopping.is_set():
            return
        self.rescue()
        for record in self.records:
            instance = record.instance
            if self._scheduler.take(instance):
                try:
                    self._backend.tidy(instance)
                except (MoonpoolError, OSError) as error:
                    self._scheduler.lose(instance, error)
                else:
                    self._scheduler.add(instance)
        self._reactor.call_later(_TIDY_S, self._tidy)

    def rescue(self, stranded_ns: int = _STRANDED_NS) -> None:
        """Let the reactor drive what nobody has driven for so long: an event loop may stop after it was appointed."""
        if self._scheduler is not None:
            since_ns = time.monotonic_ns() - stranded_ns
            for execution in self._scheduler.executing_since(since_ns):
                if not execution.instance.blocks and execution.claim(self):
                    execution.drive_in_reactor()

    # End

    def stop_all(self) -> None:
        """Finalize all instances in parallel. Instances that still execute are ended."""
        self._stopping.set()
        in_parallel(self.stop, self.records, "moonpool-stop")

    def abort_all(self, reason: BaseException) -> None:
        """Let the processes of all instances end at once, without `finalize`. Does not wait."""
        for record in self.records:
            self._backend.abort(record.instance, reason)

    def end_all(self) -> None:
        """Finalize all instances, which the scheduler has given up, in parallel. Others may be started after that with
        `grow`.
        """
        ended = self.records
        in_parallel(self.stop, ended, "moonpool-stop")
        with self._lock:
            self.records = ()
            # The last callbacks of these may come later; those of earlier ones have come.
            self._record_of = {record.instance: record for record in ended}

    def stop(self, record: InstanceRecord) -> None:
        """End an instance, or its recovery, for good. One that still executes is ended. Blocks."""
        record.stopping.set()
        self._end_recovery(record)
        while record.machine.state is _S.READY:
            if self._move_from(record, _S.READY, _S.DRAINING, "unload"):
                self._drain(record)
            self._end_recovery(record)
        if self._move_from(record, _S.DRAINING, _S.FINALIZING, "drained"):
            self._finalize(record)
        if not record.machine.ended:
            self._move(record, _S.STOPPED, "unload")

    def _end_recovery(self, record: InstanceRecord) -> None:
        """Break off the recovery of an instance, and wait until it has ended."""
        with self._lock:
            recover, record.unrecovered = record.unrecovered, None
        if recover is not None:
            recover()
        while record.recovery is not None and record.recovery.is_alive():
            if record.machine.state is _S.STARTING:
                error = ModelUnavailable(f"model '{self._model.name}' is being unloaded")
                self._backend.abort(record.instance, error)
            # The start may have begun a moment ago and have nothing yet to break off, so this is tried again.
            record.recovery.join(_JOIN_S)

    def _drain(self, record: InstanceRecord) -> None:
        """Take an instance out of the scheduler. One that executes is ended."""
        scheduler, instance = self._scheduler, record.instance
        if scheduler is None:
            return
        instance.accepts = False
        if scheduler.retire(instance):
            return
        if not scheduler.wait_idle(instance, time.monotonic()):
            error = ModelUnavailable(f"model '{self._model.name}' is being unloaded")
            self._backend.abort(instance, error)
            scheduler.wait_idle(instance, time.monotonic() + 10.0)

    def _finalize(self, record: InstanceRecord) -> None:
        try:
            self._backend.model_instance_finalize(record.instance)
        except Exception as error:
            _log.exception("[%s] finalizing the instance failed: %s", record.instance.name, error)
