"""Tests the metrics of a model, with Triton's texts, at a host in the same process."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from moonpool.runtime.observe.exposition import expose
from moonpool.runtime.observe.metrics import BadMetric, MetricRegistry
from moonpool.runtime.stubs.metrics import StubMetrics
from moonpool.stub.pb_utils import host
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.metrics import Metric, MetricFamily, MetricKind

pytestmark = pytest.mark.promise("Metrics", "Operations that a metric does not allow are refused with Triton's texts.")

COUNTER, GAUGE, HISTOGRAM = MetricFamily.COUNTER, MetricFamily.GAUGE, MetricFamily.HISTOGRAM
WRAPPED = "Failed to process the request for model 'M_0_0', message: "


class Keeper(host.Host):
    """Keeps metrics as a runtime would, without a process between."""

    def __init__(self) -> None:
        self.registry = MetricRegistry()
        self.metrics = StubMetrics(self.registry, lambda: None)
        self.made = 0

    def failure(self, why: str) -> str:
        return WRAPPED + why

    def new_metric(
        self, name: str, description: str, kind: int, labels: Mapping[str, str] | None, buckets: Sequence[float] | None
    ) -> int:
        self.made += 1
        try:
            rows = None if labels is None else labels.items()
            return self.metrics.hold(name, description, kind, rows, buckets)
        except BadMetric as error:
            raise TritonModelException(self.failure(str(error))) from error

    def change_metric(self, metric: int, operation: int, value: float) -> None:
        self.metrics.change([[metric, operation, value, 1]], [])

    def metric_value(self, metric: int) -> float:
        return self.metrics.value(metric)

    def drop_metric(self, metric: int) -> None:
        self.metrics.change([], [metric])

    @property
    def lines(self) -> list[str]:
        return expose(self.registry.families()).splitlines()


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    host.use(keeper)
    yield keeper
    host.use(None)
    gc.collect()


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(TritonModelException) as error:
        call()
    return str(error.value)


def test_a_counter_counts(keeper: Keeper) -> None:
    family = MetricFamily(name="n", description="what", kind=COUNTER)
    metric = family.Metric(labels={"b": "1", "a": "2"})
    for amount in (1, 2.5, True, np.float32(3), np.int64(3), 0):
        metric.increment(amount)  # type: ignore[arg-type]

    assert metric.value() == 10.5
    assert keeper.lines == ["# HELP n what", "# TYPE n counter", 'n{a="2",b="1"} 10.5']


def test_a_histogram_observes(keeper: Keeper) -> None:
    family = MetricFamily("n", "d", HISTOGRAM)
    histogram = family.Metric(buckets=[1, np.float64(2.5)])
    histogram.observe(2)

    assert keeper.lines[2:] == [
        "n_count 1",
        "n_sum 2",
        'n_bucket{le="1"} 0',
        'n_bucket{le="2.5"} 1',
        'n_bucket{le="+Inf"} 1',
    ]


KIND = "TRITONSERVER_METRIC_KIND_"
REFUSALS = [
    (COUNTER, lambda m: m.increment(-1), "increment", "COUNTER can only be incremented "
     "monotonically by non-negative values."),
    (COUNTER, lambda m: m.increment(-math.inf), "increment", "COUNTER can only be incremented "
     "monotonically by non-negative values."),
    (COUNTER, lambda m: m.set(1), "set", "COUNTER does not support Set"),
    (COUNTER, lambda m: m.observe(1), "observe", "COUNTER does not support Observe"),
    (GAUGE, lambda m: m.observe(1), "observe", "GAUGE does not support Observe"),
    (HISTOGRAM, lambda m: m.increment(1), "increment", "HISTOGRAM does not support Increment"),
    (HISTOGRAM, lambda m: m.set(1), "set", "HISTOGRAM does not support Set"),
    (HISTOGRAM, lambda m: m.value(), "get", "HISTOGRAM does not support Value"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "use", "doing", "why"), REFUSALS)
@pytest.mark.usefixtures("keeper")
def test_operations_that_a_kind_does_not_allow_are_refused_in_tritons_words(
    kind: MetricKind, use: Callable[[Metric], object], doing: str, why: str
) -> None:
    family = MetricFamily("n", "d", kind)
    metric = family.Metric(buckets=[1.0] if kind is HISTOGRAM else None)

    assert refused(lambda: use(metric)) == f"Failed to {doing} metric value: {WRAPPED}{KIND}{why}"


@pytest.mark.usefixtures("keeper")
def test_families_that_cannot_be_are_refused_in_tritons_words() -> None:
    prefix = f"Error when creating MetricFamily: {WRAPPED}"
    family = MetricFamily("n", "d", COUNTER)

    assert refused(lambda: MetricFamily("a b", "d", COUNTER)) == prefix + "Invalid metric name"
    assert refused(lambda: MetricFamily("n", "d", GAUGE)) == (prefix + "Family name already exists with different type")
    assert family.Metric().value() == 0


@pytest.mark.parametrize(
    ("kind", "arguments", "error"),
    [
        (
            HISTOGRAM,
            {"buckets": [2, 1]},
            f"Error when creating Metric: {WRAPPED}Bucket Boundaries must be strictly sorted",
        ),
        (COUNTER, {"labels": {"a b": "x"}}, f"Error when creating Metric: {WRAPPED}Invalid label name"),
        (COUNTER, {"labels": {1: "x"}}, f"Error when creating Metric: {WRAPPED}Invalid label name"),
        (
            COUNTER,
            {"labels": {"a": 1}},
            f"Error when creating Metric: {WRAPPED}attempt to access JSON non-string as string",
        ),
    ],
)
@pytest.mark.usefixtures("keeper")
def test_metrics_that_cannot_be_are_refused_in_tritons_words(
    kind: MetricKind, arguments: dict[str, Any], error: str
) -> None:
    family = MetricFamily("n", "d", kind)

    assert refused(lambda: family.Metric(**arguments)) == error


@pytest.mark.usefixtures("keeper")
def test_a_change_by_what_is_no_number_is_a_type_error() -> None:
    gauge_family = MetricFamily("n", "d", GAUGE)
    gauge = gauge_family.Metric()
    wrong: list[Any] = [b"3", [1.0], object()]
    for value in wrong:
        for change in (gauge.set, gauge.increment, gauge.observe):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                change(value)
    with pytest.raises(RuntimeError, match="Buckets must be numbers: 'x' is a text"):
        MetricFamily("h", "d", HISTOGRAM).Metric(buckets=["x"])


def test_metrics_live_as_long_as_their_family(keeper: Keeper) -> None:
    family = MetricFamily("n", "d", COUNTER)
    for _ in range(3):
        family.Metric({"user": "ada"}).increment(1)

    assert keeper.lines[-1] == 'n{user="ada"} 3'
    assert keeper.made == 2
    del family
    assert keeper.lines == []


def test_two_families_of_one_name_share_their_metrics(keeper: Keeper) -> None:
    first, second = MetricFamily("n", "first", COUNTER), MetricFamily("n", "second", COUNTER)
    one, other = first.Metric({"a": "b"}), second.Metric({"a": "b"})
    one.increment(5)

    assert other.value() == 5
    del first, one
    assert other.value() == 5
    assert keeper.lines[0] == "# HELP n first"


def test_families_in_a_cycle_are_let_go_of(keeper: Keeper) -> None:
    class Model:
        def __init__(self) -> None:
            self.me = self
            self.family = MetricFamily("n", "d", COUNTER)
            self.metric = self.family.Metric()

    Model()
    gc.collect()

    assert keeper.lines == []


def test_threads_may_ask_for_the_same_metric(keeper: Keeper) -> None:
    families = [MetricFamily("n", "d", COUNTER)]
    start = threading.Barrier(4)

    def count() -> None:
        start.wait()
        for number in range(50):
            families[0].Metric({"a": str(number % 5)}).increment(1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(keeper.lines[2:]) == [f'n{{a="{number}"}} 40' for number in range(5)]
    families.clear()
    assert keeper.lines == []


def test_without_a_runtime_there_are_no_metrics() -> None:
    assert "no runtime hosts this process" in refused(lambda: MetricFamily("n", "d", COUNTER))
