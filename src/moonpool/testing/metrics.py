"""The custom metrics of models in the process of a test."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count

from moonpool.runtime.observe.exposition import expose
from moonpool.runtime.observe.metric_families import KINDS, check_name
from moonpool.runtime.observe.metrics import Family, Metric, MetricRegistry


class Metrics:
    """A runtime's registry of metrics, and the numbers by which models know them. Thread-safe."""

    def __init__(self) -> None:
        self._registry = MetricRegistry(KINDS)
        self._numbers = count(1)
        self._held: dict[int, Family | Metric] = {}
        # Finalizers may run in the middle of any method, so they only append the numbers that they drop.
        self._dropped: deque[int] = deque()

    def new(
        self,
        name: str,
        description: str,
        kind: int,
        labels: Mapping[str, str] | None,
        buckets: Sequence[float] | None,
        *,
        is_contained: bool = False,
    ) -> int:
        """Make a metric like `Host.new_metric`, for a model that may be in a sandbox. Raises `BadMetric`."""
        self._tidy()
        check_name(name, kind, is_contained=is_contained)
        number = next(self._numbers)
        self._held[number] = (
            self._registry.hold_family(name, description, kind)
            if labels is None
            else self._registry.hold(name, description, kind, labels, buckets)
        )
        return number

    def change(self, number: int, operation: int, value: float) -> None:
        """Change a metric like `Host.change_metric`. Raises `BadMetric`."""
        self._registry.change(self._metric(number), operation, value)

    def value(self, number: int) -> float:
        """Return the value of a metric."""
        return self._metric(number).value

    def drop(self, number: int) -> None:
        """Drop a metric like `Host.drop_metric`; the next call of another method removes it."""
        self._dropped.append(number)

    def text(self) -> str:
        """Return all metrics in the text format that Prometheus reads."""
        self._tidy()
        return expose(self._registry.families())

    def __getitem__(self, line: str) -> float:
        """Return the number behind `name` or `name{label="value"}` in `text`. Raises KeyError."""
        for each in self.text().splitlines():
            if each.rpartition(" ")[0] == line:
                return float(each.rpartition(" ")[2])
        raise KeyError(line)

    def _metric(self, number: int) -> Metric:
        return self._held[number]  # type: ignore[return-value]

    def _tidy(self) -> None:
        while self._dropped:
            held = self._held.pop(self._dropped.popleft())
            if isinstance(held, Family):
                self._registry.release_family(held)
            else:
                self._registry.release(held)
