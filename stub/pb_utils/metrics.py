"""Gives models metrics of their own, which appear among those of the runtime."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from moonpool.ipc import messages
from moonpool.stub.pb_utils.errors import Constant, TritonModelException, as_text, bad_arguments, shown
from moonpool.stub.pb_utils.host import Host, current


class MetricKind(Constant):
    """Lists the kinds of metrics."""

    __module__ = "c_python_backend_utils"

    COUNTER = messages.COUNTER
    GAUGE = messages.GAUGE
    HISTOGRAM = messages.HISTOGRAM


class _Series:
    """Is a time series as the host knows it. Its family releases it, for all its `Metric`s."""

    __slots__ = ("host", "kind", "number")

    def __init__(self, host: Host, kind: int, number: int) -> None:
        self.host = host  # the host that made it; a fork of the process has another one
        self.kind = kind
        self.number = number  # 0 when the family is gone


class _Holding:
    """Holds the series of a family, and releases them at its end."""

    __slots__ = ("all", "by_labels")

    def __init__(self) -> None:
        self.all: list[_Series] = []
        # So that a model which asks twice gets the same series.
        self.by_labels: dict[str, _Series] = {}

    def __del__(self) -> None:
        for series in self.all:
            # Metrics may outlive their family, and raise then.
            number, series.number = series.number, 0
            if current() is series.host:
                series.host.drop_metric(number)


class Metric:
    """Is one time series of a MetricFamily, which makes it. Any thread may call any method.

    All methods raise TritonModelException if the kind of the family does not allow them, and if the `MetricFamily`
    object is gone. The runtime gets changes soon, and before the response to the request that is being executed.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("__weakref__", "_series")
    _series: _Series

    def __init__(self) -> None:
        raise TypeError("c_python_backend_utils.Metric: No constructor defined!")

    def increment(self, value: float, /) -> None:
        """Add to a gauge, or a number that is not negative to a counter."""
        number = _number("increment", self, value)
        kind, known_as = self._open("increment")
        if kind == messages.COUNTER and number < 0:
            raise _refusal("increment", "COUNTER can only be incremented monotonically by non-negative values.")
        if kind == messages.HISTOGRAM:
            raise _refusal("increment", "HISTOGRAM does not support Increment")
        current().change_metric(known_as, messages.INCREMENT, number)

    def set(self, value: float, /) -> None:
        """Set a gauge."""
        number = _number("set", self, value)
        kind, known_as = self._open("set")
        if kind != messages.GAUGE:
            raise _refusal("set", f"{MetricKind(kind).name} does not support Set")
        current().change_metric(known_as, messages.SET, number)

    def observe(self, value: float, /) -> None:
        """Count a value in a histogram."""
        number = _number("observe", self, value)
        kind, known_as = self._open("observe")
        if kind != messages.HISTOGRAM:
            raise _refusal("observe", f"{MetricKind(kind).name} does not support Observe")
        current().change_metric(known_as, messages.OBSERVE, number)

    def value(self) -> float:
        """Return the value of a counter or a gauge. Other models may change the same time series."""
        kind, known_as = self._open("get")
        if kind == messages.HISTOGRAM:
            raise _refusal("get", "HISTOGRAM does not support Value")
        try:
            return current().metric_value(known_as)
        except TritonModelException as error:
            raise TritonModelException(f"Failed to get metric value: {error}") from error

    def _open(self, doing: str) -> tuple[int, int]:
        # Read once: another thread may drop the family.
        known_as = self._series.number
        if not known_as:
            raise TritonModelException(
                f"Failed to {doing} metric value: Invalid metric operation as the corresponding "
                "'MetricFamily' has been deleted. The 'MetricFamily' object should be deleted AFTER "
                "its corresponding 'Metric' objects have been deleted."
            )
        return self._series.kind, known_as


class MetricFamily:
    """Makes the metrics of one name, which differ in their labels and exist as long as this object.

    Families of the same name are one family for all models of a runtime: they must have the same kind, and the first
    description is shown. Any thread may call any method.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("__weakref__", "_description", "_holding", "_kind", "_name")

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        """Make the family. Raises TritonModelException for an invalid name, and if the name has another kind."""
        given: tuple[object, object, object] = (name, description, kind)
        if (
            not isinstance(given[0], (str, bytes))
            or not isinstance(given[1], (str, bytes))
            or not isinstance(given[2], MetricKind)
        ):
            signature = "name: str, description: str, kind: c_python_backend_utils.MetricKind"
            raise bad_arguments("MetricFamily", signature, *given)
        self._name = as_text(name)
        self._description = as_text(description)
        self._kind = int(kind)
        self._holding = _Holding()
        self._new("MetricFamily", None, None)

    def Metric(self, labels: object = None, buckets: object = None) -> Metric:  # noqa: N802 - Triton's
        """Return the metric with these labels, a dictionary of texts.

        A histogram needs `buckets`, a list of ascending upper bounds. An existing time series keeps its own.
        Raises TritonModelException.
        """
        key = _labels_as_json(labels)
        bounds = _bounds(buckets, self._kind)
        series = self._holding.by_labels.get(key)
        if series is None:
            # Two threads that come here at once get two numbers for the same time series.
            series = self._new("Metric", json.loads(key), bounds)
            self._holding.by_labels[key] = series
        metric = Metric.__new__(Metric)
        metric._series = series
        return metric

    def _new(self, what: str, labels: Mapping[str, str] | None, buckets: Sequence[float] | None) -> _Series:
        host = current()
        try:
            if labels is not None and not all(isinstance(each, str) for each in labels.values()):
                raise TritonModelException(host.failure("attempt to access JSON non-string as string"))
            number = host.new_metric(self._name, self._description, self._kind, labels, buckets)
        except TritonModelException as error:
            raise TritonModelException(f"Error when creating {what}: {error}") from error
        series = _Series(host, self._kind, number)
        self._holding.all.append(series)
        return series


def _labels_as_json(labels: object) -> str:
    """Return the labels as JSON. Like Triton, this takes numbers as names; as values they are refused later."""
    if labels is None:
        return "{}"
    if not isinstance(labels, dict):
        raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
    return json.dumps(labels)


def _bounds(buckets: object, kind: int) -> list[float] | None:
    if buckets is None:
        if kind == messages.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        return None
    if not isinstance(buckets, list):
        raise TritonModelException("Failed to create metric. Buckets must be a list.")
    if kind != messages.HISTOGRAM:
        raise TritonModelException("Failed to create metric. Unexpected buckets found.")
    try:
        return [_as_float(bound) for bound in buckets]
    except (TypeError, ValueError, OverflowError) as error:
        raise RuntimeError(f"Failed to create metric. Buckets must be numbers: {error}") from error


def _number(method: str, metric: Metric, value: object) -> float:
    if type(value) is float:
        return value
    try:
        return _as_float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"{method}(): incompatible function arguments. The following argument types are "
            "supported:\n    1. (self: c_python_backend_utils.Metric, arg0: float) -> None\n\n"
            f"Invoked with: {shown(metric)}, {shown(value)}"
        ) from None


def _as_float(value: object) -> float:
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError(f"{shown(value)} is a text")
    return float(value)  # type: ignore[arg-type]


def _refusal(doing: str, why: str) -> TritonModelException:
    inner = current().failure(f"TRITONSERVER_METRIC_KIND_{why}")
    return TritonModelException(f"Failed to {doing} metric value: {inner}")
