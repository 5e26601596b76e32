"""The custom metrics of models in the process of a test."""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import TYPE_CHECKING

from moonpool.runtime.exposition import expose
from moonpool.runtime.metrics import Family, MetricRegistry
from moonpool.runtime.own_metrics import KINDS, check_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moonpool.runtime.metrics import Metric


class Metrics:
    """A runtime's registry, with the numbers under which models know what is in it. Thread-safe."""

    def __init__(self) -> None:
        self._registry = MetricRegistry(KINDS)
        self._numbers = count(1)
        self._held: dict[int, Family | Metric] = {}
        # Numbers that finalizers let go of, which may run in the middle of anything.
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
        """As `Host.new_metric`, for a model that may be in a sandbox. Raises `BadMetric`."""
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
        """As `Host.change_metric`. Raises `BadMetric`."""
        self._registry.change(self._metric(number), operation, value)

    def value(self, number: int) -> float:
        """As `Host.metric_value`."""
        return self._metric(number).value

    def drop(self, number: int) -> None:
        """As `Host.drop_metric`."""
        self._dropped.append(number)

    def text(self) -> str:
        """All metrics as Prometheus reads them."""
        self._tidy()
        return expose(self._registry.families())

    def __getitem__(self, line: str) -> float:
        """The number behind `name` or `name{label="value"}` in `text`. Raises KeyError."""
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
