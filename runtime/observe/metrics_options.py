"""The options of metrics: the server's (`--metrics-config`), and those in the configuration of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.model.config.source import ConfigError
from moonpool.runtime.observe.exposition import Labels
from moonpool.runtime.observe.metric_families import FIRST_RESPONSE
from moonpool.runtime.observe.statistics import DURATION_BOUNDS_NS, FIRST_RESPONSE_BOUNDS_NS

_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
_SETTINGS = "counter_latencies, histogram_latencies, summary_latencies, summary_quantiles"
_NS_PER_MS = 1_000_000
# The most buckets that a model may set.
MOST_BUCKETS = 256
_BUCKETS = "model_metrics.metric_control.histogram_options.buckets"
# The label is the tag behind an underscore, as in Triton. Labels with two underscores are Prometheus' own.
_TAG = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_]*")


@dataclass(frozen=True)
class MetricsOptions:
    """The metrics that a server shows beside those that cost nothing. The first four have the names of
    `--metrics-config`.
    """

    counter_latencies: bool = True
    """Show sums of durations, `nv_inference_*_duration_us`."""
    histogram_latencies: bool = False
    """Show `nv_inference_first_response_histogram_ms`. What it shows is counted in any case."""
    summary_latencies: bool = False
    """Show quantiles of the last minute, `nv_inference_*_summary_us`. Costs some microseconds a request."""
    summary_quantiles: tuple[float, ...] = _QUANTILES
    allow_cpu: bool = True
    """Show metrics of the machine's processors and memory."""
    allow_gpu: bool = True
    """Show metrics of the machine's GPUs, if it has any."""
    interval_s: float = 2.0
    """The greatest age of measurements of the machine."""


def metrics_options(
    flags: Iterable[str], *, allow_cpu: bool = True, allow_gpu: bool = True, interval_ms: float = 2000
) -> MetricsOptions:
    """Parse the values of `--metrics-config`, each `<setting>=<value>`, and the other flags.

    Raises `InvalidRequest`.
    """
    said: dict[str, bool] = {}
    quantiles: tuple[float, ...] = _QUANTILES
    for flag in flags:
        name, is_assigned, value = flag.partition("=")
        if not is_assigned:
            raise InvalidRequest(f"--metrics-config option format is '<setting>=<value>'. Got {flag:.80}")
        if name == "summary_quantiles":
            quantiles = _quantiles(value)
        elif name in ("counter_latencies", "histogram_latencies", "summary_latencies"):
            said[name] = _boolean(name, value)
        else:
            raise InvalidRequest(f"--metrics-config knows no setting {name:.80}; there are {_SETTINGS}")
    if interval_ms <= 0:
        raise InvalidRequest(f"--metrics-interval-ms must be positive, not {interval_ms:g}")
    return MetricsOptions(
        **said, summary_quantiles=quantiles, allow_cpu=allow_cpu, allow_gpu=allow_gpu, interval_s=interval_ms / 1000
    )


def _boolean(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"--metrics-config {name} must be true or false, not {value:.80}")
    return value.lower() in ("true", "1")


def _quantiles(value: str) -> tuple[float, ...]:
    """Parse `0.5:0.05,0.9:0.01`. The numbers behind the colons are the errors that Triton may make."""
    quantiles = []
    for pair in value.split(","):
        try:
            quantile = float(pair.partition(":")[0])
        except ValueError:
            quantile = -1.0
        if not 0 <= quantile <= 1 or ":" not in pair:
            raise InvalidRequest(
                "--metrics-config summary_quantiles must be <quantile>:<error>, with commas between "
                f"them and quantiles from 0 to 1, such as 0.5:0.05,0.9:0.01; not {value:.80}"
            )
        quantiles.append(quantile)
    return tuple(quantiles)


def tags_of(raw: Mapping[str, Any]) -> Labels:
    """Return `metric_tags` as labels of all metrics of the model. Raises `ConfigError`."""
    tags = raw.get("metric_tags") or {}
    for key in tags:
        if not _TAG.fullmatch(key):
            raise ConfigError(
                f"{key!r:.60} cannot be the name of a label: it must be letters, digits and "
                "underscores, and begin with no underscore",
                field="metric_tags",
            )
    return tuple((f"_{key}", value) for key, value in sorted(tags.items()))


def first_response_bounds_ns(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the upper bounds of the histogram of first responses, which `model_metrics` may set. Raises
    `ConfigError`.
    """
    bounds = FIRST_RESPONSE_BOUNDS_NS
    for control in (raw.get("model_metrics") or {}).get("metric_control", ()):
        family = (control.get("metric_identifier") or {}).get("family", "")
        if family != FIRST_RESPONSE:
            raise ConfigError(
                f"only the buckets of {FIRST_RESPONSE} can be set, not those of {family!r:.80}",
                field="model_metrics.metric_control.metric_identifier.family",
            )
        buckets = (control.get("histogram_options") or {}).get("buckets", ())
        if any(not low < high for low, high in pairwise(buckets)) or not all(map(isfinite, buckets)):
            raise ConfigError(
                "buckets must be numbers of milliseconds, each larger than the one before", field=_BUCKETS
            )
        if len(buckets) > MOST_BUCKETS:
            raise ConfigError(f"there are {len(buckets)} buckets; {MOST_BUCKETS} is the most", field=_BUCKETS)
        bounds = tuple(round(bucket * _NS_PER_MS) for bucket in buckets)
    return bounds


def duration_bounds_ns(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the bounds by which durations of requests are counted, with all of `first_response_bounds_ns`. Raises
    `ConfigError`.
    """
    bounds = first_response_bounds_ns(raw)
    if bounds is FIRST_RESPONSE_BOUNDS_NS:
        return DURATION_BOUNDS_NS
    return tuple(sorted({*DURATION_BOUNDS_NS, *bounds}))
