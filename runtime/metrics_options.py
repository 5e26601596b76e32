"""Which metrics a server counts and shows beside those that cost nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonpool.runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
_SETTINGS = "counter_latencies, histogram_latencies, summary_latencies, summary_quantiles"


@dataclass(frozen=True)
class MetricsOptions:
    """The names of the first four are those of `--metrics-config`."""

    counter_latencies: bool = True
    """The sums of durations, `nv_inference_*_duration_us`."""
    histogram_latencies: bool = False
    """`nv_inference_first_response_histogram_ms`, for decoupled models."""
    summary_latencies: bool = False
    """Quantiles of the last minute, `nv_inference_*_summary_us`. Costs some microseconds a request."""
    summary_quantiles: tuple[float, ...] = _QUANTILES
    allow_cpu: bool = True
    """Of the machine."""
    allow_gpu: bool = True
    """Of the machine, where it has any."""
    interval_s: float = 2.0
    """How old what is measured of the machine may be."""


def metrics_options(
    flags: Iterable[str],
    *,
    allow_cpu: bool = True,
    allow_gpu: bool = True,
    interval_ms: float = 2000,
) -> MetricsOptions:
    """The options that the values of `--metrics-config`, each `<setting>=<value>`, and the other flags say.

    Raises `InvalidRequest`.
    """
    said: dict[str, bool] = {}
    quantiles: tuple[float, ...] = _QUANTILES
    for flag in flags:
        name, is_assigned, value = flag.partition("=")
        if not is_assigned:
            raise InvalidRequest(
                f"--metrics-config option format is '<setting>=<value>'. Got {flag:.80}"
            )
        if name == "summary_quantiles":
            quantiles = _quantiles(value)
        elif name in ("counter_latencies", "histogram_latencies", "summary_latencies"):
            said[name] = _boolean(name, value)
        else:
            raise InvalidRequest(
                f"--metrics-config knows no setting {name:.80}; there are {_SETTINGS}"
            )
    if interval_ms <= 0:
        raise InvalidRequest(f"--metrics-interval-ms must be positive, not {interval_ms:g}")
    return MetricsOptions(
        **said,
        summary_quantiles=quantiles,
        allow_cpu=allow_cpu,
        allow_gpu=allow_gpu,
        interval_s=interval_ms / 1000,
    )


def _boolean(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"--metrics-config {name} must be true or false, not {value:.80}")
    return value.lower() in ("true", "1")


def _quantiles(value: str) -> tuple[float, ...]:
    """Of `0.5:0.05,0.9:0.01`; what is behind the colon is the error that Triton may make."""
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
