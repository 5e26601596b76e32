"""The custom metrics that one stub holds, by the numbers that it knows them by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.metric_kinds import HISTOGRAM
from moonpool.ipc.policy import STANDARD, is_contained
from moonpool.runtime.metrics import BadMetric, Family
from moonpool.runtime.own_metrics import check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from moonpool.runtime.metrics import Metric, MetricRegistry

# Families and metrics together.
MAX_HELD = 10_000
# Of all of them together, in characters as they are shown.
MAX_SIZE = 16 << 20


class StubMetrics:
    """What is held in the name of a stub, and given back when it is gone. One thread at a time."""

    def __init__(
        self,
        registry: MetricRegistry,
        catch_up: Callable[[], object],
        sandbox: str = STANDARD,
    ) -> None:
        """`catch_up` takes in the changes that the stub has told until now, `sandbox` is its level."""
        self._registry = registry
        # Its model may want to pass its figures off as the runtime's.
        self._is_contained = is_contained(sandbox)
        self._catch_up = catch_up
        self._held: dict[int, Family | Metric] = {}
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
        """The number of another metric, or of the family alone where `labels`, name and value, is None.

        Raises `BadMetric`.
        """
        if len(self._held) >= MAX_HELD:
            raise BadMetric(
                f"a model instance has at most {MAX_HELD} metrics; use labels with fewer values"
            )
        check_name(name, kind, is_contained=self._is_contained)
        held: Family | Metric
        if labels is None:
            held = self._registry.hold_family(name, description, kind)
        else:
            held = self._registry.hold(name, description, kind, dict(labels), buckets)
        if self._size + held.size > MAX_SIZE:
            self._drop(held)
            raise BadMetric(
                f"the metrics of a model instance may take {MAX_SIZE} characters where they are "
                "shown; use fewer, or shorter labels, or fewer buckets"
            )
        number = self._next
        self._held[number] = held
        self._size += held.size
        self._next += 1
        return number

    def change(self, changes: Sequence[Sequence[Any]], dropped: Sequence[int]) -> None:
        """Rows of number, operation, value and count; then the numbers that nobody knows any more.

        Raises `RemoteProtocolError` for what no honest stub sends.
        """
        try:
            self._registry.change_many(self._changed(changes))
        except BadMetric as error:
            raise RemoteProtocolError(f"METRICS with {error}") from error
        for number in dropped:
            if self._known(number) is not None:
                self._release(self._held.pop(number))

    def _changed(self, rows: Sequence[Sequence[Any]]) -> Iterator[tuple[Metric, int, float, int]]:
        for number, operation, value, count in rows:
            metric = self._known(number)
            if isinstance(metric, Family):
                raise RemoteProtocolError(f"METRICS changes {number}, which is a family")
            # Else one thread dropped it while another one changed it.
            if metric is not None:
                yield metric, operation, value, count

    def value(self, number: int) -> float:
        """The value of a counter or a gauge, with all changes that the stub told before.

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
            raise RemoteProtocolError(f"metric {number}, which there never was")
        return self._held.get(number)

    def close(self) -> None:
        """The stub is gone, and holds nothing any more."""
        held, self._held = self._held, {}
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
