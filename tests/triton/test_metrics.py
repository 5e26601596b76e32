"""Monitoring shows the same metrics of both servers."""

from __future__ import annotations

import pytest
from tests.triton.both import Both

pytestmark = [pytest.mark.triton, pytest.mark.promise("Metrics", "Every model has Triton's metrics, and …")]

MADE = """
F = pb_utils.MetricFamily
c, g, h = F("shown_c", "a counter", F.COUNTER), F("shown_g", "a gauge", F.GAUGE), F("shown_h", "a histogram", F.HISTOGRAM)
self.kept = [c, g, h]
c.Metric({"z": "last", "a": "first"}).increment(2.5)
c.Metric({"q": 'quo"te\\\\ \\n\\u00e9'}).increment(3)
m = h.Metric({"k": "v"}, [0.1, 1, 2.5, 10])
[m.observe(x) for x in (0.05, 1, 7.25, 100, -4)]
h.Metric(buckets=[]).observe(1.5)
for n, x in enumerate([1e6, 1e15, 1e16, 1e17, 1e22, 1e-5, 1/3, 0.1+0.2, -0.0, 123456789012345678, float("nan"), float("inf"), -float("inf")]):
    g.Metric({"n": str(n)}).set(x)
"""


def test_metrics_of_models_are_shown_in_the_same_lines(both: Both) -> None:
    both.said(MADE + "1")
    shown = "^.*shown_.*$"
    theirs, ours = (side.metrics(shown) for side in (both.triton, both.moonpool))
    both.said("self.kept.clear() ;; 1".replace(" ;; ", "\n"))

    assert ours == theirs
    assert not both.moonpool.metrics(shown)


def test_every_model_has_the_same_metrics(both: Both) -> None:
    both.said("1")
    pattern = r'^(?:# (?:HELP|TYPE) nv_inference_.*$|nv_inference_\w+\{model="snippets".*\}(?= ))'
    theirs, ours = both.triton.metrics(pattern), both.moonpool.metrics(pattern)

    assert set(ours) == set(theirs)
