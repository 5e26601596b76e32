"""Custom metrics: the counts and measurements of models, shared by all instances and models of a runtime.

A *family* is a name with a description and a kind; a *metric* is one time series of it, distinguished from the others
by its labels. Both exist as long as somebody holds them, and all who ask for the same one share it.

Theory of operation. Stubs hold and change metrics on the reactor's thread, while any thread may ask for all of them.
One lock of the registry guards families, metrics, their values and their counts of holders.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf, isnan

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.messages import COUNTER, GAUGE, HISTOGRAM, INCREMENT, OBSERVE, SET
from moonpool.runtime.model.budgets import METRIC_PART_CHARACTERS
from moonpool.runtime.observe import exposition
from moonpool.runtime.observe.exposition import Labels, Sample, shown

MAX_LABELS = 64
MAX_BUCKETS = 1024
# The longest name, description, or value of a label.
MAX_CHARACTERS = 4096

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_TYPES = {COUNTER: "counter", GAUGE: "gauge", HISTOGRAM: "histogram"}


class BadMetric(MoonpoolError):
    """A family, a metric or a change is not valid."""

    code = "INVALID_ARG"


class Family:
    """The metrics of one name. Only its registry makes and changes it."""

    __slots__ = ("description", "holders", "kind", "metrics", "name")

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self.holders = 0
        self.metrics: dict[Labels, Metric] = {}

    @property
    def size(self) -> int:
        """The memory that it takes, here and in the text of all metrics; roughly, in characters."""
        return METRIC_PART_CHARACTERS + len(self.name) + len(self.description)


class Metric:
    """One time series: a number. Only its registry makes and changes it."""

    __slots__ = ("family", "holders", "labels", "value")

    def __init__(self, family: Family, labels: Labels) -> None:
        self.family = family
        self.labels = labels
        self.holders = 0
        self.value = 0.0

    def change(self, operation: int, value: float, count: int) -> None:
        """Apply an operation `count` times. Raises `BadMetric` for an operation that the kind does not allow."""
        kind = self.family.kind
        if operation == INCREMENT and (kind == GAUGE or not value < 0):
            self.value += value * count
        elif operation == SET and kind == GAUGE:
            self.value = value
        else:
            raise BadMetric(f"operation {operation} by {value} on a {_TYPES[kind]}")

    def samples(self) -> list[Sample]:
        """Return its lines as they are now."""
        return [Sample("", self.labels, self.value)]

    @property
    def size(self) -> int:
        """The memory that it takes, as for a family."""
        texts = [self.family.name, *(name + value for name, value in self.labels)]
        return sum(METRIC_PART_CHARACTERS + len(text) for text in texts)


class Histogram(Metric):
    """One time series of observations, counted by bucket. `value` is their sum."""

    __slots__ = ("_bounds", "_counts")

    def __init__(self, family: Family, labels: Labels, bounds: Sequence[float]) -> None:
        super().__init__(family, labels)
        self._bounds = (*bounds, inf)
        self._counts = [0] * len(self._bounds)

    def change(self, operation: int, value: float, count: int) -> None:
        if operation != OBSERVE:
            raise BadMetric(f"operation {operation} on a histogram")
        self.value += value * count
        # NaN is below no bound.
        last = len(self._bounds) - 1
        self._counts[last if isnan(value) else bisect_left(self._bounds, value)] += count

    def samples(self) -> list[Sample]:
        below = 0
        buckets = []
        for bound, count in zip(self._bounds, self._counts, strict=True):
            below += count
            buckets.append(Sample("_bucket", (*self.labels, ("le", shown(bound))), below))
        total = Sample("_count", self.labels, below)
        return [total, Sample("_sum", self.labels, self.value), *buckets]

    @property
    def size(self) -> int:
        return (len(self._bounds) + 2) * super().size


class MetricRegistry:
    """The custom metrics of a runtime. Thread-safe."""

    def __init__(self, reserved: Mapping[str, int] | None = None) -> None:
        """`reserved` has the kinds of families that others show, by name."""
        self._lock = threading.Lock()
        self._reserved = reserved or {}
        self._families: dict[str, Family] = {}

    def hold_family(self, name: str, description: str, kind: int) -> Family:
        """Hold the family of a name, which is made if there is none. Give it back with `release_family`.

        Raises `BadMetric`, also if the family has another kind. The first description stays.
        """
        with self._lock:
            family = self._family(name, description, kind)
            family.holders += 1
            self._families[name] = family
            return family

    def hold(
        self, name: str, description: str, kind: int, labels: Mapping[str, str], buckets: Sequence[float] | None
    ) -> Metric:
        """Hold the metric with these labels, which is made if there is none. Give it back with `release`.

        `buckets` are the upper bounds of a histogram's buckets, without infinity; the first ones
        stay. Raises `BadMetric` as `hold_family` does.
        """
        key = tuple(sorted(labels.items()))
        with self._lock:
            family = self._family(name, description, kind)
            metric = family.metrics.get(key)
            if metric is None:
                metric = family.metrics[key] = _new_metric(family, key, buckets)
                self._families[name] = family
            metric.holders += 1
            return metric

    def _family(self, name: str, description: str, kind: int) -> Family:
        """Return the family of a name, or a new one, which is not in the table yet."""
        family = self._families.get(name)
        if kind != (family.kind if family is not None else self._reserved.get(name, kind)):
            raise BadMetric("Family name already exists with different type")
        return family or _new_family(name, description, kind)

    def release_family(self, family: Family) -> None:
        """Give a family back. It is removed with its last holder."""
        with self._lock:
            family.holders -= 1
            self._remove_if_unheld(family)

    def release(self, metric: Metric) -> None:
        """Give a metric back. It is removed with its last holder."""
        with self._lock:
            metric.holders -= 1
            if not metric.holders:
                del metric.family.metrics[metric.labels]
                self._remove_if_unheld(metric.family)

    def _remove_if_unheld(self, family: Family) -> None:
        if not family.holders and not family.metrics:
            del self._families[family.name]

    def change(self, metric: Metric, operation: int, value: float, count: int = 1) -> None:
        """Apply an operation of `ipc.messages` `count` times.

        Raises `BadMetric` for an operation that the kind does not allow.
        """
        self.change_many([(metric, operation, value, count)])

    def change_many(self, changes: Iterable[tuple[Metric, int, float, int]]) -> None:
        """Apply changes in order. Raises `BadMetric` at the first one that the kind does not allow."""
        with self._lock:
            for metric, operation, value, count in changes:
                metric.change(operation, value, count)

    def families(self) -> list[exposition.ExposedFamily]:
        """Return all families as they are now, in the order in which they were made."""
        with self._lock:
            return [
                exposition.ExposedFamily(
                    family.name,
                    family.description,
                    _TYPES[family.kind],
                    [sample for metric in family.metrics.values() for sample in metric.samples()],
                )
                for family in self._families.values()
            ]


def _new_family(name: str, description: str, kind: int) -> Family:
    if not _NAME.fullmatch(name) or name.startswith("__"):
        raise BadMetric("Invalid metric name")
    if len(name) > MAX_CHARACTERS or len(description) > MAX_CHARACTERS:
        raise BadMetric(f"the name and the description of a metric have at most {MAX_CHARACTERS} characters")
    if kind not in _TYPES:
        raise BadMetric("Unknown metric kind")
    return Family(name, description, kind)


def _new_metric(family: Family, labels: Labels, buckets: Sequence[float] | None) -> Metric:
    for name, value in labels:
        # A histogram has a label of that name for its buckets.
        taken = name == "le" and family.kind == HISTOGRAM
        if not _LABEL.fullmatch(name) or name.startswith("__") or taken:
            raise BadMetric("Invalid label name")
        if len(name) > MAX_CHARACTERS or len(value) > MAX_CHARACTERS:
            raise BadMetric(f"a label's name and value have at most {MAX_CHARACTERS} characters")
    if len(labels) > MAX_LABELS:
        raise BadMetric(f"a metric has at most {MAX_LABELS} labels, not {len(labels)}")
    if family.kind != HISTOGRAM:
        return Metric(family, labels)
    return Histogram(family, labels, _checked_bounds(buckets))


def _checked_bounds(buckets: Sequence[float] | None) -> list[float]:
    if buckets is None:
        raise BadMetric("Failed to create metric. Missing required buckets.")
    if len(buckets) > MAX_BUCKETS:
        raise BadMetric(f"a histogram has at most {MAX_BUCKETS} buckets, not {len(buckets)}")
    bounds = list(buckets)
    if any(not low < high for low, high in pairwise(bounds)):
        raise BadMetric("Bucket Boundaries must be strictly sorted")
    if any(isnan(bound) for bound in bounds):
        raise BadMetric("a bucket's bound must be a number, not nan")
    # The bucket for the rest is always added.
    return bounds[:-1] if bounds and bounds[-1] == inf else bounds
