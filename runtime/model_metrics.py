"""What Triton tells of every model in its metrics, from the model's statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.ipc.metric_kinds import COUNTER, GAUGE
from moonpool.runtime.batcher import QueueTimeout
from moonpool.runtime.errors import ModelUnavailable
from moonpool.runtime.exposition import Family, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from moonpool.runtime.scheduler import Scheduler
    from moonpool.runtime.statistics import Statistics

_COUNTERS: list[tuple[str, str, Callable[[Statistics], int]]] = [
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

# What models may not make something else of.
KINDS = {
    "nv_inference_request_success": COUNTER,
    "nv_inference_request_failure": COUNTER,
    **{name: COUNTER for name, _, _ in _COUNTERS},
    "nv_inference_pending_request_count": GAUGE,
}


def model_families(schedulers: Iterable[Scheduler]) -> list[Family]:
    """The families of all models, each with a line for each model version."""
    served = list(schedulers)
    success = Family(
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        "counter",
        [_sample(each.statistics, each.statistics.success_count) for each in served],
    )
    failure = Family(
        "nv_inference_request_failure",
        "Number of failed inference requests, all batch sizes",
        "counter",
        [
            _sample(each.statistics, count, reason)
            for each in served
            for reason, count in each.statistics.fail_counts.items()
        ],
    )
    counters = [
        Family(
            name,
            text,
            "counter",
            [_sample(each.statistics, of(each.statistics)) for each in served],
        )
        for name, text, of in _COUNTERS
    ]
    pending = Family(
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        "gauge",
        [_sample(each.statistics, each.queued) for each in served],
    )
    return [success, failure, *counters, pending]


def _sample(statistics: Statistics, value: int, reason: str = "") -> Sample:
    reasons = (("reason", reason),) if reason else ()
    labels = (("model", statistics.name), *reasons, ("version", statistics.version))
    return Sample("", labels, value)


def reason_of(error: BaseException) -> str:
    """Which of Triton's reasons for a failure it is when the scheduler fails a request with this error."""
    if isinstance(error, QueueTimeout):
        return "REJECTED"
    # Nobody's fault: the model is unloaded, or the instances are gone.
    return "OTHER" if isinstance(error, ModelUnavailable) else "BACKEND"
