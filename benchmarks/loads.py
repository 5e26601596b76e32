"""Loads: how many requests are in flight, or when they are due."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moonpool import MoonpoolError

DISTRIBUTIONS = ("poisson", "constant")
_NS = 1_000_000_000
# More nanoseconds do not fit into 64 bits.
_LONGEST_S = 9e9
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(us|µs|ms|s|min|m)?")
_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0}


class BadLoad(MoonpoolError):
    """A text is not a load, a time or a share."""

    code = "INVALID_ARG"


def seconds_of(text: str, unit: str = "s") -> float:
    """Read a time such as `20ms`; a number alone is in `unit`. Raises `BadLoad`."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise BadLoad(f"{text!r} is not a time such as 250us, 20ms or 10s")
    return float(found[1]) * _UNITS[found[2] or unit]


def share_of(text: str) -> float:
    """Read a share such as `5%` or `0.05`. Raises `BadLoad`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise BadLoad(f"{text!r} is not a share such as 5% or 0.05")
    return share


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Closed loop: a number of callers, each of which sends its next request when it has its answer."""

    callers: int

    @property
    def words(self) -> str:
        return f"{self.callers} caller{'s' if self.callers > 1 else ''}"

    def as_dict(self) -> dict[str, object]:
        return {"concurrency": self.callers}


@dataclass(frozen=True, slots=True)
class Rate:
    """Open loop: requests are sent at planned times, whether or not earlier ones were answered."""

    per_s: float
    distribution: str = "poisson"

    @property
    def words(self) -> str:
        return f"{self.per_s:g} requests/s asked for"

    def as_dict(self) -> dict[str, object]:
        return {"request_rate": self.per_s, "distribution": self.distribution}

    def due_ns(self, seconds: float, seed: int) -> NDArray[np.int64]:
        """Return the planned times of requests, at least one, in nanoseconds from the beginning of the window."""
        steps = _steps(seconds * self.per_s, self.distribution, seed)
        return (steps / self.per_s * _NS).astype(np.int64)


def _steps(expected: float, distribution: str, seed: int) -> NDArray[np.float64]:
    """Return the times of requests that are one unit apart in the mean, below `expected`; at least one."""
    if distribution == "constant":
        return np.arange(max(1, round(expected)), dtype=np.float64)
    # Five standard deviations more than the mean are enough for all but one window in many thousands, which is
    # a little shorter then.
    count = round(expected + 5 * expected**0.5) + 5
    times = np.cumsum(np.random.default_rng(seed).exponential(1.0, count))
    return times[: max(1, int(np.searchsorted(times, expected)))]


# Points at which the rate of a shape is added up.
_GRID = 10_000
_SHAPE = re.compile(r"(\w+):([\d.]+)-([\d.]+)(?:/([\d.]+\w*))?(?:/([\d.]+%?))?")


@dataclass(frozen=True, slots=True)
class Shape:
    """Open loop with a rate that changes: `text` describes it as the command line does.

    `ramp:LOW-HIGH` grows over the window, `periodic:LOW-HIGH/PERIOD` swings as a sine does, and
    `burst:LOW-HIGH/PERIOD/SHARE` is at HIGH in the first SHARE of each period.
    """

    text: str
    rate: Callable[[NDArray[np.float64], float], NDArray[np.float64]]
    # The least length of a window, which is one period.
    least_s: float
    distribution: str = "poisson"

    @classmethod
    def parse(cls, text: str, distribution: str) -> Shape:
        """Read a shape. Raises `BadLoad`."""
        found = _SHAPE.fullmatch(text)
        usage = "ramp:LOW-HIGH, periodic:LOW-HIGH/PERIOD or burst:LOW-HIGH/PERIOD/SHARE"
        if found is None:
            raise BadLoad(f"{text!r} must be {usage}")
        kind, period, share = found[1], found[4], found[5]
        try:
            low, high = float(found[2]), float(found[3])
        except ValueError:
            low, high = 0.0, 0.0
        period_s = seconds_of(period) if period else 0.0
        wanted = {"ramp": (False, False), "periodic": (True, False), "burst": (True, True)}
        if wanted.get(kind) != (period_s > 0, bool(share)):
            raise BadLoad(f"{text!r} must be {usage}")
        if max(low, high) <= 0:
            raise BadLoad(f"{text!r} has no rate of more than 0 requests a second")
        if kind == "ramp":
            return cls(text, lambda at, whole: low + (high - low) * at / whole, 0.0, distribution)
        if kind == "periodic":
            middle, swing = (low + high) / 2, (high - low) / 2
            return cls(text, lambda at, _: middle - swing * np.cos(at / period_s * 2 * math.pi), period_s, distribution)
        part = share_of(share)
        return cls(text, lambda at, _: np.where(at % period_s < part * period_s, high, low), period_s, distribution)

    @property
    def words(self) -> str:
        return f"the load {self.text}"

    def as_dict(self) -> dict[str, object]:
        return {"load_shape": self.text, "distribution": self.distribution}

    def due_ns(self, seconds: float, seed: int) -> NDArray[np.int64]:
        """Return the planned times of requests, at least one, in nanoseconds from the beginning of the window."""
        at_s = np.linspace(0.0, seconds, _GRID)
        rates = self.rate(at_s, seconds)
        # The number of requests that should have been sent by each time; its inverse has the time of each request.
        sent = np.concatenate([[0.0], np.cumsum((rates[1:] + rates[:-1]) / 2 * np.diff(at_s))])
        steps = _steps(float(sent[-1]), self.distribution, seed)
        return (np.interp(steps, sent, at_s) * _NS).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Open loop at given times, whatever the length of a window is; `kinds` says which request is sent at each time."""

    name: str
    times_ns: NDArray[np.int64]
    kinds: NDArray[np.int32] | None = None

    @classmethod
    def read(cls, path: Path, speed: float) -> Schedule:
        """Read a file with one time in seconds on each line. Raises `BadLoad` and OSError."""
        try:
            times_s = [float(line) for line in path.read_text("utf-8").split()]
        except ValueError as error:
            raise BadLoad(f"{path} must have a time in seconds on each line: {error}") from error
        return cls.of(str(path), times_s, speed)

    @classmethod
    def of(cls, name: str, times_s: list[float], speed: float, kinds: NDArray[np.int32] | None = None) -> Schedule:
        """Make a schedule of times in seconds, `speed` times as fast. Raises `BadLoad`."""
        times = np.array(times_s, np.float64)
        if not len(times) or not np.isfinite(times).all() or (np.diff(times) < 0).any():
            raise BadLoad(f"{name} must have at least one time, and times that never decrease")
        if times[-1] / speed - times[0] / speed > _LONGEST_S:
            raise BadLoad(f"{name} takes more than {_LONGEST_S:g} seconds")
        return cls(
            name if speed == 1 else f"{name} at speed {speed:g}",
            ((times - times[0]) / speed * _NS).astype(np.int64),
            kinds,
        )

    @property
    def words(self) -> str:
        return f"the times of {self.name}"

    def as_dict(self) -> dict[str, object]:
        return {"schedule": self.name}

    def due_ns(self, seconds: float, seed: int) -> NDArray[np.int64]:  # noqa: ARG002 - the times are given
        """Return the planned times of requests, in nanoseconds from the beginning of the window."""
        return self.times_ns


Planned = Rate | Shape | Schedule
Load = Concurrency | Planned

# The fields of a point in a result that say which load it was.
LOAD_FIELDS = ("concurrency", "request_rate", "load_shape", "schedule", "distribution")


def load_in_short(point: Mapping[str, object]) -> str:
    """Write the load of a point of a result as a table does."""
    if "request_rate" in point:
        return f"{point['request_rate']:g}/s"
    for field in LOAD_FIELDS:
        if field in point:
            return str(point[field])
    return ""
