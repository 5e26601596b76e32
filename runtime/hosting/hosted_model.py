"""One model version from load to unload, with its scheduler, its supervisor and its signature.

Theory of operation. `load` and `unload` run once each. `load` runs on a thread that holds the model lock (`ModelRegistry`),
and so does `unload`, except of a model that was replaced, which nobody finds any more. In between, the supervisor's threads
change the state: no instance is left, or one came back. `_lock` guards the state. `_come_back` holds it until the scheduler
and front-end processes accept requests, so an unload that begins meanwhile comes after it, and its refusal stays. `_give_up`
holds it until front-end processes refuse requests; the scheduler does so before (`Supervisor.check_given_up`). `_lock` is taken
outside of the scheduler's lock and never inside it.

Order of an unload: refuse requests here and in front-end processes, wait until those that are in are answered or the time is
over, fail the rest, end the instances, fail requests that were queued again while they ended, and finalize the model.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from moonpool.runtime.errors import LoadFailed, ModelUnavailable
from moonpool.runtime.hosting.instance_record import InstanceRecord
from moonpool.runtime.hosting.supervisor import Supervisor
from moonpool.runtime.model.backend import Backend, Model, ModelInstance
from moonpool.runtime.model.config.model import unused_fields
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.model.states import MODEL, InstanceState, Machine, ModelState
from moonpool.runtime.observe.distributions import LatencySummaries
from moonpool.runtime.observe.metrics_options import (
    MetricsOptions,
    first_response_bounds_ns,
    tags_of,
)
from moonpool.runtime.observe.statistics import ResponseStatistics, Statistics
from moonpool.runtime.schedule.failures import as_load_failure, no_instance_left
from moonpool.runtime.schedule.scheduler import Scheduler
from moonpool.runtime.stubs.handle import Stubs
from moonpool.runtime.stubs.readiness import Answer, ask_all

_log = logging.getLogger("moonpool")
# The states of an instance after something went wrong.
_BROKEN = (InstanceState.BACKING_OFF, InstanceState.FAILED)


class HostedModel:
    """A model version that loads once and unloads once. `load` and `unload` block; the rest is for any thread at any time."""

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
    ) -> None:
        """`goes_on` is as in `Supervisor`."""
        self.model = model
        self.scheduler: Scheduler
        self.signature: Signature
        self.supervisor: Supervisor
        self._backend = backend
        self._reactor = stubs.reactor
        # Other processes send batches to the instances through this, past the scheduler.
        self._sharing = stubs.sharing
        self._executor = executor
        self._tell = tell
        self._goes_on = goes_on
        self._errors = stubs.errors
        self._metrics = metrics
        # The duration of the load.
        self.load_s = 0.0
        self._lock = threading.Lock()
        self._is_starting = False
        self._has_given_up = False
        self.machine = Machine(str(self), MODEL, time.monotonic(), "not loaded yet")

    def _move(self, state: ModelState, because: str) -> None:
        with self._lock:
            self.machine.move(state, because, time.monotonic())
        self._tell(str(self), str(state), because)

    def load(self) -> None:
        """Prepare the model, start its instances, serve. Raises `LoadFailed`, `ConfigError` and other errors of a load."""
        began_s = time.monotonic()
        self._move(ModelState.LOADING, "load")
        try:
            self._backend.model_initialize(self.model)
            try:
                self._start()
            except BaseException:
                self._finalize_model()
                raise
        except Exception as error:
            failure = as_load_failure(error, f"model '{self.model.name}'")
            self._move(ModelState.UNAVAILABLE, str(failure))
            if failure is error:
                raise
            raise failure from error
        self.load_s = time.monotonic() - began_s
        self._move(ModelState.READY, "every instance is ready")
        self.scheduler.open()
        # An instance may have given up since it was ready. `_give_up` ignored that in the state LOADING, and `open`
        # undid the refusal.
        self.supervisor.check_given_up()

    def _start(self) -> None:
        model = self.model
        for field in unused_fields(model.config.raw):
            _log.warning("model '%s': %s has no effect in moonpool yet", model.name, field)
        instances = self._instances()
        self.signature = Signature(model.config, self._backend.device_intake(model))
        self.supervisor = Supervisor(
            self._backend,
            model,
            instances,
            self._reactor,
            self._hear,
            self._give_up,
            self._come_back,
            self._goes_on,
        )
        self.scheduler = Scheduler(model, self._reactor, self._executor, self.supervisor.lost)
        self.scheduler.note = partial(self._errors.add, model.name, model.version)
        self._prepare_statistics(self.scheduler.statistics)
        self.supervisor.serve(self.scheduler)
        self._is_starting = True
        self.supervisor.start_all()

    def _prepare_statistics(self, statistics: Statistics) -> None:
        raw = self.model.config.raw
        statistics.tags = tags_of(raw)
        statistics.responses = ResponseStatistics(first_response_bounds_ns(raw))
        if self._metrics.summary_latencies:
            statistics.summaries = LatencySummaries()

    def give_up_loading(self) -> None:
        """Let `load` fail soon. For a thread that waits for it and was interrupted."""
        if self._is_starting:
            self.supervisor.give_up_starting()
        else:
            reason = LoadFailed(f"the load of {self} was interrupted")
            self._backend.model_abort(self.model, reason)

    def _instances(self) -> list[ModelInstance]:
        model = self.model
        instances = []
        for group in model.config.instance_groups:
            number = 0
            for device_id in group.gpus or (0,):
                for _ in range(group.count):
                    name = f"{group.name}_{number}"
                    number += 1
                    instances.append(
                        ModelInstance(self._backend, model, name, group.kind, device_id)
                    )
        return instances

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
            self._sharing.refuse(self.model, no_instance_left(self.model.name, why))
        self._tell(str(self), str(ModelState.UNAVAILABLE), because)

    def _come_back(self) -> None:
        """Take requests again, now that an instance is ready, if all of them had been given up."""
        because = "an instance came back"
        with self._lock:
            # With the lock held to the end, an unload that begins meanwhile refuses requests after this.
            if self.machine.state is not ModelState.UNAVAILABLE or not self._has_given_up:
                return
            self._has_given_up = False
            self.machine.move(ModelState.READY, because, time.monotonic())
            self.scheduler.open()
            self._sharing.welcome(self.model)
        self._tell(str(self), str(ModelState.READY), because)

    def unload(self, drain_timeout_s: float) -> None:
        """Refuse new requests, finish the present ones, finalize. Requests that are not done in time get an error."""
        self._move(ModelState.UNLOADING, "unload")
        error = ModelUnavailable(f"Request for model '{self.model.name}' which is being unloaded")
        self.scheduler.refuse(error)
        wait_elsewhere = self._sharing.drain(self.model, error, drain_timeout_s)
        if not self.scheduler.wait_empty(time.monotonic() + drain_timeout_s):
            _log.warning(
                "%s: %d requests are still queued and %d instances execute after %g s",
                self,
                self.scheduler.queued,
                self.scheduler.executing,
                drain_timeout_s,
            )
            self.scheduler.drop(error)
        wait_elsewhere()
        self.supervisor.stop_all()
        self.scheduler.drop(error)
        self._finalize_model()
        self._move(ModelState.UNAVAILABLE, "unloaded")

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
        ask_all([record.instance for record in self.supervisor.records if _serves(record)], answer)

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
