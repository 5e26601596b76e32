"""What Triton tells of every model in its metrics, from the model's statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.ipc.metric_kinds import COUNTER, GAUGE, HISTOGRAM
from moonpool.runtime.batcher import QueueTimeout
from moonpool.runtime.errors import ModelUnavailable
from moonpool.runtime.exposition import Family, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from moonpool.runtime.exposition import Labels
    from moonpool.runtime.hosted_model import HostedModel
    from moonpool.runtime.latency_summary import LatencySummaries, LatencySummary
    from moonpool.runtime.metrics_options import MetricsOptions
    from moonpool.runtime.statistics import Statistics

    Counters = list[tuple[str, str, Callable[[Statistics], int]]]

_COUNTS: Counters = [
    (
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda s: s.inference_count,
    ),
    (
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda s: s.execution_count,
    ),
]
_DURATIONS: Counters = [
    (
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda s: s.success_ns // 1000,
    ),
    (
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda s: s.queue_ns // 1000,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda s: s.input_ns // 1000,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda s: s.infer_ns // 1000,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached "
        "requests)",
        lambda s: s.output_ns // 1000,
    ),
]
_SUMMARIES: list[tuple[str, str, Callable[[LatencySummaries], LatencySummary]]] = [
    (
        "nv_inference_request_summary_us",
        "Summary of inference request duration in microseconds (includes cached requests)",
        lambda s: s.request,
    ),
    (
        "nv_inference_queue_summary_us",
        "Summary of inference queuing duration in microseconds (includes cached requests)",
        lambda s: s.queue,
    ),
    (
        "nv_inference_compute_input_summary_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda s: s.input,
    ),
    (
        "nv_inference_compute_infer_summary_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda s: s.infer,
    ),
    (
        "nv_inference_compute_output_summary_us",
        "Cumulative inference compute output duration in microseconds (does not include cached "
        "requests)",
        lambda s: s.output,
    ),
]
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
_NS_PER_MS = 1_000_000

# What models may not make something else of.
KINDS = {
    "nv_inference_request_success": COUNTER,
    "nv_inference_request_failure": COUNTER,
    **{name: COUNTER for name, _, _ in (*_COUNTS, *_DURATIONS)},
    # Nothing of theirs is a summary, so none can go by these names.
    **{name: -1 for name, _, _ in _SUMMARIES},
    "nv_inference_pending_request_count": GAUGE,
    "nv_model_load_duration_secs": GAUGE,
    FIRST_RESPONSE: HISTOGRAM,
}


def model_families(served: Iterable[HostedModel], options: MetricsOptions) -> list[Family]:
    """The families of all models, each with lines for each model version."""
    served = list(served)
    schedulers = [hosted.scheduler for hosted in served]
    all_of = [each.statistics for each in schedulers]
    families = [
        Family(
            "nv_inference_request_success",
            "Number of successful inference requests, all batch sizes",
            "counter",
            [_sample(each, each.success_count) for each in all_of],
        ),
        Family(
            "nv_inference_request_failure",
            "Number of failed inference requests, all batch sizes",
            "counter",
            [
                _sample(each, count, reason)
                for each in all_of
                for reason, count in each.fail_counts.items()
            ],
        ),
        *_counters(_COUNTS, all_of),
    ]
    if options.counter_latencies:
        families += _counters(_DURATIONS, all_of)
    pending = [_sample(each.statistics, each.queued) for each in schedulers]
    families += [
        Family(
            "nv_inference_pending_request_count",
            "Instantaneous number of pending requests awaiting execution per-model.",
            "gauge",
            pending,
        ),
        Family(
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
    return families


def _counters(counters: Counters, all_of: Iterable[Statistics]) -> list[Family]:
    return [
        Family(name, text, "counter", [_sample(each, of(each)) for each in all_of])
        for name, text, of in counters
    ]


def _first_responses(served: Iterable[HostedModel]) -> Family:
    samples = []
    for hosted in served:
        if hosted.model.config.decoupled:
            statistics = hosted.scheduler.statistics
            first = statistics.responses.first
            samples += first.samples(labels_of(statistics), _NS_PER_MS)
    text = "Duration from request to first response in milliseconds"
    return Family(FIRST_RESPONSE, text, "histogram", samples)


def _summaries(all_of: Iterable[Statistics], options: MetricsOptions) -> list[Family]:
    families = []
    for name, text, of in _SUMMARIES:
        samples = []
        for each in all_of:
            if each.summaries is not None:
                labels = labels_of(each)
                samples += of(each.summaries).samples(labels, options.summary_quantiles)
        families.append(Family(name, text, "summary", samples))
    return families


def labels_of(statistics: Statistics, *others: tuple[str, str]) -> Labels:
    """The labels of a model version, with others, in their order."""
    own = (("model", statistics.name), ("version", statistics.version))
    return tuple(sorted((*statistics.tags, *own, *others)))


def _sample(statistics: Statistics, value: int, reason: str = "") -> Sample:
    reasons = (("reason", reason),) if reason else ()
    return Sample("", labels_of(statistics, *reasons), value)


def reason_of(error: BaseException) -> str:
    """Which of Triton's reasons for a failure it is when a request ends with this error."""
    if isinstance(error, QueueTimeout):
        return "REJECTED"
    if getattr(error, "code", "") == "CANCELLED":
        return "CANCELED"
    # Nobody's fault: the model is unloaded, or the instances are gone.
    return "OTHER" if isinstance(error, ModelUnavailable) else "BACKEND"
