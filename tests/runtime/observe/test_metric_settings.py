"""Tests of the settings for metrics in a model's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moonpool
from moonpool import ConfigError
from moonpool.runtime.observe.metrics_options import (
    MOST_BUCKETS,
    duration_bounds_ns,
    first_response_bounds_ns,
    metrics_options,
    tags_of,
)
from moonpool.runtime.observe.statistics import DURATION_BOUNDS_NS

pytestmark = pytest.mark.promise(
    "Watching a server", "A model's configuration can add labels and set buckets. Invalid ones are refused."
)

MODELS = Path(__file__).parents[2] / "models"
FIRST = "nv_inference_first_response_histogram_ms"


def control(buckets: list[float], family: str = FIRST) -> dict[str, Any]:
    entry = {"metric_identifier": {"family": family}, "histogram_options": {"buckets": buckets}}
    return {"model_metrics": {"metric_control": [entry]}}


def test_tags_become_labels_with_an_underscore() -> None:
    assert tags_of({"metric_tags": {"team": "blue", "a": 'x"y'}}) == (("_a", 'x"y'), ("_team", "blue"))
    assert tags_of({}) == ()


@pytest.mark.parametrize("key", ["a b", "", "_a", "é", "a=b"])
def test_a_tag_that_can_be_no_label_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=r"metric_tags: .* cannot be the name of a label"):
        tags_of({"metric_tags": {key: "x"}})


def test_buckets_are_milliseconds() -> None:
    assert first_response_bounds_ns(control([-1, 0.0, 1, 2.5])) == (-1_000_000, 0, 1_000_000, 2_500_000)
    assert first_response_bounds_ns({}) == (100_000_000, 500_000_000, 2_000_000_000, 5_000_000_000)


@pytest.mark.parametrize("buckets", [[2, 1], [1, 1], [1, float("inf")], [float("nan")]])
def test_buckets_that_are_none_are_refused(buckets: list[float]) -> None:
    with pytest.raises(ConfigError, match="each larger than the one before"):
        first_response_bounds_ns(control(buckets))


def test_there_may_be_so_many_buckets_and_no_more() -> None:
    most = [float(number) for number in range(MOST_BUCKETS)]
    assert len(first_response_bounds_ns(control(most))) == MOST_BUCKETS
    assert set(duration_bounds_ns(control(most))) > set(DURATION_BOUNDS_NS)
    with pytest.raises(ConfigError, match="257 buckets; 256 is the most"):
        first_response_bounds_ns(control([*most, 1e6]))


def test_other_families_have_no_buckets_to_set() -> None:
    with pytest.raises(ConfigError, match="only the buckets of nv_inference_first_response"):
        first_response_bounds_ns(control([1], "nv_inference_count"))


def test_a_model_has_them_in_all_its_metrics() -> None:
    config = {
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]}],
        "model_transaction_policy": {"decoupled": True},
        "metric_tags": {"team": "blue"},
        **control([1, 2.5]),
    }
    with moonpool.Runtime(metrics=metrics_options(["histogram_latencies=true"])) as runtime:
        runtime.load("m", MODELS / "square.py", config=config)
        lines = [line for line in runtime.metrics().splitlines() if 'model="m"' in line]
        with pytest.raises(ConfigError, match="metric_tags"):
            runtime.load("m", MODELS / "square.py", config={**config, "metric_tags": {"-": ""}})

    assert lines
    assert all('_team="blue"' in line for line in lines)
    assert 'nv_inference_count{_team="blue",model="m",version="1"} 0' in lines
    bounds = [line for line in lines if line.startswith(f"{FIRST}_bucket")]
    assert [line.partition('le="')[2] for line in bounds] == ['1"} 0', '2.5"} 0', '+Inf"} 0']
