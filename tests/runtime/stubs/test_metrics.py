"""The metrics that one stub holds, and a stub's lies about them."""

from __future__ import annotations

import pytest

from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import COUNTER, GAUGE, HISTOGRAM, INCREMENT, OBSERVE, SET
from moonpool.ipc.policy import STANDARD
from moonpool.runtime.model.budgets import MAX_METRICS
from moonpool.runtime.observe.exposition import expose
from moonpool.runtime.observe.metrics import BadMetric, MetricRegistry
from moonpool.runtime.process.usage import MemoryAccount
from moonpool.runtime.stubs.metrics import StubMetrics


def nothing_told() -> None:
    """Do nothing, since no stub has sent changes."""


@pytest.fixture
def registry() -> MetricRegistry:
    return MetricRegistry()


@pytest.fixture
def metrics(registry: MetricRegistry) -> StubMetrics:
    return StubMetrics(registry, nothing_told)


def test_the_metrics_of_a_stub_are_released_when_it_is_gone(registry: MetricRegistry, metrics: StubMetrics) -> None:
    other = StubMetrics(registry, nothing_told)
    shared = metrics.hold("shared", "d", COUNTER, [], None)
    metrics.hold("own", "d", COUNTER, [], None)
    metrics.hold("alone", "d", COUNTER, None, None)
    other.hold("shared", "d", COUNTER, [], None)
    metrics.change([[shared, INCREMENT, 3.0, 1]], [])

    metrics.close()
    assert expose(registry.families()).endswith("\nshared 3\n")
    other.close()
    assert registry.families() == []


def test_changes_of_what_was_dropped_meanwhile_are_ignored(metrics: StubMetrics) -> None:
    number = metrics.hold("n", "d", GAUGE, [], None)
    metrics.change([[number, SET, 3.0, 1]], [number, number])
    metrics.change([[number, SET, 4.0, 1]], [number])

    with pytest.raises(BadMetric, match="deleted"):
        metrics.value(number)


@pytest.mark.promise("Metrics", "One model cannot use up …")
def test_a_stub_that_lies_about_its_metrics_is_found_out(metrics: StubMetrics) -> None:
    counter = metrics.hold("n", "d", COUNTER, [], None)
    family = metrics.hold("n", "d", COUNTER, None, None)
    for changes, dropped in (
        ([[counter, INCREMENT, -1.0, 1]], []),
        ([[counter, SET, 1.0, 1]], []),
        ([[counter, OBSERVE, 1.0, 1]], []),
        ([[family, INCREMENT, 1.0, 1]], []),
        ([[family + 1, INCREMENT, 1.0, 1]], []),
        ([], [0]),
        ([], [family + 1]),
    ):
        with pytest.raises(RemoteProtocolError):
            metrics.change(changes, dropped)
    for number in (0, family, family + 1):
        with pytest.raises(RemoteProtocolError):
            metrics.value(number)

    assert metrics.value(counter) == 0.0


def test_a_histogram_has_no_value(metrics: StubMetrics) -> None:
    number = metrics.hold("h", "d", HISTOGRAM, [], [1.0])
    with pytest.raises(BadMetric, match="TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value"):
        metrics.value(number)


def test_one_stub_cannot_have_all_metrics(metrics: StubMetrics, registry: MetricRegistry) -> None:
    for number in range(MAX_METRICS):
        metrics.hold("n", "d", GAUGE, [("number", str(number))], None)
    with pytest.raises(BadMetric, match="at most 10000 metrics; use labels with fewer values"):
        metrics.hold("n", "d", GAUGE, [("number", "one more")], None)

    assert StubMetrics(registry, nothing_told).hold("n", "d", GAUGE, [("number", "one more")], None)
    metrics.change([], [1])
    assert metrics.hold("n", "d", GAUGE, [("number", "one more")], None) == MAX_METRICS + 1


@pytest.mark.promise("What a stub says", "The metrics of one stub take at most 16 Mi characters in the exposition.")
def test_metrics_of_one_stub_take_no_more_room_than_they_may(metrics: StubMetrics, registry: MetricRegistry) -> None:
    long = [(f"l{number}", "x" * 4096) for number in range(64)]
    with pytest.raises(BadMetric, match="16777216 characters where they are shown; use fewer"):
        # Each of the lines of a histogram has all its labels.
        metrics.hold("h", "d", HISTOGRAM, long, [float(bound) for bound in range(1024)])

    assert registry.families() == []
    held = [metrics.hold(f"n{number}", "d", GAUGE, long, None) for number in range(62)]
    with pytest.raises(BadMetric, match="16777216 characters"):
        metrics.hold("one_more", "d", GAUGE, long, None)
    metrics.change([], held[:1])
    assert metrics.hold("one_more", "d", GAUGE, long, None)


@pytest.mark.promise(
    "What a stub says", "The metrics of all instances of a model together take at most four times as much."
)
def test_instances_of_a_model_have_one_limit_together(registry: MetricRegistry) -> None:
    account = MemoryAccount()
    instances = [StubMetrics(registry, nothing_told, STANDARD, account) for _ in range(5)]
    long = [(f"l{number}", "x" * 4096) for number in range(64)]

    def fill(stub: int) -> None:
        for number in range(62):
            instances[stub].hold(f"n{stub}_{number}", "d", GAUGE, long, None)

    for stub in range(4):
        fill(stub)
    with pytest.raises(BadMetric, match="of all instances of a model may take 67108864 characters"):
        fill(4)
    instances[0].close()
    instances[1].change([], [1])
    instances[4].hold("n4_62", "d", GAUGE, long, None)
