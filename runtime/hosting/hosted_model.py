"""One model version from load to unload, with its scheduler, its supervisor and its signature.

Theory of operation. `load` and `unload` run once each. `load` runs on a thread that holds the model lock
(`ModelRegistry`), and so does `unload`, except of a model that was replaced, which nobody finds any more. In between,
the supervisor's threads change the state: no instance is left, or one came back. `_lock` guards the state. `_come_back`
holds it until the scheduler accepts requests, so an unload that begins meanwhile comes after it, and its refusal stays.
When `_give_up` runs, the scheduler refuses requests already (`Supervisor.check_given_up`). `_lock` is taken outside of
the scheduler's lock and never inside it.

A model that may sleep (`residency`) has an entry there. `wake` and `fall_asleep` start and end its instances in
between, and hold the model lock. The model stays READY: it takes requests, which wake it. `fall_asleep` ends restarts,
too, and undoes what one of them did that gave up the last instance meanwhile. A model with `sleep` and `wake` of its
own may keep its instances while it sleeps; it is dormant then. The scheduler has given them up, as if they had ended,
and gets them back when they are awake.

An update (`grow`, then `shrink`) also holds the model lock. In between, the registry's table changes.

Order of an unload: refuse requests, wait until those that are in are answered or the time is over, fail the rest, end
the instances, fail requests that were queued again while they ended, and finalize the model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.messages import beginning
from moonpool.runtime.errors import LoadFailed, ModelUnavailable
from moonpool.runtime.hosting.instance_record import InstanceRecord
from moonpool.runtime.hosting.scaling import InstanceSpec, Matching, matched, specs_of
from moonpool.runtime.hosting.supervisor import Supervisor
from moonpool.runtime.hosting.warmup import Warmup
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.backend import Backend, Model, ModelInstance
from moonpool.runtime.model.config.live import with_count, with_live_options, with_live_parts
from moonpool.runtime.model.config.model import ModelConfig, remarks
from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.model.states import MODEL, InstanceState, Machine, ModelState
from moonpool.runtime.observe.distributions import CacheSummaries, LatencySummaries
from moonpool.runtime.observe.metrics_options import MetricsOptions, first_response_bounds_ns, tags_of
from moonpool.runtime.observe.statistics import ResponseStatistics, Statistics
from moonpool.runtime.residency.autoscaling import QueueCounts
from moonpool.runtime.residency.residents import Residency, ResidentModel
from moonpool.runtime.schedule.failures import as_load_failure
from moonpool.runtime.schedule.rate_limiter import ModelPermits, RateLimiter
from moonpool.runtime.schedule.response_cache import CachingScheduler, ResponseCache
from moonpool.runtime.schedule.scheduler import Scheduler
from moonpool.runtime.stubs.handle import Stubs
from moonpool.runtime.stubs.readiness import Answer, ask_all

_log = RuntimeLog("moonpool")
_NO_CACHE = "model '%s' asks for a response cache, but there is no cache: %s"
# The time that instances of an update that failed elsewhere have for requests that they took meanwhile.
_UNDO_S = 30.0
# The states of models are remembered after these have gone.
_MOST_REASON_BYTES = 8192
# The states of an instance after something went wrong.
_BROKEN = (InstanceState.BACKING_OFF, InstanceState.FAILED)


class HostedModel:
    """A model version that loads once and unloads once. `load` and `unload` block; the rest is for any thread at any
    time.
    """

    # Those of its instances; None if they execute without permits.
    _permits: ModelPermits | None = None

    def __init__(
        self,
        backend: Backend,
        model: Model,
        stubs: Stubs,
        executor: Executor,
        tell: Callable[[str, str, str], None],
        metrics: MetricsOptions,
        *,
        goes_on: Callable[[], bool],
        cache: ResponseCache | None = None,
        limiter: RateLimiter | None = None,
        residency: Residency | None = None,
    ) -> None:
        """`goes_on` is as in `Supervisor`. `cache` is that of all models, for those whose configuration asks for it.

        `limiter` has the resources of all models; None if there are no limits. `residency` wakes the model, if it may
        sleep.
        """
        self.model = model
        self.scheduler: Scheduler
        self.signature: Signature
        self.supervisor: Supervisor
        self._backend = backend
        self._reactor = stubs.reactor
        self._executor = executor
        self._tell = tell
        self._goes_on = goes_on
        self._errors = stubs.errors
        self._metrics = metrics
        self._cache = cache if model.config.response_cache else None
        self._limiter = limiter
        self._residency: Residency | None = None
        if residency is not None and model.config.ensemble is None:
            model.is_asleep = residency.begins_asleep(model.options)
            if residency.takes_in(model.options):
                self._residency = residency
        # None if the model never sleeps.
        self.residence: ResidentModel | None = None
        # True while it sleeps with its instances.
        self.is_dormant = False
        # The error of the model's last `sleep` or `wake`, None if it ended well.
        self.hook_failure: BaseException | None = None
        # The reason why requests are refused after a model that was asleep could not be started.
        self._why_resting = ""
        # The duration of the load.
        self.load_s = 0.0
        self._lock = threading.Lock()
        # True once there are a scheduler and a supervisor.
        self._is_starting = False
        # True if an unload waits for nothing.
        self._must_end = False
        self._has_given_up = False
        self.machine = Machine(str(self), MODEL, time.monotonic(), "not loaded yet")

    def _move(self, state: ModelState, because: str) -> None:
        with self._lock:
            self.machine.move(state, because, time.monotonic())
        self._tell(str(self), str(state), because)

    def load(self) -> None:
        """Prepare the model, start its instances, serve. Raises `LoadFailed`, `ConfigError` and other errors of a
        load.
        """
        began_s = time.monotonic()
        self._move(ModelState.LOADING, "load")
        try:
            self.model.check_files()
            if self.model.is_asleep and self.model.config.inputs and self.model.config.outputs:
                # A process that only completes what is complete would cost a start, and nobody has asked for the model
                # yet.
                self.model.completes = False
            self._backend.model_initialize(self.model)
            try:
                self._start()
            except BaseException:
                self._finalize_model()
                raise
        except Exception as error:
            failure = as_load_failure(error, f"model '{self.model.name}'")
            self._move(ModelState.UNAVAILABLE, beginning(str(failure), _MOST_REASON_BYTES))
            if failure is error:
                raise
            raise failure from error
        self.load_s = time.monotonic() - began_s
        if self.model.is_asleep:
            self._backend.model_sleep(self.model)
            self._move(ModelState.READY, "asleep: the next request loads it")
            self._take_residence(is_awake=False)
            return
        self._move(ModelState.READY, "every instance is ready")
        self.scheduler.open()
        self._take_residence(is_awake=True)
        # An instance may have given up since it was ready. `_give_up` ignored that in the state LOADING, and `open`
        # undid the refusal.
        self.supervisor.check_given_up()

    def _start(self) -> None:
        model = self.model
        for remark in remarks(model.config.raw):
            _log.warning("model '%s': %s %s", model.name, *remark)
        if model.config.response_cache and self._cache is None:
            _log.warning(_NO_CACHE, model.name, model.cache_advice)
        instances = [] if model.is_asleep else self._made(specs_of(model.config.instance_groups))
        intake = self._backend.device_intake(model)
        self.signature = Signature(model.config, intake, is_native=model.source.is_native)
        self.supervisor = Supervisor(
            self._backend, model, instances, self._reactor, self._hear, self._give_up, self._come_back, self._goes_on
        )
        self.scheduler = self._new_scheduler()
        self.scheduler.note = partial(self._errors.add, model.name, model.version)
        self._prepare_statistics(self.scheduler.statistics)
        warmup = Warmup(model, self.signature, self.scheduler.states)
        self.supervisor.serve(self.scheduler, warmup)
        self._is_starting = True
        self._join_limiter(instances)
        try:
            self.supervisor.start_all()
        except BaseException:
            self._leave_limiter()
            raise

    def _new_scheduler(self) -> Scheduler:
        arguments = self.model, self._reactor, self._executor, self.supervisor.lost
        cache, limiter = self._cache, self._limiter
        scheduler = Scheduler(*arguments) if cache is None else CachingScheduler(cache, *arguments)
        self._permits = None if limiter is None else ModelPermits(limiter, scheduler)
        return scheduler

    def _join_limiter(self, instances: Sequence[ModelInstance]) -> None:
        if self._permits is not None:
            self._permits.join(instances)

    def _leave_limiter(self, instances: Sequence[ModelInstance] | None = None) -> None:
        if self._permits is not None:
            self._permits.leave(instances)

    def _prepare_statistics(self, statistics: Statistics) -> None:
        raw = self.model.config.raw
        statistics.tags = tags_of(raw)
        statistics.responses = ResponseStatistics(first_response_bounds_ns(raw))
        if self._metrics.summary_latencies:
            statistics.summaries = LatencySummaries()
            if statistics.cache is not None:
                statistics.cache.summaries = CacheSummaries()

    def give_up_loading(self) -> None:
        """Let `load` fail soon. For a thread that waits for it and was interrupted."""
        self.model.given_up.set()
        if self._is_starting:
            self.supervisor.give_up_starting()
        else:
            reason = LoadFailed(f"the load of {self} was interrupted")
            self._backend.model_abort(self.model, reason)

    def break_off_loading(self) -> None:
        """Let `load` or `grow` fail soon; the instances that serve go on."""
        if self.machine.state is ModelState.LOADING:
            self.give_up_loading()
        else:
            self.supervisor.give_up_starting()

    def _made(self, specs: Sequence[InstanceSpec]) -> list[ModelInstance]:
        return [ModelInstance(self._backend, self.model, *spec) for spec in specs]

    # Sleep

    def _take_residence(self, *, is_awake: bool) -> None:
        """Let the model be put to sleep, and woken by requests, from now on."""
        if self._residency is None:
            return
        self.scheduler.wanted = partial(self._residency.want, self)
        if not is_awake:
            self.scheduler.sleep()
        self.residence = self._residency.add(self, is_awake=is_awake)

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.model.name

    @property
    def options(self) -> ModelOptions:
        """The options of the model."""
        return self.model.options

    @property
    def uses(self) -> int:
        """The number of executions and failures, which grows with the requests that have ended."""
        statistics = self.scheduler.statistics
        return statistics.execution_count + statistics.fail_count

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return self.scheduler.queued

    @property
    def is_used(self) -> bool:
        """True if a request is inside, or a sequence."""
        return self.scheduler.is_used

    def watch(self, tell: Callable[[], object]) -> Callable[[], None]:
        """Call `tell` whenever a request may have left, until the function is called that this returns; as
        `Scheduler.watch`.
        """
        return self.scheduler.watch(tell)

    @property
    def has_given_up(self) -> bool:
        """True while all instances have been given up, and the model is not unloaded."""
        return self._has_given_up

    @property
    def why_broken(self) -> str:
        """The reason why an instance has ended and is not there again; empty if none has."""
        return str(self.supervisor.why_broken or "")

    @property
    def sleeps_because(self) -> str:
        """The reason why the model is without instances, or why they sleep; empty if it has some that serve."""
        residence = self.residence
        if residence is None or not residence.is_asleep:
            return ""
        return residence.machine.because

    @property
    def instances(self) -> int:
        """The count in the only group of instances."""
        return self.model.config.instance_groups[0].count

    @property
    def executing(self) -> float:
        """The number of instances that execute, as a part of `instances`: a group may have its count on each of several
        GPUs.
        """
        return self.scheduler.executing * self.instances / max(1, len(self.supervisor.records))

    @property
    def runs_on_gpus(self) -> bool:
        """True if the instances compute on GPUs."""
        return self.model.config.instance_groups[0].kind == "GPU"

    def queue_counts(self, now_s: float) -> QueueCounts:
        """Return the counts of the queue as they are now."""
        statistics, scheduler = self.scheduler.statistics, self.scheduler
        ended = statistics.success_count + statistics.fail_count
        return QueueCounts(now_s, ended, statistics.queue_ns, scheduler.queued)

    def scale_to(self, instances: int) -> None:
        """Change the count of the only group of instances while the model serves. Blocks. Raises as `grow`."""
        self.grow(with_count(self.model.config, instances))
        self.shrink(self.model.options, _UNDO_S)

    def pids(self) -> list[int]:
        """Return the processes of the instances, and what the model has beside them, such as a template."""
        processes = [getattr(each.instance.state, "process", None) for each in self.supervisor.records]
        pids = [each.pid for each in processes if each is not None and each.is_running]
        return [*pids, *self._backend.model_processes(self.model)]

    @property
    def shared_bytes(self) -> int:
        """The shared memory that counts for the model: what its processes were sent, and what callers write into."""
        states = [record.instance.state for record in self.supervisor.records]
        given = sum(getattr(each, "counted_bytes", 0) for each in states)
        return given + self._backend.model_shared_bytes(self.model)

    def wake(self) -> None:
        """Start the instances of a model that sleeps. Requests that wait run as soon as the first one is ready. Raises
        as `load`.
        """
        began_s = time.monotonic()
        if self._wake_dormant():
            return
        self.model.check_files()
        self.hook_failure = None
        self.model.is_asleep = False
        self._is_starting = True
        instances = self._made(specs_of(self.model.config.instance_groups))
        try:
            self._backend.model_wake(self.model)
            self._join_limiter(instances)
            self.supervisor.grow(instances)
        except BaseException:
            self._leave_limiter(instances)
            self._end_beside_instances()
            raise
        self.load_s = time.monotonic() - began_s
        self.scheduler.open()
        self.supervisor.check_given_up()
        self._tell(str(self), "AWAKE", "a request came")

    def _wake_dormant(self) -> bool:
        """Wake the instances of a dormant model. Returns False if it has none, and must start some."""
        if not self.is_dormant:
            return False
        self.is_dormant = False
        matching = self._matched(self.model.config)
        if matching.come or matching.go:
            # The configuration has changed since. The next start makes a template, too.
            self.supervisor.end_all()
            self._end_beside_instances()
            return False
        try:
            self._join_limiter([record.instance for record in self.supervisor.records])
            self.model.is_asleep = False
            self._note_hook(self.supervisor.wake_all())
        except BaseException:  # a signal handler may have raised while the hooks ran
            self._end_instances()
            raise
        self.scheduler.open()
        self.supervisor.check_given_up()
        self._tell(str(self), "AWAKE", "a request came")
        return True

    def fall_asleep(self, *, may_stay: bool) -> bool:
        """End the instances, if nothing is inside. Returns False if something is, or the model has given up. Blocks.

        If they `may_stay`, and the model has `sleep` and `wake`, its `sleep` is called instead, and the model is
        dormant after that.
        """
        if self.is_dormant:
            if may_stay:
                return False
            self.is_dormant = False
        elif self.machine.state is not ModelState.READY or not self.scheduler.doze():
            return False
        elif may_stay and self.supervisor.can_sleep and not self.scheduler.has_begun:
            try:
                self._note_hook(self.supervisor.sleep_all())
            except BaseException:  # a signal handler raised; all hooks have ended
                self._end_instances()
                raise
            if self.hook_failure is None:
                self._leave_limiter()
                self.model.is_asleep = self.is_dormant = True
                self._tell(str(self), "ASLEEP", "its instances sleep")
                return True
            _log.error("model '%s' cannot sleep, so its processes end: %s", self.name, self.hook_failure)
        self._end_instances()
        return True

    def _end_instances(self) -> None:
        """End all instances, and let requests wait, and wake the model, from now on."""
        self.supervisor.end_all()
        self.scheduler.forget_deserted()
        # An instance that was being restarted may have been given up meanwhile, and requests be refused. From here on
        # no thread is left that could do so.
        self._return("it fell asleep", self.scheduler.sleep)
        if self.model.options.instances is not None:
            self.model.config = with_count(self.model.config, self.model.options.instances[0])
        self._leave_limiter()
        self._end_beside_instances()
        self._tell(str(self), "ASLEEP", "its instances have ended")

    def _note_hook(self, failure: BaseException | None) -> None:
        self.hook_failure = failure
        if failure is not None:
            self._errors.add(self.model.name, self.model.version, str(failure))

    def _end_beside_instances(self) -> None:
        self.model.is_asleep = True
        try:
            self._backend.model_sleep(self.model)
        except Exception as error:
            _log.exception("%s: cannot end the processes beside its instances: %s", self, error)

    def rest(self, error: MoonpoolError) -> None:
        """Fail all requests that wait, and refuse others."""
        self._why_resting = str(error)
        self.scheduler.rest(error)

    def sleep_again(self) -> None:
        """Let requests wait again, and wake the model, after `rest`."""
        self._why_resting = ""
        self.scheduler.sleep()

    # Update

    def grow(self, config: ModelConfig) -> Callable[[], None]:
        """Start the instances that another configuration has in addition, whose fixed part is the same.

        Returns a function that undoes it. If an instance does not start, nothing has changed. Raises as `load`.
        """
        before = self.model.config
        # The new instances get the new configuration. The others have had theirs.
        self.model.config = with_live_parts(before, config)
        if self.model.is_asleep:
            return lambda: setattr(self.model, "config", before)
        instances = self._made(self._matched(config).come)
        try:
            self._join_limiter(instances)
            self.supervisor.grow(instances)
        except BaseException:
            self._leave_limiter(instances)
            self.model.config = before
            raise

        def undo() -> None:
            self.model.config = before
            self.supervisor.shrink(instances, time.monotonic() + _UNDO_S)

        return undo

    def shrink(self, options: ModelOptions, drain_timeout_s: float) -> None:
        """Follow `grow`: apply the deadlines of `options` and the queue policies, and end the instances that are too
        many.

        Each of these finishes what it has first, if that takes no longer than `drain_timeout_s`.
        """
        self.model.options = with_live_options(self.model.options, options)
        self.supervisor.watch_deadlines()
        if self.model.config.sequence_batching is None:
            self.scheduler.reconfigure(self.model.config)
        if self.model.is_asleep:
            return
        go = {spec.name for spec in self._matched(self.model.config).go}
        instances = [each.instance for each in self.supervisor.records if each.instance.name in go]
        self.supervisor.shrink(instances, time.monotonic() + drain_timeout_s)

    def _matched(self, config: ModelConfig) -> Matching:
        instances = [record.instance for record in self.supervisor.records]
        present = [
            InstanceSpec(each.name, each.kind, each.device_id, each.rate_limits, each.host_policy) for each in instances
        ]
        return matched(present, specs_of(config.instance_groups))

    def _hear(self, instance: str, state: str, because: str) -> None:
        if state in _BROKEN:
            self._errors.add(self.model.name, self.model.version, because, instance=instance)
        self._tell(instance, state, because)

    def _give_up(self, why: str) -> None:
        """Make the model UNAVAILABLE, as no instance is left. It may be unloading already."""
        because = f"every instance gave up: {why}"
        with self._lock:
            if self.machine.state is not ModelState.READY:
                return
            self.machine.move(ModelState.UNAVAILABLE, because, time.monotonic())
            self._has_given_up = True
        self._tell(str(self), str(ModelState.UNAVAILABLE), because)

    def _come_back(self) -> None:
        """Take requests again, now that an instance is ready."""
        self._return("an instance came back", self.scheduler.open)

    def _return(self, because: str, accept: Callable[[], None]) -> None:
        """Take requests again, as `accept` lets the scheduler do, if all instances had been given up."""
        with self._lock:
            # With the lock held to the end, an unload that begins meanwhile refuses requests after this.
            if self.machine.state is not ModelState.UNAVAILABLE or not self._has_given_up:
                return
            self._has_given_up = False
            self.machine.move(ModelState.READY, because, time.monotonic())
            accept()
        self._tell(str(self), str(ModelState.READY), because)

    def unload(self, drain_timeout_s: float) -> None:
        """Refuse new requests, finish the present ones, finalize. Requests that are not done in time get an error."""
        is_awake = self._residency is None or self._residency.remove(self)
        self._move(ModelState.UNLOADING, "unload")
        error = ModelUnavailable(f"Request for model '{self.model.name}' which is being unloaded")
        self.scheduler.refuse(error)
        if not is_awake:
            self.scheduler.drop(error)
        if self._must_end:
            self.end_at_once()
        began_s = time.monotonic()
        if not self.scheduler.wait_empty(began_s + drain_timeout_s):
            _log.warning(
                "%s: %d requests are still queued and %d instances execute after %.1f s",
                self,
                self.scheduler.queued,
                self.scheduler.executing,
                time.monotonic() - began_s,
            )
            self.scheduler.drop(error)
        self.supervisor.stop_all()
        self.scheduler.drop(error)
        if isinstance(self.scheduler, CachingScheduler):
            self.scheduler.leave_cache()
        self._leave_limiter()
        self._finalize_model()
        self._move(ModelState.UNAVAILABLE, "unloaded")

    def stop_draining(self) -> None:
        """Let the wait of `unload` for requests end now. From any thread."""
        if self._is_starting:
            self.scheduler.hurry()

    def end_at_once(self) -> None:
        """Let a load fail, and an unload end, without a wait for requests or for `finalize`. Any thread may repeat
        it.
        """
        self._must_end = True
        self.stop_draining()
        reason = ModelUnavailable(f"model '{self.name}' was ended at once")
        if self.machine.state is ModelState.LOADING:
            self.give_up_loading()
        elif self.machine.state is ModelState.UNLOADING:
            self.supervisor.abort_all(reason)
            self._backend.model_abort(self.model, reason)

    @property
    def waits_for(self) -> str:
        """The reason why a load or an unload takes its time, for people. Empty if none does, or not for long."""
        if self.machine.state is ModelState.LOADING:
            return "is loading"
        if self.machine.state is not ModelState.UNLOADING:
            return ""
        count = self.scheduler.wanted_count
        if count:
            return f"has {count} request{'s' * (count > 1)} to finish (drain_timeout_s)"
        return "" if self.scheduler.executing else "finalizes (MOONPOOL_FINALIZE_TIMEOUT_S)"

    def forget_responses(self) -> None:
        """Drop what the response cache has of this version. It goes on keeping what comes."""
        if isinstance(self.scheduler, CachingScheduler):
            self.scheduler.forget_responses()

    def _finalize_model(self) -> None:
        try:
            self._backend.model_finalize(self.model)
        except Exception as error:
            _log.exception("finalizing %s failed: %s", self, error)

    def ask_ready(self, answer: Answer) -> None:
        """Ask whether a request could run now, and the model itself says that it is ready.

        `answer` gets None, or the reason why not: once, within seconds, on any thread. It must not block.
        """
        reason = self.why_not_serving()
        if reason is not None:
            answer(reason)
            return
        # One that is dormant is asked when it is awake: now its weights may be anywhere.
        records = [] if self.model.is_asleep else self.supervisor.records
        ask_all([record.instance for record in records if _serves(record)], answer)

    @property
    def instance_down(self) -> str | None:
        """The name of the first instance if no instance is ready at the moment, else None."""
        records = self.supervisor.records
        is_up = not records or any(_serves(record) for record in records)
        return None if is_up else records[0].instance.name

    def why_not_serving(self) -> str | None:
        """Return None if a request could run now, whatever the model itself says, else the reason."""
        if self.machine.state is not ModelState.READY:
            return f"{self.machine.state}: {self.machine.because}"
        if self._why_resting or self.model.is_asleep:
            return self._why_resting or None
        records = self.supervisor.records
        if any(_serves(record) for record in records):
            return None
        return "; ".join(f"{record.instance.name} {record.machine.because}" for record in records)

    def __str__(self) -> str:
        return f"{self.model.name}:{self.model.version}"

    def __repr__(self) -> str:
        return repr(self.machine)


def _serves(record: InstanceRecord) -> bool:
    return record.machine.state is InstanceState.READY
