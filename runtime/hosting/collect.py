"""Collect the metrics of hosted models: Triton's, and moonpool's own of their instances."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moonpool.ipc.policy import is_contained
from moonpool.runtime.hosting.hosted_model import HostedModel
from moonpool.runtime.hosting.instance_record import InstanceRecord
from moonpool.runtime.hosting.recycling import REASONS
from moonpool.runtime.model.states import InstanceState
from moonpool.runtime.observe.distributions import bucket_samples
from moonpool.runtime.observe.exposition import ExposedFamily, Labels, Sample
from moonpool.runtime.observe.metric_families import (
    CACHE,
    CACHE_FAMILIES,
    CACHE_SUMMARIES,
    COUNTS,
    DURATIONS,
    FIRST_RESPONSE,
    INSTANCE_FAMILIES,
    START_FAMILIES,
    SUMMARIES,
    Counters,
    labels_of,
)
from moonpool.runtime.observe.metrics_options import MetricsOptions
from moonpool.runtime.observe.statistics import DURATION_BOUNDS_NS, Statistics
from moonpool.runtime.process.usage import usage_of
from moonpool.runtime.residency.residents import SLEEP_REASONS, ResidentModel
from moonpool.runtime.schedule.response_cache import ResponseCache
from moonpool.runtime.stubs.handle import Starts

_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000
_BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def model_families(served: Iterable[HostedModel], options: MetricsOptions) -> list[ExposedFamily]:
    """Return the families of all models, each with lines for each model version."""
    served = list(served)
    schedulers = [hosted.scheduler for hosted in served]
    all_of = [each.statistics for each in schedulers]
    families = [
        ExposedFamily(
            "nv_inference_request_success",
            "Number of successful inference requests, all batch sizes",
            "counter",
            [_sample(each, each.success_count) for each in all_of],
        ),
        ExposedFamily(
            "nv_inference_request_failure",
            "Number of failed inference requests, all batch sizes",
            "counter",
            [_sample(each, count, reason) for each in all_of for reason, count in each.fail_counts.items()],
        ),
        *_counters(COUNTS, all_of),
    ]
    if options.counter_latencies:
        families += _counters(DURATIONS, all_of)
    if cached := [(each, each.cache) for each in all_of if each.cache is not None]:
        families += [
            ExposedFamily(name, text, "counter", [_sample(each, of(c)) for each, c in cached])
            for name, text, of in CACHE
        ]
    pending = [_sample(each.statistics, each.queued) for each in schedulers]
    families += [
        ExposedFamily(
            "nv_inference_pending_request_count",
            "Instantaneous number of pending requests awaiting execution per-model.",
            "gauge",
            pending,
        ),
        ExposedFamily(
            "nv_model_load_duration_secs",
            "Model load time in seconds",
            "gauge",
            [Sample("", labels_of(each.scheduler.statistics), each.load_s) for each in served],
        ),
    ]
    if options.histogram_latencies:
        families.append(_first_responses(served))
    if options.summary_latencies:
        families += _summaries(all_of, options)
        families += _cache_summaries(all_of, options)
    return families


def cache_families(cache: ResponseCache | None) -> list[ExposedFamily]:
    """Return the families of the response cache, none without one."""
    if cache is None:
        return []
    values = cache.size_bytes, cache.used_bytes, len(cache), cache.evictions
    return [
        ExposedFamily(name, text, kind, [Sample("", (), value)])
        for (name, (kind, text)), value in zip(CACHE_FAMILIES.items(), values, strict=True)
    ]


def start_families(starts: Starts, spares: Sequence[int]) -> list[ExposedFamily]:
    """Return the families of the processes that were started, by the way, and of those that wait. Reads /proc."""
    used = [usage for pid in spares if (usage := usage_of(pid)) is not None]
    phases = [
        sample
        for (way, phase), times in starts.times.items()
        for sample in times.samples((("phase", phase), ("way", way)), _NS_PER_S)
    ]
    samples = (
        [Sample("", (("way", way),), count) for way, count in starts.counts().items()],
        phases,
        [Sample("", (), len(used))],
        [Sample("", (), sum(usage.rss_bytes for usage in used))],
    )
    return [
        ExposedFamily(name, text, kind, found)
        for (name, (kind, text)), found in zip(START_FAMILIES.items(), samples, strict=True)
    ]


def _counters(counters: Counters, all_of: Iterable[Statistics]) -> list[ExposedFamily]:
    return [
        ExposedFamily(name, text, "counter", [_sample(each, of(each)) for each in all_of])
        for name, text, of in counters
    ]


def _first_responses(served: Iterable[HostedModel]) -> ExposedFamily:
    samples = []
    for hosted in served:
        statistics = hosted.scheduler.statistics
        first, labels = statistics.responses.first, labels_of(statistics)
        if hosted.model.config.decoupled:
            samples += first.samples(labels, _NS_PER_MS)
        else:  # the first response is the only one
            counts = statistics.within(first.bounds)
            samples += bucket_samples(first.bounds, counts, statistics.success_ns, labels, _NS_PER_MS)
    text = "Duration from request to first response in milliseconds"
    return ExposedFamily(FIRST_RESPONSE, text, "histogram", samples)


def _summaries(all_of: Iterable[Statistics], options: MetricsOptions) -> list[ExposedFamily]:
    families = []
    for name, text, of in SUMMARIES:
        samples = []
        for each in all_of:
            if each.summaries is not None:
                labels = labels_of(each)
                samples += of(each.summaries).samples(labels, options.summary_quantiles)
        families.append(ExposedFamily(name, text, "summary", samples))
    return families


def _cache_summaries(all_of: Iterable[Statistics], options: MetricsOptions) -> list[ExposedFamily]:
    kept = [
        (labels_of(each), each.cache.summaries)
        for each in all_of
        if each.cache is not None and each.cache.summaries is not None
    ]
    return [
        ExposedFamily(
            name,
            text,
            "summary",
            [
                sample
                for labels, summaries in kept
                for sample in of(summaries).samples(labels, options.summary_quantiles)
            ],
        )
        for name, text, of in (CACHE_SUMMARIES if kept else ())
    ]


def _sample(statistics: Statistics, value: int, reason: str = "") -> Sample:
    reasons = (("reason", reason),) if reason else ()
    return Sample("", labels_of(statistics, *reasons), value)


class _Samples:
    """Samples by the name of their family."""

    def __init__(self) -> None:
        self.of: dict[str, list[Sample]] = {name: [] for name in INSTANCE_FAMILIES}

    def add(self, name: str, labels: Labels, value: float) -> None:
        self.of[name].append(Sample("", labels, value))

    def families(self) -> list[ExposedFamily]:
        return [ExposedFamily(name, text, kind, self.of[name]) for name, (kind, text) in INSTANCE_FAMILIES.items()]


def instance_families(served: Iterable[HostedModel]) -> list[ExposedFamily]:
    """Return the families of all models and their instances. Reads /proc, and takes each model's lock for a moment."""
    samples = _Samples()
    for hosted in served:
        _add_model(samples, hosted)
        for record in hosted.supervisor.records:
            _add_instance(samples, hosted, record)
    return samples.families()


def _add_model(samples: _Samples, hosted: HostedModel) -> None:
    scheduler, supervisor = hosted.scheduler, hosted.supervisor
    statistics = scheduler.statistics
    labels = labels_of(statistics)
    states = [record.machine.state for record in supervisor.records]
    samples.add("moonpool_model_ready", labels, int(hosted.why_not_serving() is None))
    for state in InstanceState:
        by_state = labels_of(statistics, ("state", str(state)))
        samples.add("moonpool_instances", by_state, states.count(state))
    if hosted.residence is not None:
        _add_residence(samples, hosted, hosted.residence)
    samples.add("moonpool_requests_in_flight", labels, scheduler.in_flight)
    samples.add("moonpool_instances_executing", labels, scheduler.executing)
    if is_contained(hosted.model.options.sandbox):
        _add_denials(samples, hosted)
    counts = statistics.within(DURATION_BOUNDS_NS)
    samples.of["moonpool_request_duration_seconds"] += bucket_samples(
        DURATION_BOUNDS_NS, counts, statistics.success_ns, labels, _NS_PER_S
    )
    samples.of["moonpool_batch_size"] += _batch_sizes(statistics.batch_sizes(), labels)
    samples.of["moonpool_recovery_seconds"] += supervisor.recoveries.samples(labels, _NS_PER_S)


def _add_residence(samples: _Samples, hosted: HostedModel, residence: ResidentModel) -> None:
    statistics = hosted.scheduler.statistics
    labels = labels_of(statistics)
    samples.add("moonpool_model_awake", labels, int(not residence.is_asleep))
    samples.add("moonpool_model_dormant", labels, int(residence.is_dormant))
    samples.add("moonpool_model_wakes_total", labels, residence.wakes)
    for reason in SLEEP_REASONS:
        by_reason = labels_of(statistics, ("reason", reason))
        samples.add("moonpool_model_sleeps_total", by_reason, residence.sleeps[reason])
    if residence.autoscaler is not None:
        for direction in ("up", "down"):
            by_direction = labels_of(statistics, ("direction", direction))
            samples.add("moonpool_model_scale_steps_total", by_direction, residence.steps[direction])
    if residence.is_measured:
        for kind, size in zip(("cpu", "gpu"), residence.present_need, strict=True):
            by_kind = labels_of(statistics, ("kind", kind))
            is_here = size if residence.is_present else 0
            samples.add("moonpool_model_measured_memory_bytes", by_kind, is_here)


def _add_denials(samples: _Samples, hosted: HostedModel) -> None:
    """Add the denials of all instances, of the process that completed the configuration, and of the template."""
    denials = hosted.model.denials
    instances = [record.instance.name for record in hosted.supervisor.records]
    for name in dict.fromkeys((*instances, *denials.instances())):
        for kind, count in denials.counts(name).items():
            labels = labels_of(hosted.scheduler.statistics, ("model_instance", name), ("kind", kind))
            samples.add("moonpool_instance_sandbox_denials_total", labels, count)


def _batch_sizes(executions: dict[int, int], labels: Labels) -> list[Sample]:
    counts = [0] * (len(_BATCH_BOUNDS) + 1)
    for rows, count in executions.items():
        place = sum(1 for bound in _BATCH_BOUNDS if rows > bound)
        counts[place] += count
    total = sum(rows * count for rows, count in executions.items())
    return bucket_samples(_BATCH_BOUNDS, counts, total, labels)


def _add_instance(samples: _Samples, hosted: HostedModel, record: InstanceRecord) -> None:
    statistics = hosted.scheduler.statistics
    # Not "instance": Prometheus gives that label to the server that it asks.
    instance = ("model_instance", record.instance.name)
    labels = labels_of(statistics, instance)
    samples.add("moonpool_instance_restarts_total", labels, record.restarts)
    counts = hosted.supervisor.recycling.counts
    for reason in REASONS:
        by_reason = labels_of(statistics, instance, ("reason", reason))
        samples.add("moonpool_instance_recycles_total", by_reason, counts[instance[1], reason])
    stub = record.instance.state
    process = getattr(stub, "process", None)
    if process is None or not process.is_running:
        return
    confinement = record.instance.confinement
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
        ("request", link.borrowed_blocks.size_bytes),
        ("response", link.size_bytes() - link.borrowed_blocks.size_bytes),
    ):
        by_direction = labels_of(statistics, instance, ("direction", direction))
        samples.add("moonpool_region_allocated_bytes", by_direction, size)
    samples.add("moonpool_region_used_bytes", labels, link.borrowed_blocks.used_bytes)
