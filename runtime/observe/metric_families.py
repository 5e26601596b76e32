"""The families of metrics that a server shows: Triton's of models, and moonpool's own.

Families of one name are shown as one. A reader who finds two lines with the same labels believes the first, so a
model's line could replace the server's. `check_name` keeps the custom metrics of models apart from the families here.
"""

from __future__ import annotations

from collections.abc import Callable

from moonpool.ipc.messages import COUNTER, GAUGE, HISTOGRAM
from moonpool.runtime.errors import ModelUnavailable, QueueFull, QueueTimeout
from moonpool.runtime.observe.distributions import CacheSummaries, LatencySummaries, LatencySummary
from moonpool.runtime.observe.exposition import Labels
from moonpool.runtime.observe.machine import GPU_NAMES, MACHINE_NAMES
from moonpool.runtime.observe.metrics import BadMetric
from moonpool.runtime.observe.statistics import CacheCounts, Statistics

Counters = list[tuple[str, str, Callable[[Statistics], int]]]

# Name, description, and the value in the statistics of a model.
COUNTS: Counters = [
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
DURATIONS: Counters = [
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
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda s: s.output_ns // 1000,
    ),
]
# The same of models with a response cache.
CACHE: list[tuple[str, str, Callable[[CacheCounts], int]]] = [
    ("nv_cache_num_hits_per_model", "Number of cache hits per model", lambda c: c.hits),
    (
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        lambda c: c.hit_ns // 1000,
    ),
    ("nv_cache_num_misses_per_model", "Number of cache misses per model", lambda c: c.misses),
    (
        "nv_cache_miss_duration_per_model",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        lambda c: c.miss_ns // 1000,
    ),
]
SUMMARIES: list[tuple[str, str, Callable[[LatencySummaries], LatencySummary]]] = [
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
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda s: s.output,
    ),
]
CACHE_SUMMARIES: list[tuple[str, str, Callable[[CacheSummaries], LatencySummary]]] = [
    (
        "nv_cache_hit_summary_per_model",
        "Summary of cache hit counts/durations per model, in microseconds",
        lambda s: s.hit,
    ),
    (
        "nv_cache_miss_summary_per_model",
        "Summary of cache miss counts/durations per model, in microseconds.",
        lambda s: s.miss,
    ),
]
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"

# The kinds of Triton's families. A custom metric of the same name must have the same kind.
_OF_TRITON = {
    "nv_inference_request_success": COUNTER,
    "nv_inference_request_failure": COUNTER,
    **{name: COUNTER for name, _, _ in (*COUNTS, *DURATIONS, *CACHE)},
    # Custom metrics are no summaries, so they cannot have these names.
    **{name: -1 for name, _, _ in (*SUMMARIES, *CACHE_SUMMARIES)},
    "nv_inference_pending_request_count": GAUGE,
    "nv_model_load_duration_secs": GAUGE,
    FIRST_RESPONSE: HISTOGRAM,
}

# moonpool's own families of models and instances: type and description by name.
INSTANCE_FAMILIES = {
    "moonpool_model_ready": ("gauge", "1 if a request to the model could run now, else 0"),
    "moonpool_instances": ("gauge", "Model instances by state"),
    "moonpool_model_awake": ("gauge", "1 if a model that may sleep has instances that serve, else 0"),
    "moonpool_model_dormant": (
        "gauge",
        "1 while a model sleeps with its processes, which have freed what they can, else 0",
    ),
    "moonpool_model_wakes_total": ("counter", "Starts of a model that may sleep"),
    "moonpool_model_sleeps_total": ("counter", "Times that the model was put to sleep, by the reason"),
    "moonpool_model_measured_memory_bytes": (
        "gauge",
        "Memory of the model's processes at the last look, by the kind, where it is limited",
    ),
    "moonpool_model_scale_steps_total": (
        "counter",
        "Changes of the number of instances by the load, by their direction",
    ),
    "moonpool_requests_in_flight": ("gauge", "Accepted requests without their last response"),
    "moonpool_instances_executing": ("gauge", "Model instances that execute a batch"),
    "moonpool_request_duration_seconds": ("histogram", "Time from arrival to outcome of successful requests"),
    "moonpool_batch_size": ("histogram", "Rows in a batch"),
    "moonpool_recovery_seconds": ("histogram", "Time from the death of a stub process until its successor is ready"),
    "moonpool_instance_sandbox_info": ("gauge", "1; the labels are the sandbox level and the layers in force"),
    "moonpool_instance_sandbox_denials_total": (
        "counter",
        "Refusals by the sandbox to the instance's Python code, by kind; hostile code can evade this count",
    ),
    "moonpool_instance_restarts_total": ("counter", "Restarts of the instance after its stub process died"),
    "moonpool_instance_recycles_total": ("counter", "Planned restarts of the instance, by the reason"),
    "moonpool_stub_start_time_seconds": ("gauge", "Start of the stub process, in seconds since the epoch"),
    "moonpool_stub_cpu_seconds_total": ("counter", "Processor time of the stub process"),
    "moonpool_stub_resident_memory_bytes": ("gauge", "Resident memory of the stub process, shared memory included"),
    "moonpool_region_allocated_bytes": ("gauge", "Allocated shared memory of the instance, by direction"),
    "moonpool_region_used_bytes": (
        "gauge",
        "Shared memory with inputs that the model, or a model that it asked, still uses",
    ),
}
# Those of the response cache of all models.
CACHE_FAMILIES = {
    "moonpool_response_cache_size_bytes": ("gauge", "The most bytes that kept responses may take"),
    "moonpool_response_cache_used_bytes": ("gauge", "The bytes that kept responses take"),
    "moonpool_response_cache_entries": ("gauge", "Kept responses"),
    "moonpool_response_cache_evictions_total": ("counter", "Responses that went because others needed their room"),
}
# Those of the processes in which models are started.
START_FAMILIES = {
    "moonpool_starts_total": (
        "counter",
        "Processes of models that came about: a spare became one, a template forked one, or one was started",
    ),
    "moonpool_start_phase_seconds": ("histogram", "Time that the phases of the start of a process took"),
    "moonpool_spares": ("gauge", "Processes that wait for a model in a sandbox"),
    "moonpool_spares_resident_memory_bytes": ("gauge", "Resident memory of the processes that wait"),
}
# The kind of families that models cannot share.
_NO_KIND = -1
# Metrics of the server and of its process. The modules that show them may not be imported here.
_SERVERS = (
    "moonpool_build_info",
    "moonpool_frontend_connections_total",
    "moonpool_frontend_inference_duration_seconds",
    "moonpool_frontend_inference_requests_total",
    "moonpool_frontend_open_connections",
    "moonpool_frontend_requests_total",
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_virtual_memory_bytes",
)
# All families here, with the kind that a custom family needs to share the name, as in Triton.
KINDS = {
    **dict.fromkeys(
        (*INSTANCE_FAMILIES, *CACHE_FAMILIES, *START_FAMILIES, *MACHINE_NAMES, *GPU_NAMES, *_SERVERS), _NO_KIND
    ),
    **_OF_TRITON,
}
# Names of a contained model's metrics cannot begin so, as a later version of the server may have metrics of such names.
# Prometheus itself makes `up` and metrics with `scrape_` for each server.
PREFIXES = ("nv_", "moonpool_", "process_", "python_", "scrape_")
OF_PROMETHEUS = "up"
_OF_A_HISTOGRAM = ("_bucket", "_count", "_sum")


def labels_of(statistics: Statistics, *others: tuple[str, str]) -> Labels:
    """Return the labels of a model version and others, sorted."""
    own = (("model", statistics.name), ("version", statistics.version))
    return tuple(sorted((*statistics.tags, *own, *others)))


def reason_of(error: BaseException) -> str:
    """Return Triton's reason for a failure with this error."""
    if isinstance(error, QueueFull | QueueTimeout):
        return "REJECTED"
    if getattr(error, "code", "") == "CANCELLED":
        return "CANCELED"
    # The backend is not to blame: the model is unloaded, or its instances are gone.
    return "OTHER" if isinstance(error, ModelUnavailable) else "BACKEND"


def check_name(name: str, kind: int, *, is_contained: bool) -> None:
    """Raise `BadMetric` if a model's family, or a line of it, would pass for one of the runtime's own.

    A model that `is_contained` may do that on purpose, so its names are also checked for prefixes.
    """
    lines = [name + suffix for suffix in _OF_A_HISTOGRAM] if kind == HISTOGRAM else []
    if any(line in KINDS for line in lines):
        raise BadMetric(f"the lines of the histogram '{name}' would pass for the runtime's own")
    if is_contained and (name == OF_PROMETHEUS or any(line.startswith(PREFIXES) for line in (name, *lines))):
        raise BadMetric(
            f"the metric '{name}' would pass for one of the runtime's; in this sandbox no name is "
            f"{OF_PROMETHEUS} or begins with {', '.join(PREFIXES[:-1])} or {PREFIXES[-1]}"
        )
