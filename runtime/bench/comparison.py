"""One series of figures over another: ratios, and how far they spread."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moonpool.ipc.errors import MoonpoolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of some ratios, the smallest and the largest."""

    median: float
    least: float
    most: float

    def as_dict(self) -> dict[str, float]:
        return {"median": self.median, "least": self.least, "most": self.most}


class Incomparable(MoonpoolError):
    """Two results that were made of different requests."""

    code = "INVALID_ARG"


# What is compared: a name, and where it stands in the figures of a window.
_COMPARED = {
    "requests_per_s": ("requests_per_s",),
    "p50": ("latency_us", "p50"),
    "p99": ("latency_us", "p99"),
}


def ratios(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], *, in_turns: bool
) -> dict[str, Ratio]:
    """Ratios of the figures of two lists of windows: rate, p50 and p99.

    Windows that were measured in turns are compared pair by pair; others each with the median of the other
    side. What has no figure on a side is left out.
    """
    found = {}
    for name, path in _COMPARED.items():
        left, right = _values(ours, path), _values(theirs, path)
        if not in_turns and any(right):
            right = [statistics.median(value for value in right if value)] * len(left)
        quotients = [a / b for a, b in zip(left, right, strict=False) if a and b]
        if quotients:
            found[name] = Ratio(statistics.median(quotients), min(quotients), max(quotients))
    return found


def _values(windows: Sequence[Mapping[str, Any]], path: Sequence[str]) -> list[float | None]:
    values = []
    for window in windows:
        value: Any = window
        for name in path:
            value = value[name]
        values.append(value)
    return values


def matching(point: Mapping[str, Any], series: Sequence[Mapping[str, Any]]) -> Any:
    """The point of the series with the same load; None if there is none."""
    keys = ("concurrency", "request_rate", "distribution")
    for other in series:
        if all(point.get(key) == other.get(key) for key in keys):
            return other
    return None


# How the requests were sent, and what they were sent to. Each may be the very thing that is compared.
_CIRCUMSTANCES = {
    "model": "the model",
    "model_version": "the version",
    "shared_memory": "shared memory",
    "streaming": "streaming",
    "json_tensors": "tensors as JSON",
    "processes": "processes of the generator",
    "instances": "instances",
    "window_s": "seconds of a window",
    "machine": "the machine",
    "cores": "cores",
}


def check_requests(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> None:
    """Raise `Incomparable` unless both results are made of the same requests; `name` is that of the other."""
    here, there = ours["inputs"], theirs.get("inputs")
    if here != there:
        what = f"{described(there)} there, {described(here)} here"
    elif "requests_digest" in theirs and theirs["requests_digest"] != ours["requests_digest"]:
        what = f"{described(here)} with other values"
    else:
        return
    raise Incomparable(
        f"{name} was measured with other requests: {what}. Give the same --input, --shape and --batch, or measure it anew"
    )


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """List in what else than their figures two results differ, each in a few words."""
    found = [
        f"{words} ({_shown(ours[field])} and {_shown(theirs[field])})"
        for field, words in _CIRCUMSTANCES.items()
        if field in ours and field in theirs and ours[field] != theirs[field]
    ]
    if "requests_digest" not in theirs:
        found.append("maybe the values of the inputs, which the older file does not tell")
    here, there = ours.get("configuration_fields"), theirs.get("configuration_fields")
    if here is None or there is None:
        if here is not there or "configuration_fields" not in theirs:
            found.append("maybe the model's configuration, which one of them does not tell")
    elif here != there:
        fields = sorted(
            name for name in here.keys() | there.keys() if here.get(name) != there.get(name)
        )
        found.append(f"the model's configuration ({', '.join(fields)})")
    return found


def names(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, str]:
    """Names for two results, made of what differs between them: labels, else where they were measured, and so on."""
    if ours.get("label") or theirs.get("label"):
        left, right = (each.get("label") or each["where"] for each in (ours, theirs))
        if left != right:
            return left, right
    if ours["where"] != theirs["where"]:
        return ours["where"], theirs["where"]
    for field, words in _CIRCUMSTANCES.items():
        if ours.get(field) != theirs.get(field):
            return f"{words}: {_shown(ours.get(field))}", f"{words}: {_shown(theirs.get(field))}"
    return f"of {ours['date']}", f"of {theirs['date']}"


def _shown(value: object) -> str:
    """Show a value of `_CIRCUMSTANCES`."""
    return "the model's choice" if value in (None, "") else str(value)


def described(inputs: object) -> str:
    """Inputs as `NAME DATATYPE [SHAPE]`, from the form that a result has."""
    if not isinstance(inputs, dict) or not inputs:
        return "no inputs"
    return ", ".join(f"{name} {kind} {list(shape)}" for name, (kind, *shape) in inputs.items())


# For each figure, True if more is better.
_MORE_IS_BETTER = {"requests_per_s": True, "p50": False, "p99": False}


def verdict(name: str, ratio: Mapping[str, float]) -> str:
    """Say in a word whether all ratios of a figure are better, or worse, than the other's; else they are alike."""
    if ratio["least"] <= 1 <= ratio["most"]:
        return "alike"
    return "better" if (ratio["least"] > 1) == _MORE_IS_BETTER[name] else "worse"
