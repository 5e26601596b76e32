"""Tests of the metrics of a runtime with real stubs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import ECHO, MODELS, hosted
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401

import moonpool
from moonpool import ModelError

X = {"X": np.ones(4, np.float32)}


def of(runtime: moonpool.Runtime, name: str) -> dict[str, float]:
    """Return the lines of one name: the labels, and the value."""
    lines = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", runtime.metrics(), re.MULTILINE)
    return {labels: float(value) for labels, value in lines}


@pytest.mark.promise(
    "Metrics", "Every model has Triton's metrics, and those that models make are shown as Triton shows them."
)
def test_every_model_has_tritons_metrics(runtime: moonpool.Runtime, model_file: Callable[[str], Path]) -> None:
    raises = model_file("class TritonPythonModel:\n    def execute(self, requests):\n        raise ValueError\n")
    with hosted(runtime, "good", MODELS / "echo.py", ECHO), hosted(runtime, "bad", raises, ECHO):
        for _ in range(3):
            runtime.infer("good", X)
            with contextlib.suppress(ModelError):
                runtime.infer("bad", X)
        good, bad = 'model="good",version="1"', 'model="bad",version="1"'
        text = runtime.metrics()

        assert of(runtime, "nv_inference_request_success") == {good: 3, bad: 0}
        assert of(runtime, "nv_inference_count") == {good: 3, bad: 0}
        # Executions count failed requests, too.
        assert of(runtime, "nv_inference_exec_count") == {good: 3, bad: 3}
        assert of(runtime, "nv_inference_pending_request_count") == {good: 0, bad: 0}
        failures = of(runtime, "nv_inference_request_failure")
        assert failures['model="bad",reason="BACKEND",version="1"'] == 3
        assert sum(failures.values()) == 3
        assert of(runtime, "nv_inference_request_duration_us")[good] > 0
        compute = of(runtime, "nv_inference_compute_infer_duration_us")
        assert 0 < compute[good] <= of(runtime, "nv_inference_request_duration_us")[good]
        for line in (
            "# HELP nv_inference_request_success Number of successful inference requests, all batch sizes",
            "# TYPE nv_inference_request_success counter",
            "# TYPE nv_inference_pending_request_count gauge",
        ):
            assert line in text.splitlines()

    assert of(runtime, "nv_inference_count") == {}


def test_a_closed_runtime_has_no_metrics() -> None:
    runtime = moonpool.Runtime()
    assert "model=" not in runtime.metrics()
    runtime.close()

    with pytest.raises(moonpool.RuntimeClosed):
        runtime.metrics()
