"""Tests of custom metrics in the runtime: sharing, lifetime, and the text that shows them."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from moonpool.ipc.messages import COUNTER, GAUGE, HISTOGRAM, INCREMENT, OBSERVE, SET
from moonpool.runtime.observe.exposition import expose
from moonpool.runtime.observe.metrics import MAX_BUCKETS, MAX_CHARACTERS, BadMetric, MetricRegistry


@pytest.fixture
def registry() -> MetricRegistry:
    return MetricRegistry()


def text(registry: MetricRegistry) -> str:
    return expose(registry.families())


def test_the_same_name_and_labels_are_the_same_metric(registry: MetricRegistry) -> None:
    first = registry.hold("n", "first", COUNTER, {"a": "1", "b": "2"}, None)
    second = registry.hold("n", "second", COUNTER, {"b": "2", "a": "1"}, None)
    registry.change(first, INCREMENT, 2.0)

    assert first is second
    assert text(registry) == '# HELP n first\n# TYPE n counter\nn{a="1",b="2"} 2\n'


def test_a_name_has_one_kind_for_as_long_as_somebody_holds_it(registry: MetricRegistry) -> None:
    family = registry.hold_family("n", "d", COUNTER)
    metric = registry.hold("n", "d", COUNTER, {}, None)
    for hold in (lambda: registry.hold_family("n", "d", GAUGE), lambda: registry.hold("n", "d", GAUGE, {}, None)):
        with pytest.raises(BadMetric, match="Family name already exists with different type"):
            hold()

    registry.release_family(family)
    with pytest.raises(BadMetric):
        registry.hold_family("n", "d", GAUGE)
    registry.release(metric)
    assert registry.hold_family("n", "d", GAUGE).kind == GAUGE


def test_a_metric_is_gone_with_its_last_holder(registry: MetricRegistry) -> None:
    first = registry.hold("n", "d", GAUGE, {}, None)
    second = registry.hold("n", "d", GAUGE, {}, None)
    registry.change(first, SET, 7.0)

    registry.release(first)
    assert "n 7\n" in text(registry)
    registry.release(second)
    assert text(registry) == ""
    assert registry.hold("n", "d", COUNTER, {}, None).value == 0.0


def test_a_family_without_metrics_is_not_shown(registry: MetricRegistry) -> None:
    registry.hold_family("n", "d", COUNTER)

    assert text(registry) == ""


def test_a_refused_metric_leaves_no_family(registry: MetricRegistry) -> None:
    with pytest.raises(BadMetric):
        registry.hold("n", "d", COUNTER, {"a b": "c"}, None)

    assert registry.hold_family("n", "d", GAUGE).kind == GAUGE


@pytest.mark.parametrize("name", ["", "a b", "1a", "é", "__a", "a-b", "a\n", "a\0b"])
def test_names_that_prometheus_does_not_take_are_refused(registry: MetricRegistry, name: str) -> None:
    with pytest.raises(BadMetric, match=r"^Invalid metric name$"):
        registry.hold_family(name, "d", COUNTER)
    with pytest.raises(BadMetric, match=r"^Invalid label name$"):
        registry.hold("n", "d", COUNTER, {name: "x"}, None)


def test_colons_are_for_names_and_le_is_for_buckets(registry: MetricRegistry) -> None:
    registry.hold("_a:b", "d", COUNTER, {"le": "x", "_a": "y"}, None)
    for kind, labels, buckets in ((COUNTER, {"a:b": "x"}, None), (HISTOGRAM, {"le": "x"}, [1.0])):
        with pytest.raises(BadMetric, match="Invalid label name"):
            registry.hold("other", "d", kind, labels, buckets)


@pytest.mark.parametrize("buckets", [[3.0, 1.0], [1.0, 1.0], [math.nan, 2.0], [math.inf, 1.0]])
def test_bounds_that_do_not_ascend_are_refused(registry: MetricRegistry, buckets: list[float]) -> None:
    with pytest.raises(BadMetric, match="Bucket Boundaries must be strictly sorted"):
        registry.hold("n", "d", HISTOGRAM, {}, buckets)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"name": "n" * (MAX_CHARACTERS + 1)}, "at most 4096 characters"),
        ({"description": "d" * (MAX_CHARACTERS + 1)}, "at most 4096 characters"),
        ({"labels": {"a": "x" * (MAX_CHARACTERS + 1)}}, "at most 4096 characters"),
        ({"labels": {f"a{n}": "x" for n in range(65)}}, "at most 64 labels, not 65"),
        ({"buckets": [float(n) for n in range(MAX_BUCKETS + 1)]}, "at most 1024 buckets, not 1025"),
        ({"buckets": [math.nan]}, "not nan"),
        ({"buckets": None}, "Missing required buckets"),
        ({"kind": 3}, "Unknown metric kind"),
    ],
)
def test_a_metric_beyond_a_limit_is_refused_in_a_sentence(
    registry: MetricRegistry, changed: dict[str, Any], error: str
) -> None:
    given: dict[str, Any] = {"name": "n", "description": "d", "kind": HISTOGRAM}
    given |= {"labels": {}, "buckets": [1.0], **changed}
    with pytest.raises(BadMetric, match=error):
        registry.hold(**given)


@pytest.mark.parametrize(
    ("kind", "operation", "value"),
    [
        (COUNTER, INCREMENT, -1.0),
        (COUNTER, SET, 1.0),
        (COUNTER, OBSERVE, 1.0),
        (GAUGE, OBSERVE, 1.0),
        (HISTOGRAM, INCREMENT, 1.0),
        (HISTOGRAM, SET, 1.0),
    ],
)
def test_a_kind_allows_only_its_own_operations(
    registry: MetricRegistry, kind: int, operation: int, value: float
) -> None:
    metric = registry.hold("n", "d", kind, {}, [1.0] if kind == HISTOGRAM else None)
    before = text(registry)
    with pytest.raises(BadMetric):
        registry.change(metric, operation, value)

    assert text(registry) == before


@pytest.mark.promise("Metrics", "Every model has Triton's metrics, and …")
def test_a_histogram_is_shown_as_triton_shows_it(registry: MetricRegistry) -> None:
    buckets = [0.1, 1.0, 2.5, 5.0, 10.0]
    metric = registry.hold("h1", "a histogram", HISTOGRAM, {"k": "v"}, buckets)
    for value in (0.05, 1.0, 7.25, 100.0, -4.0, 1.5):
        registry.change(metric, OBSERVE, value)
    registry.hold("h1", "a histogram", HISTOGRAM, {"k": "e"}, [])
    registry.hold("h1", "a histogram", HISTOGRAM, {"k": "v"}, [1.0])

    assert text(registry) == (
        "# HELP h1 a histogram\n"
        "# TYPE h1 histogram\n"
        'h1_count{k="v"} 6\n'
        'h1_sum{k="v"} 105.8\n'
        'h1_bucket{k="v",le="0.1"} 2\n'
        'h1_bucket{k="v",le="1"} 3\n'
        'h1_bucket{k="v",le="2.5"} 4\n'
        'h1_bucket{k="v",le="5"} 4\n'
        'h1_bucket{k="v",le="10"} 5\n'
        'h1_bucket{k="v",le="+Inf"} 6\n'
        'h1_count{k="e"} 0\n'
        'h1_sum{k="e"} 0\n'
        'h1_bucket{k="e",le="+Inf"} 0\n'
    )


def test_infinity_is_one_bucket_and_what_is_no_number_is_in_it(registry: MetricRegistry) -> None:
    metric = registry.hold("h", "d", HISTOGRAM, {}, [1.0, math.inf])
    registry.change(metric, OBSERVE, math.nan)
    registry.change(metric, OBSERVE, math.inf)
    registry.change(metric, OBSERVE, 0.5, 3)

    lines = text(registry).splitlines()[2:]
    assert lines == ["h_count 5", "h_sum Nan", 'h_bucket{le="1"} 3', 'h_bucket{le="+Inf"} 5']


@pytest.mark.promise("Metrics", "Every model has Triton's metrics, and …")
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-0.0, "-0"),
        (-2.25, "-2.25"),
        (1e6, "1000000"),
        (1e15, "1000000000000000"),
        (1e17, "1e+17"),
        (1e-5, "1e-05"),
        (1 / 3, "0.3333333333333333"),
        (0.1 + 0.2, "0.3"),
        (1.2345678901234567e-10, "1.234567890123457e-10"),
        (1.2345678901234567e17, "1.234567890123457e+17"),
        (math.nan, "Nan"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
    ],
)
def test_numbers_are_shown_as_triton_shows_them(registry: MetricRegistry, value: float, shown: str) -> None:
    registry.change(registry.hold("g", "d", GAUGE, {}, None), SET, value)

    assert text(registry).splitlines()[-1] == f"g {shown}"


def test_no_text_breaks_a_line(registry: MetricRegistry) -> None:
    registry.hold("g", 'a \\ b\n"c"', GAUGE, {"q": 'quo"te\\ \né'}, None)

    assert text(registry) == ('# HELP g a \\\\ b\\n"c"\n# TYPE g gauge\ng{q="quo\\"te\\\\ \\né"} 0\n')


def test_threads_lose_no_change(registry: MetricRegistry) -> None:
    def count() -> None:
        for _ in range(1000):
            metric = registry.hold("n", "d", COUNTER, {}, None)
            registry.change(metric, INCREMENT, 1.0)
            registry.release(metric)

    kept = registry.hold("n", "d", COUNTER, {}, None)
    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert kept.value == 4000
    registry.release(kept)
    assert text(registry) == ""
