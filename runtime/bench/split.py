"""Where a server says that the time of its requests went: what its statistics counted in a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PARTS = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True, slots=True)
class Split:
    """Sums over the requests that succeeded."""

    requests: int
    rows: int
    executions: int
    # By the names of the statistics extension.
    sums_ns: Mapping[str, int]

    def mean_us(self, part: str) -> float:
        """Microseconds for a request; 0 where there was none."""
        return self.sums_ns[part] / self.requests / 1000 if self.requests else 0.0

    @property
    def rows_per_execution(self) -> float:
        return self.rows / self.executions if self.executions else 0.0

    def as_dict(self) -> dict[str, object]:
        return {
            "requests": self.requests,
            "rows_per_execution": self.rows_per_execution,
            **{f"{part}_us": self.mean_us(part) for part in PARTS},
        }


def between(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Split | None:
    """What was counted from one reading of `model_stats` to the next; None if there is none to compare."""
    if before is None or after is None:
        return None
    then, now = before.get("inference_stats", {}), after.get("inference_stats", {})
    return Split(
        requests=_grown(then, now, "success", "count"),
        rows=_number(after, "inference_count") - _number(before, "inference_count"),
        executions=_number(after, "execution_count") - _number(before, "execution_count"),
        sums_ns={part: _grown(then, now, part, "ns") for part in PARTS},
    )


def _grown(then: Mapping[str, Any], now: Mapping[str, Any], part: str, unit: str) -> int:
    return _number(now.get(part, {}), unit) - _number(then.get(part, {}), unit)


def _number(values: Mapping[str, Any], name: str) -> int:
    """Protobuf's JSON leaves zeros out, and has large numbers as text."""
    return int(values.get(name, 0))


def together(splits: Sequence[Split]) -> Split | None:
    """The sum; None of nothing."""
    if not splits:
        return None
    return Split(
        requests=sum(s.requests for s in splits),
        rows=sum(s.rows for s in splits),
        executions=sum(s.executions for s in splits),
        sums_ns={part: sum(s.sums_ns[part] for s in splits) for part in PARTS},
    )
