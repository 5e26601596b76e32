"""The custom metrics of one stub, by the numbers that the stub has for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import HISTOGRAM, MAX_OBSERVATIONS, OBSERVE
from moonpool.ipc.policy import STANDARD, is_contained
from moonpool.runtime.model.budgets import MAX_METRICS, METRICS_CHARACTERS, MODEL_METRICS_CHARACTERS
from moonpool.runtime.observe.metric_families import check_name
from moonpool.runtime.observe.metrics import BadMetric, Family, Metric, MetricRegistry
from moonpool.runtime.process.usage import MemoryAccount, MemoryCharge


class StubMetrics:
    """Holds the metrics of a stub in the registry until the stub is gone. For one thread at a time."""

    def __init__(
        self,
        registry: MetricRegistry,
        catch_up: Callable[[], object],
        sandbox: str = STANDARD,
        account: MemoryAccount | None = None,
    ) -> None:
        """`catch_up` reads the changes that the stub has sent so far.

        `sandbox` is its level. `account` counts the metrics of its whole model.
        """
        self._registry = registry
        # A contained model may try to pass its figures off as the runtime's, so its names are checked.
        self._is_contained = is_contained(sandbox)
        self._catch_up = catch_up
        self._held: dict[int, Family | Metric] = {}
        # By the same numbers.
        self._charges: dict[int, MemoryCharge] = {}
        self._account = account or MemoryAccount()
        self._size = 0
        self._next = 1

    def hold(
        self,
        name: str,
        description: str,
        kind: int,
        labels: Iterable[tuple[str, str]] | None,
        buckets: Sequence[float] | None,
    ) -> int:
        """Hold another metric and return its number. `labels` are pairs of name and value; None is for the family
        alone.

        Raises `BadMetric`.
        """
        if len(self._held) >= MAX_METRICS:
            raise BadMetric(f"a model instance has at most {MAX_METRICS} metrics; use labels with fewer values")
        check_name(name, kind, is_contained=self._is_contained)
        held: Family | Metric
        if labels is None:
            held = self._registry.hold_family(name, description, kind)
        else:
            held = self._registry.hold(name, description, kind, dict(labels), buckets)
        if self._size + held.size > METRICS_CHARACTERS:
            self._drop(held)
            raise BadMetric(
                f"the metrics of a model instance may take {METRICS_CHARACTERS} characters where they are "
                "shown; use fewer, or shorter labels, or fewer buckets"
            )
        charge = self._account.charge(held.size, MODEL_METRICS_CHARACTERS)
        if charge is None:
            self._drop(held)
            raise BadMetric(
                f"the metrics of all instances of a model may take {MODEL_METRICS_CHARACTERS} characters where they "
                "are shown; use fewer, or shorter labels, or fewer buckets, or fewer instances"
            )
        number = self._next
        self._held[number], self._charges[number] = held, charge
        self._size += held.size
        self._next += 1
        return number

    def change(self, changes: Sequence[Sequence[Any]], dropped: Sequence[int]) -> int:
        """Apply rows of number, operation, value and count. Then drop the metrics of the numbers in `dropped`.

        Returns the number of observations. Raises `RemoteProtocolError` for what no honest stub sends.
        """
        observations: int = sum(row[3] for row in changes if row[1] == OBSERVE)
        if observations > MAX_OBSERVATIONS:
            raise RemoteProtocolError(f"METRICS with {observations} observations; {MAX_OBSERVATIONS} is the most")
        try:
            self._registry.change_many(self._changed(changes))
        except BadMetric as error:
            raise RemoteProtocolError(f"METRICS with {error}") from error
        for number in dropped:
            if self._known(number) is not None:
                self._release(self._held.pop(number))
                del self._charges[number]
        return observations

    def _changed(self, rows: Sequence[Sequence[Any]]) -> Iterator[tuple[Metric, int, float, int]]:
        for number, operation, value, count in rows:
            metric = self._known(number)
            if isinstance(metric, Family):
                raise RemoteProtocolError(f"METRICS changes {number}, which is a family")
            # None if one thread of the model dropped it while another one changed it.
            if metric is not None:
                yield metric, operation, value, count

    def value(self, number: int) -> float:
        """Return the value of a counter or a gauge, with all changes that the stub sent before.

        Raises `BadMetric`, `RemoteProtocolError`.
        """
        self._catch_up()
        metric = self._known(number)
        if metric is None:
            raise BadMetric("the metric has been deleted")
        if isinstance(metric, Family):
            raise RemoteProtocolError(f"METRIC_VALUE of {number}, which is a family")
        if metric.family.kind == HISTOGRAM:
            raise BadMetric("TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value")
        return metric.value

    def _known(self, number: int) -> Family | Metric | None:
        if not 0 < number < self._next:
            raise RemoteProtocolError(f"metric {number}, which never existed")
        return self._held.get(number)

    def close(self) -> None:
        """Drop all metrics, because the stub is gone."""
        held, self._held, self._charges = self._held, {}, {}
        for each in held.values():
            self._release(each)

    def _release(self, held: Family | Metric) -> None:
        self._size -= held.size
        self._drop(held)

    def _drop(self, held: Family | Metric) -> None:
        if isinstance(held, Family):
            self._registry.release_family(held)
        else:
            self._registry.release(held)
