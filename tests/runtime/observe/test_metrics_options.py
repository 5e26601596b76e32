"""Tests of `--metrics-config`."""

from __future__ import annotations

import pytest

from moonpool import InvalidRequest
from moonpool.runtime.observe.metrics_options import MetricsOptions, metrics_options


def test_given_options_are_set_and_the_others_are_triton_s() -> None:
    flags = ["summary_latencies=true", "counter_latencies=false", "summary_quantiles=0.5:0.05,0.9:0.01"]

    options = metrics_options(flags, allow_gpu=False, interval_ms=500)

    assert options == MetricsOptions(
        counter_latencies=False, summary_latencies=True, summary_quantiles=(0.5, 0.9), allow_gpu=False, interval_s=0.5
    )
    assert metrics_options([]) == MetricsOptions()
    assert MetricsOptions().summary_quantiles == (0.5, 0.9, 0.95, 0.99, 0.999)


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("x", "option format is '<setting>=<value>'. Got x"),
        ("nonsense=1", "knows no setting nonsense; there are counter_latencies"),
        ("summary_latencies=maybe", "summary_latencies must be true or false, not maybe"),
        ("summary_quantiles=0.5", "summary_quantiles must be"),
        ("summary_quantiles=2:0.1", "summary_quantiles must be"),
        ("summary_quantiles=x:0.1", "summary_quantiles must be"),
    ],
)
def test_a_meaningless_option_is_refused(flag: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        metrics_options([flag])


def test_an_interval_must_pass() -> None:
    with pytest.raises(InvalidRequest, match="must be positive, not 0"):
        metrics_options([], interval_ms=0)
