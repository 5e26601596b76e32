"""The parts of Triton's surface that moonpool does not have yet.

Their names exist, so that a model which imports them can be loaded; using one raises
TritonModelException.
"""

# The signatures are Triton's, although nothing is done with the arguments.
from __future__ import annotations

from enum import Enum

from moonpool.stub.errors import not_offered


class MetricKind(Enum):
    """The kinds of metric."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class Metric:
    """One time series of a MetricFamily."""

    __module__ = "c_python_backend_utils"

    def __init__(self) -> None:
        raise not_offered("custom metrics (Metric)")


class MetricFamily:
    """Metrics of one name that differ in their labels."""

    __module__ = "c_python_backend_utils"

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:  # noqa: ARG002
        raise not_offered("custom metrics (MetricFamily)")


class InferenceResponseSender:
    """Sends responses at any time after `execute` was called."""

    __module__ = "c_python_backend_utils"

    def __init__(self) -> None:
        raise not_offered("response senders (InferenceResponseSender)")
