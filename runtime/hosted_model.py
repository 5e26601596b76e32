"""One model version from load to unload: what holds its backend's model, its scheduler and its supervisor together."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from moonpool.runtime.backend import Model, ModelInstance
from moonpool.runtime.config import unused_fields
from moonpool.runtime.errors import LoadFailed, ModelUnavailable
from moonpool.runtime.failures import as_load_failure, no_instance_left
from moonpool.runtime.latency_summary import LatencySummaries
from moonpool.runtime.metric_settings import first_response_bounds_ns, tags_of
from moonpool.runtime.readiness import ask_all
from moonpool.runtime.response_statistics import ResponseStatistics
from moonpool.runtime.scheduler import Scheduler
from moonpool.runtime.signature import Signature
from moonpool.runtime.states import MODEL, InstanceState, Machine, ModelState
from moonpool.runtime.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from moonpool.runtime.backend import Backend
    from moonpool.runtime.readiness import Answer
    from moonpool.runtime.seat import Seat
    from moonpool.runtime.statistics import Statistics
    from moonpool.runtime.stubs import Stubs

_log = logging.getLogger("moonpool")
# What an instance comes into when something went wrong.
_BROKEN = (InstanceState.BACKING_OFF, InstanceState.FAILED)


class HostedModel:
    """Loads once, unloads once. `load` and `unload` block; the rest is for any thread at any time."""

    def __init__(
        self,
        backend: Backend,
        model: Model,
        stubs: Stubs,
        executor: Executor,
        tell: Callable[[str, str, str], None],
    ) -> None:
        self.model = model
        self.scheduler: Scheduler
        self.signature: Signature
        self.supervisor: Supervisor
        self._backend = backend
        self._reactor = stubs.reactor
        # Who sends requests for the model past the scheduler.
        self._audience = stubs.audience
        self._executor = executor
        self._tell = tell
        self._goes_on = stubs.is_beyond_control
        self._errors = stubs.models.errors
        self._metrics = stubs.models.metrics_options
        # How long the load took.
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
        """Prepare the model, start its instances, serve. Raises `LoadFailed`, `ConfigError` and their like."""
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
        # Whoever gave up in between was not heard, and had its refusal undone.
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
        self.scheduler.outcomes.note = partial(self._errors.add, model.name, model.version)
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
        """Somebody who waits for `load` on another thread has had enough: let it fail soon."""
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
        """No instance is left. Called while the model may be on its way out already."""
        because = f"every instance gave up: {why}"
        with self._lock:
            if self.machine.state is not ModelState.READY:
                return
            self.machine.move(ModelState.UNAVAILABLE, because, time.monotonic())
            self._has_given_up = True
            self._audience.refuse(self.model, no_instance_left(self.model.name, why))
        self._tell(str(self), str(ModelState.UNAVAILABLE), because)

    def _come_back(self) -> None:
        """Take requests again, now that an instance is ready, if all of them had been given up."""
        because = "an instance came back"
        with self._lock:
            # The lock is held to the end. An unload that begins meanwhile waits, and then refuses requests.
            if self.machine.state is not ModelState.UNAVAILABLE or not self._has_given_up:
                return
            self._has_given_up = False
            self.machine.move(ModelState.READY, because, time.monotonic())
            self.scheduler.open()
            self._audience.welcome(self.model)
        self._tell(str(self), str(ModelState.READY), because)

    def unload(self, drain_timeout_s: float) -> None:
        """Refuse new requests, finish those that are there, finalize. Requests over the time get an error."""
        self._move(ModelState.UNLOADING, "unload")
        error = ModelUnavailable(f"Request for model '{self.model.name}' which is being unloaded")
        self.scheduler.refuse(error)
        wait_elsewhere = self._audience.drain(self.model, error, drain_timeout_s)
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
        """Tell whether a request could run now, and the model itself says that it is ready.

        `answer` gets None or why not: once, within seconds, on any thread. It must not block.
        """
        reason = self.why_not_serving()
        if reason is not None:
            answer(reason)
            return
        ask_all([seat.instance for seat in self.supervisor.seats if _serves(seat)], answer)

    @property
    def instance_down(self) -> str | None:
        """The name of the first instance if no instance has a process at the moment, else None."""
        seats = self.supervisor.seats
        is_up = not seats or any(_serves(seat) for seat in seats)
        return None if is_up else seats[0].instance.name

    def why_not_serving(self) -> str | None:
        """None if a request could run now, whatever the model itself says, else why not."""
        if self.machine.state is not ModelState.READY:
            return f"{self.machine.state}: {self.machine.because}"
        seats = self.supervisor.seats
        if any(_serves(seat) for seat in seats):
            return None
        return "; ".join(f"{seat.instance.name} {seat.machine.because}" for seat in seats)

    def __str__(self) -> str:
        return f"{self.model.name}:{self.model.version}"

    def __repr__(self) -> str:
        return repr(self.machine)


def _serves(seat: Seat) -> bool:
    return seat.machine.state is InstanceState.READY
