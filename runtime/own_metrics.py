"""The names of the metrics that moonpool shows itself, which no metric of a model can take.

Families of one name are shown as one, and whoever reads two lines with the same labels believes the first: a model's
line would stand for the server's.
"""

from __future__ import annotations

from moonpool.ipc.metric_kinds import HISTOGRAM
from moonpool.runtime import gpu_metrics, instance_metrics, machine_metrics, model_metrics
from moonpool.runtime.metrics import BadMetric

# Of families that models cannot share, whatever their kind.
_NO_KIND = -1
# Of the server and of its process: what tells of them lies above this file.
_SERVERS = (
    "moonpool_build_info",
    "moonpool_frontend_connections_total",
    "moonpool_frontend_open_connections",
    "moonpool_frontend_requests_total",
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_virtual_memory_bytes",
)
# By name, with the kind that a model's family has to have to share the name, as Triton lets it.
KINDS = {
    **dict.fromkeys(
        (*instance_metrics.NAMES, *machine_metrics.NAMES, *gpu_metrics.NAMES, *_SERVERS), _NO_KIND
    ),
    **model_metrics.KINDS,
}
# What the names begin with of which a contained model can have none: these, and those that a server may show one day.
PREFIXES = ("nv_", "moonpool_", "process_", "python_")
_OF_A_HISTOGRAM = ("_bucket", "_count", "_sum")


def check_name(name: str, kind: int, *, is_contained: bool) -> None:
    """Raises `BadMetric` for a model's family that would pass for one of the runtime's own, or one of its lines would.

    A model that `is_contained` may want that; of others it would be a mistake.
    """
    lines = [name + suffix for suffix in _OF_A_HISTOGRAM] if kind == HISTOGRAM else []
    if any(line in KINDS for line in lines):
        raise BadMetric(f"the lines of the histogram '{name}' would pass for the runtime's own")
    if is_contained and any(line.startswith(PREFIXES) for line in (name, *lines)):
        raise BadMetric(
            f"the metric '{name}' would pass for one of the runtime's; in this sandbox no name "
            f"begins with {', '.join(PREFIXES[:-1])} or {PREFIXES[-1]}"
        )
