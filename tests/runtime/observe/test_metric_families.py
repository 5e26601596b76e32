"""Tests of the names that belong to the runtime's metrics and not to those of models."""

from __future__ import annotations

from itertools import product

import pytest

from moonpool.ipc.messages import COUNTER, GAUGE, HISTOGRAM
from moonpool.ipc.policy import STANDARD, STRICT
from moonpool.runtime.observe.metric_families import KINDS, PREFIXES, check_name
from moonpool.runtime.observe.metrics import BadMetric, MetricRegistry
from moonpool.runtime.stubs.metrics import StubMetrics

pytestmark = [
    pytest.mark.promise(
        "Metrics",
        "No metric of a model, and no line of one, has the name of a metric of the server's own. "
        "Only Triton's families may be shared, by a model that is not contained. A contained model "
        "has no name that is `up` or begins with `nv_`, `moonpool_`, `process_`, `python_` or "
        "`scrape_`, also in tritonserver.",
    ),
    pytest.mark.promise("The sandbox: `strict`", "Its metrics do …"),
]


def held(sandbox: str) -> StubMetrics:
    return StubMetrics(MetricRegistry(KINDS), lambda: None, sandbox)


@pytest.mark.parametrize("sandbox", [STANDARD, STRICT])
def test_no_model_has_a_metric_by_a_name_that_is_shown_already(sandbox: str) -> None:
    shown = [name for name, kind in KINDS.items() if kind < 0]
    assert shown
    for name, kind in product(shown, (COUNTER, GAUGE, HISTOGRAM)):
        with pytest.raises(BadMetric):
            held(sandbox).hold(name, "mine", kind, [], [1.0] if kind == HISTOGRAM else None)


def test_a_model_that_is_not_contained_may_share_tritons_families() -> None:
    assert held(STANDARD).hold("nv_inference_count", "mine", COUNTER, [("a", "b")], None) == 1


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_contained_model_has_no_name_that_a_server_may_show_one_day(prefix: str) -> None:
    check_name(f"{prefix}new", COUNTER, is_contained=False)
    check_name(f"not_{prefix}new", COUNTER, is_contained=True)

    with pytest.raises(BadMetric, match="begins with nv_, moonpool_, process_, python_ or scrape_"):
        check_name(f"{prefix}new", COUNTER, is_contained=True)


def test_a_contained_model_does_not_say_that_the_server_is_up() -> None:
    """Check names that Prometheus makes itself for each server, such as `up` and `scrape_duration_seconds`."""
    for name in ("up", "scrape_duration_seconds"):
        for kind in (COUNTER, GAUGE, HISTOGRAM):
            with pytest.raises(BadMetric, match=f"the metric '{name}' would pass"):
                check_name(name, kind, is_contained=True)
        check_name(name, GAUGE, is_contained=False)
    check_name("uptime", GAUGE, is_contained=True)


def test_lines_of_a_histogram_are_names_as_well() -> None:
    with pytest.raises(BadMetric, match="lines of the histogram 'nv_inference' would pass"):
        check_name("nv_inference", HISTOGRAM, is_contained=False)
    with pytest.raises(BadMetric, match="the metric 'process' would pass"):
        check_name("process", HISTOGRAM, is_contained=True)
    check_name("process", COUNTER, is_contained=True)
