"""Statistics of one process on their way into those of another: as numbers, which can travel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonpool.runtime.statistics import Statistics

    # All figures in the order below, those of requests that failed by their reasons, and those of durations
    # by their buckets; then of executions by their rows.
    Counts = tuple[list[int], list[list[int]]]

_FIGURES = (
    "inference_count",
    "execution_count",
    "success_count",
    "success_ns",
    "fail_count",
    "fail_ns",
    "queue_ns",
    "input_ns",
    "infer_ns",
    "output_ns",
)


def take_counts(statistics: Statistics) -> Counts | None:
    """What was counted since the last time, None for nothing; it begins at nothing again. Under the scheduler's lock."""
    if not (statistics.execution_count or statistics.fail_count):
        return None
    figures = [statistics.last_inference_ms]
    figures += [getattr(statistics, name) for name in _FIGURES]
    figures += statistics.fail_counts.values()
    figures += statistics.by_duration
    batches = [[rows, *counted] for rows, counted in statistics._batches.items()]
    statistics.__init__(statistics.name, statistics.version)  # type: ignore[misc]
    return figures, batches


def add_counts(statistics: Statistics, counts: Counts) -> None:
    """Count what was counted elsewhere. Under the scheduler's lock. Raises ValueError where it cannot be."""
    figures, batches = counts
    reasons, by_duration = statistics.fail_counts, statistics.by_duration
    if len(figures) != 1 + len(_FIGURES) + len(reasons) + len(by_duration):
        raise ValueError(f"{len(figures)} figures of a model's statistics")
    rest = iter(figures)
    statistics.last_inference_ms = max(statistics.last_inference_ms, next(rest))
    for name in _FIGURES:
        setattr(statistics, name, getattr(statistics, name) + next(rest))
    for reason in reasons:
        reasons[reason] += next(rest)
    for bucket, count in enumerate(rest):
        by_duration[bucket] += count
    for rows, *counted in batches:
        before = statistics._batches.get(rows, [0, 0, 0, 0])
        statistics._batches[rows] = [a + b for a, b in zip(before, counted, strict=True)]
