"""The names of moonpool's own metrics, which no metric of a model can have.

Families of one name are shown as one. A reader who finds two lines with the same labels believes the first, so a model's
line could replace the server's.
"""

from __future__ import annotations

from moonpool.ipc.metric_kinds import HISTOGRAM
from moonpool.runtime import gpu_metrics, instance_metrics, machine_metrics, model_metrics
from moonpool.runtime.metrics import BadMetric

# The kind of families that models cannot share.
_NO_KIND = -1
# Metrics of the server and of its process. The modules that show them may not be imported here.
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
# By name, with the kind that a model's family needs to share the name, as in Triton.
KINDS = {
    **dict.fromkeys(
        (*instance_metrics.NAMES, *machine_metrics.NAMES, *gpu_metrics.NAMES, *_SERVERS), _NO_KIND
    ),
    **model_metrics.KINDS,
}
# A contained model can have no name that begins so: a later version of the server may show one.
PREFIXES = ("nv_", "moonpool_", "process_", "python_")
_OF_A_HISTOGRAM = ("_bucket", "_count", "_sum")


def check_name(name: str, kind: int, *, is_contained: bool) -> None:
    """Raise `BadMetric` if a model's family, or a line of it, would pass for one of the runtime's own.

    A model that `is_contained` may do that on purpose, so its names are also checked for prefixes.
    """
    lines = [name + suffix for suffix in _OF_A_HISTOGRAM] if kind == HISTOGRAM else []
    if any(line in KINDS for line in lines):
        raise BadMetric(f"the lines of the histogram '{name}' would pass for the runtime's own")
    if is_contained and any(line.startswith(PREFIXES) for line in (name, *lines)):
        raise BadMetric(
            f"the metric '{name}' would pass for one of the runtime's; in this sandbox no name "
            f"begins with {', '.join(PREFIXES[:-1])} or {PREFIXES[-1]}"
        )
