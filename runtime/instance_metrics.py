"""What moonpool tells of models and their instances beside what Triton would: processes, memory, restarts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from moonpool.runtime.bucket_counts import bucket_samples
from moonpool.runtime.exposition import Family, Sample
from moonpool.runtime.limits.recycling import REASONS
from moonpool.runtime.model_metrics import labels_of
from moonpool.runtime.states import InstanceState
from moonpool.runtime.statistics import DURATION_BOUNDS_NS
from moonpool.runtime.usage import usage_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moonpool.runtime.exposition import Labels
    from moonpool.runtime.hosted_model import HostedModel
    from moonpool.runtime.scheduler import Scheduler
    from moonpool.runtime.seat import Seat

_NS_PER_S = 1_000_000_000
_BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

# Name, type and description of each.
_FAMILIES = {
    "moonpool_model_ready": ("gauge", "1 where a request to the model could run now, else 0"),
    "moonpool_instances": ("gauge", "Model instances by state"),
    "moonpool_requests_in_flight": (
        "gauge",
        "Requests that were taken in and have not had their last response",
    ),
    "moonpool_instances_executing": ("gauge", "Model instances that execute a batch"),
    "moonpool_request_duration_seconds": (
        "histogram",
        "Time from the arrival of a request to its outcome, of requests that succeeded",
    ),
    "moonpool_batch_size": ("histogram", "Rows in a batch, by execution"),
    "moonpool_recovery_seconds": (
        "histogram",
        "Time from the end of a stub process to the next one that is ready",
    ),
    "moonpool_instance_sandbox_info": (
        "gauge",
        "1; the labels say how the instance's stub process is confined",
    ),
    "moonpool_instance_restarts_total": (
        "counter",
        "Restarts of the instance's stub process after it broke",
    ),
    "moonpool_instance_recycles_total": (
        "counter",
        "New starts of the instance's stub process because it has served long enough, by the limit",
    ),
    "moonpool_stub_start_time_seconds": (
        "gauge",
        "Start of the stub process, in seconds since the epoch",
    ),
    "moonpool_stub_cpu_seconds_total": ("counter", "Processor time of the stub process"),
    "moonpool_stub_resident_memory_bytes": (
        "gauge",
        "Resident memory of the stub process, shared memory included",
    ),
    "moonpool_region_allocated_bytes": (
        "gauge",
        "Shared memory of the instance, by what it is for",
    ),
    "moonpool_region_used_bytes": (
        "gauge",
        "Shared memory that inputs of the instance's requests lie in at the moment",
    ),
}
# No model may have metrics of these names.
NAMES = tuple(_FAMILIES)


class _Samples:
    """Samples by the name of their family."""

    def __init__(self) -> None:
        self.of: dict[str, list[Sample]] = {name: [] for name in _FAMILIES}

    def add(self, name: str, labels: Labels, value: float) -> None:
        self.of[name].append(Sample("", labels, value))

    def families(self) -> list[Family]:
        return [Family(name, text, kind, self.of[name]) for name, (kind, text) in _FAMILIES.items()]


def instance_families(served: Iterable[HostedModel]) -> list[Family]:
    """The families of all models and their instances. Reads /proc, and takes each model's lock for a moment."""
    samples = _Samples()
    for hosted in served:
        _add_model(samples, hosted)
        for seat in hosted.supervisor.seats:
            _add_instance(samples, hosted, seat)
    return samples.families()


def _add_model(samples: _Samples, hosted: HostedModel) -> None:
    scheduler, supervisor = hosted.scheduler, hosted.supervisor
    statistics = scheduler.statistics
    labels = labels_of(statistics)
    states = [seat.machine.state for seat in supervisor.seats]
    samples.add("moonpool_model_ready", labels, int(hosted.why_not_serving() is None))
    for state in InstanceState:
        by_state = labels_of(statistics, ("state", str(state)))
        samples.add("moonpool_instances", by_state, states.count(state))
    samples.add("moonpool_requests_in_flight", labels, _in_flight(scheduler))
    samples.add("moonpool_instances_executing", labels, scheduler.executing)
    samples.of["moonpool_request_duration_seconds"] += bucket_samples(
        DURATION_BOUNDS_NS, statistics.by_duration, statistics.success_ns, labels, _NS_PER_S
    )
    samples.of["moonpool_batch_size"] += _batch_sizes(statistics.batch_sizes(), labels)
    samples.of["moonpool_recovery_seconds"] += supervisor.recoveries.samples(labels, _NS_PER_S)


def _in_flight(scheduler: Scheduler) -> int:
    executing = scheduler.executing_since(time.monotonic_ns() + 1)
    inside = sum(len(each.requests) for each in executing)
    return scheduler.queued + inside + len(scheduler.outcomes.open)


def _batch_sizes(executions: dict[int, int], labels: Labels) -> list[Sample]:
    counts = [0] * (len(_BATCH_BOUNDS) + 1)
    for rows, count in executions.items():
        place = sum(1 for bound in _BATCH_BOUNDS if rows > bound)
        counts[place] += count
    total = sum(rows * count for rows, count in executions.items())
    return bucket_samples(_BATCH_BOUNDS, counts, total, labels)


def _add_instance(samples: _Samples, hosted: HostedModel, seat: Seat) -> None:
    statistics = hosted.scheduler.statistics
    # Not "instance", which Prometheus calls the server that it asks.
    instance = ("model_instance", seat.instance.name)
    labels = labels_of(statistics, instance)
    samples.add("moonpool_instance_restarts_total", labels, seat.restarts)
    counts = hosted.supervisor.recycling.counts
    for reason in REASONS:
        by_reason = labels_of(statistics, instance, ("reason", reason))
        samples.add("moonpool_instance_recycles_total", by_reason, counts[instance[1], reason])
    stub = seat.instance.state
    process = getattr(stub, "process", None)
    if process is None or not process.is_running:
        return
    confinement = seat.instance.confinement
    if confinement is not None:
        layers = ",".join(layer.partition(":")[0] for layer in confinement.layers)
        sandbox = ("level", confinement.level), ("layers", layers)
        by_layers = labels_of(statistics, instance, *sandbox)
        samples.add("moonpool_instance_sandbox_info", by_layers, 1)
    usage = usage_of(process.pid)
    if usage is not None:
        samples.add("moonpool_stub_start_time_seconds", labels, usage.started_s)
        samples.add("moonpool_stub_cpu_seconds_total", labels, usage.cpu_s)
        samples.add("moonpool_stub_resident_memory_bytes", labels, usage.rss_bytes)
    link = stub.link
    for direction, size in (
        ("request", link.loans.size_bytes),
        ("response", link.size_bytes() - link.loans.size_bytes),
    ):
        by_direction = labels_of(statistics, instance, ("direction", direction))
        samples.add("moonpool_region_allocated_bytes", by_direction, size)
    samples.add("moonpool_region_used_bytes", labels, link.loans.used_bytes)
