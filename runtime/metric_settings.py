"""What a model's configuration says of its metrics: tags, and the buckets of histograms."""

from __future__ import annotations

import re
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

from moonpool.runtime.config_source import ConfigError
from moonpool.runtime.model_metrics import FIRST_RESPONSE
from moonpool.runtime.response_statistics import FIRST_RESPONSE_BOUNDS_NS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moonpool.runtime.exposition import Labels

_NS_PER_MS = 1_000_000
# Behind the underscore that Triton puts before it. Two of them are Prometheus' own.
_TAG = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_]*")


def tags_of(raw: Mapping[str, Any]) -> Labels:
    """`metric_tags` as labels of all metrics of the model. Raises `ConfigError`."""
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
    """The upper bounds of the histogram of first responses, which `model_metrics` may say. Raises `ConfigError`."""
    bounds = FIRST_RESPONSE_BOUNDS_NS
    for control in (raw.get("model_metrics") or {}).get("metric_control", ()):
        family = (control.get("metric_identifier") or {}).get("family", "")
        if family != FIRST_RESPONSE:
            raise ConfigError(
                f"only the buckets of {FIRST_RESPONSE} can be set, not those of {family!r:.80}",
                field="model_metrics.metric_control.metric_identifier.family",
            )
        buckets = (control.get("histogram_options") or {}).get("buckets", ())
        if any(not low < high for low, high in pairwise(buckets)) or not all(
            map(isfinite, buckets)
        ):
            raise ConfigError(
                "buckets must be numbers of milliseconds, each larger than the one before",
                field="model_metrics.metric_control.histogram_options.buckets",
            )
        bounds = tuple(round(bucket * _NS_PER_MS) for bucket in buckets)
    return bounds
