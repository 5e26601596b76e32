"""Finds the models that would profit from another instance, from counts that the server and the kernel keep anyway."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moonpool.runtime.hosting.hosted_model import HostedModel
from moonpool.runtime.model.states import InstanceState
from moonpool.runtime.observe.another_instance import LoadSample, Watch, advice, largest_batch
from moonpool.runtime.process.usage import Reading, reading, spare_cores, usage_of

# Fewer waiting batches than this count as none, and a model in which nothing waits is not measured.
_LEAST_WAITING = 0.5


class Adviser:
    """Keeps the advice on all models. `sample` is for one thread, `of` for any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, read: Callable[[], Reading] = reading) -> None:
        """`read` returns what the machine's processors have done until now."""
        self._clock = clock
        self._read = read
        self._watched: dict[str, _Watched] = {}
        self._advice: Mapping[str, dict[str, Any]] = {}
        self._machine: Reading | None = None

    def of(self, name: str) -> dict[str, Any] | None:
        """Return the advice on a model version, as `another_instance.advice` words it; None if there is none."""
        return self._advice.get(name)

    def sample(self, models: Iterable[HostedModel]) -> None:
        """Take a sample of every model that is served."""
        now_s = self._clock()
        before, self._watched = self._watched, {}
        needed = []
        for hosted in models:
            name = str(hosted)
            watched = before.get(name)
            if watched is None or watched.hosted is not hosted:
                watched = _Watched(hosted)
            self._watched[name] = watched
            if watched.look():
                needed.append(watched)
        if needed:
            self._add(needed, now_s)
        self._advice = {
            name: found for name, watched in self._watched.items() if (found := watched.advice()) is not None
        }

    def _add(self, needed: Iterable[_Watched], now_s: float) -> None:
        try:
            machine = self._read()
        except (OSError, ValueError, LookupError):  # the kernel does not say, so there is no advice
            return
        for watched in needed:
            cpus = watched.hosted.model.options.cpus
            spare = 0.0 if self._machine is None else spare_cores(self._machine, machine, cpus)
            watched.add(now_s, spare)
        self._machine = machine


class _Watched:
    """A model version, and the measurements of it."""

    def __init__(self, hosted: HostedModel) -> None:
        self.hosted = hosted
        self._watch = Watch()
        self._waiting = 0.0
        batching = hosted.model.config.dynamic_batching
        self._batch = largest_batch(hosted.model.config.max_batch_size, has_batching=batching is not None)
        records = hosted.supervisor.records
        self._is_on_gpu = any(record.instance.kind == "GPU" for record in records)

    def look(self) -> bool:
        """Look how many requests wait, and return whether more must be measured."""
        waiting = float(self.hosted.scheduler.unplaced)
        self._waiting = waiting / self._batch if waiting >= _LEAST_WAITING * self._batch else 0.0
        if self._is_on_gpu or not (self._waiting or self._watch.is_needed):
            self._watch.clear()
            return False
        return True

    def add(self, now_s: float, spare: float) -> None:
        cpu_s = {}
        records = self.hosted.supervisor.records
        for record in records:
            process = getattr(record.instance.state, "process", None)
            if record.machine.state is not InstanceState.READY or process is None:
                continue
            usage = usage_of(process.pid) if process.is_running else None
            if usage is not None:
                cpu_s[process.pid] = usage.cpu_s
        if not cpu_s:
            self._watch.clear()
        elif len(cpu_s) == len(records):
            executing = self.hosted.scheduler.executing
            self._watch.add(LoadSample(now_s, cpu_s, executing, self._waiting, spare))
        else:
            # Fewer instances than usual say nothing of the usual ones.
            self._watch.forget()

    def advice(self) -> dict[str, Any] | None:
        reason, load = self._watch.reason, self._watch.load
        if reason is None or load is None:
            return None
        return advice(reason, load, self.hosted.model.config.instance_groups, self._batch)
