"""Counts and durations of one model version, as Triton's statistics extension reports them.

Theory of operation. Nothing here takes a lock. A `Statistics` is written under the lock of its model's scheduler, and
its `ResponseStatistics` on the reactor's thread only. Snapshots are taken by any thread without the lock: every figure
is one integer, and tables are copied before they are walked, so a reader may see a batch half counted, but never a torn
value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

from moonpool.runtime.observe.distributions import BucketCounts, CacheSummaries, LatencySummaries
from moonpool.runtime.observe.exposition import Labels

Duration: TypeAlias = "dict[str, int]"
ModelStat: TypeAlias = "dict[str, Any]"

_MS = 1_000_000
# From a tenth of a millisecond to a minute, with all of `FIRST_RESPONSE_BOUNDS_NS`.
DURATION_BOUNDS_NS = (
    *(100_000, 250_000, 500_000),
    *(n * _MS // 10 for n in (10, 25, 50, 100, 250, 500, 1000, 2500, 5000)),
    *(n * _MS for n in (1000, 2000, 2500, 5000, 10_000, 30_000, 60_000)),
)
# Beyond these places responses are counted at the last one.
_MOST_PLACES = 1000
# Different sizes of batches that are counted apart.
MOST_BATCH_SIZES = 4096
# As in Triton. The configuration of a model may set others.
FIRST_RESPONSE_BOUNDS_NS = tuple(n * _MS for n in (100, 500, 2000, 5000))
_KINDS = ("success", "fail", "empty_response", "cancel")
# Where the count of each kind stands, before its duration.
_AT = {kind: 2 * i for i, kind in enumerate(_KINDS)}


class ResponseStatistics:
    """Counts of the responses that a decoupled model gives one after another, by their place among them.

    Recorded on the reactor's thread. A snapshot may be taken at any time. Durations are nanoseconds.
    """

    __slots__ = ("_places", "first")

    def __init__(self, first_bounds_ns: tuple[int, ...] = FIRST_RESPONSE_BOUNDS_NS) -> None:
        # By place: count and duration of each kind.
        self._places: dict[int, list[int]] = {}
        # From a request to the first response to it.
        self.first = BucketCounts(first_bounds_ns)

    def record(self, place: int, kind: str, duration_ns: int) -> None:
        """Count the response at a place, counted from 0, that came so long after the one before it.

        `kind` is success, fail, empty_response (the flag that no more come) or cancel (a response
        that nobody waited for any more).
        """
        if place >= _MOST_PLACES:
            place = _MOST_PLACES - 1
        counts = self._places.get(place)
        if counts is None:
            counts = self._places[place] = [0] * (2 * len(_KINDS))
        at = _AT[kind]
        counts[at] += 1
        counts[at + 1] += duration_ns

    def snapshot(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return `response_stats` of the statistics extension."""
        shown = {}
        for place, counts in sorted(self._places.copy().items()):
            kinds = {kind: {"count": counts[2 * i], "ns": counts[2 * i + 1]} for i, kind in enumerate(_KINDS)}
            # Outputs stay where the model wrote them, so reading them takes no time.
            infer = [kinds["success"], kinds["fail"]]
            computed = sum(each["count"] for each in infer)
            shown[str(place)] = {
                "compute_infer": {"count": computed, "ns": sum(each["ns"] for each in infer)},
                "compute_output": {"count": computed, "ns": 0},
                **kinds,
            }
        return shown


class CacheCounts:
    """Counts of a model version whose responses are cached. Recorded as `Statistics`."""

    __slots__ = ("hit_ns", "hits", "miss_ns", "misses", "summaries")

    def __init__(self) -> None:
        self.hits = self.hit_ns = 0
        # Responses that were made and perhaps kept; the duration is that of the look for them and of keeping them.
        self.misses = self.miss_ns = 0
        # None unless the metrics have summaries.
        self.summaries: CacheSummaries | None = None

    def add_hit(self, taken_ns: int) -> None:
        """Count a request that was answered from the cache."""
        self.hits += 1
        self.hit_ns += taken_ns
        if self.summaries is not None:
            self.summaries.hit.add(taken_ns)

    def add_miss(self, taken_ns: int) -> None:
        """Count a response that was looked for in vain, and made."""
        self.misses += 1
        self.miss_ns += taken_ns
        if self.summaries is not None:
            self.summaries.miss.add(taken_ns)


class Statistics:
    """All counts and durations since the version was loaded.

    Recorded under the scheduler's lock. A snapshot may be taken at any time. Durations are
    nanoseconds. As in Triton the durations of a batch count once for every request in it, but once
    for the batch in `batch_stats`.
    """

    __slots__ = (
        "_batches",
        "bounds_ns",
        "by_duration",
        "cache",
        "execution_count",
        "fail_count",
        "fail_counts",
        "fail_ns",
        "infer_ns",
        "inference_count",
        "input_ns",
        "last_inference_ms",
        "name",
        "output_ns",
        "queue_ns",
        "responses",
        "success_count",
        "success_ns",
        "summaries",
        "tags",
        "version",
    )

    def __init__(self, name: str, version: str, bounds_ns: tuple[int, ...] = DURATION_BOUNDS_NS) -> None:
        """`bounds_ns` are the bounds by which durations are counted, in ascending order: at least the default ones."""
        self.name = name
        self.version = version
        self.bounds_ns = bounds_ns
        # Labels that the model's configuration adds to those of all its metrics.
        self.tags: Labels = ()
        self.last_inference_ms = 0
        self.inference_count = self.execution_count = 0
        self.success_count = self.success_ns = 0
        self.fail_count = self.fail_ns = 0
        # By reason, in Triton's words and order.
        self.fail_counts = dict.fromkeys(("OTHER", "BACKEND", "CANCELED", "REJECTED"), 0)
        self.queue_ns = self.input_ns = self.infer_ns = self.output_ns = 0
        # The number of requests that succeeded within each bound and not within a lower one.
        self.by_duration = [0] * (len(bounds_ns) + 1)
        # For decoupled models.
        self.responses = ResponseStatistics()
        # None unless the metrics' options ask for them.
        self.summaries: LatencySummaries | None = None
        # None for a model without a cache.
        self.cache: CacheCounts | None = None
        # By rows: [executions, input_ns, infer_ns, output_ns].
        self._batches: dict[int, list[int]] = {}

    def __repr__(self) -> str:
        return (
            f"<Statistics of {self.name} {self.version}: {self.success_count} succeeded, "
            f"{self.fail_count} failed, {self.execution_count} executions>"
        )

    def record_batch(
        self,
        now_ms: int,
        batch_rows: int,
        requests: int,
        rows: int,
        success_ns: int,
        queue_ns: int,
        input_ns: int,
        infer_ns: int,
        output_ns: int,
    ) -> None:
        """Count one execution in which `requests` requests succeeded.

        `batch_rows` are the rows executed, `rows` those of the requests that succeeded; `success_ns`
        and `queue_ns` are sums over these requests, the other durations are the batch's own; `now_ms`
        is since the epoch.
        """
        self.last_inference_ms = now_ms
        self.execution_count += 1
        self.inference_count += rows
        self.success_count += requests
        self.success_ns += success_ns
        self.queue_ns += queue_ns
        self.input_ns += input_ns * requests
        self.infer_ns += infer_ns * requests
        self.output_ns += output_ns * requests
        batch = self._of_size(batch_rows)
        batch[0] += 1
        batch[1] += input_ns
        batch[2] += infer_ns
        batch[3] += output_ns
        if self.summaries is not None and requests:
            self.summaries.add_batch(requests, input_ns, infer_ns, output_ns)

    def _of_size(self, rows: int) -> list[int]:
        """Return the counts of batches of this size.

        Callers choose the sizes, so those beyond a number of them are not kept.
        """
        batch = self._batches.get(rows)
        if batch is None:
            batch = [0, 0, 0, 0]
            if len(self._batches) < MOST_BATCH_SIZES:
                self._batches[rows] = batch
        return batch

    def record_hit(self, now_ms: int, taken_ns: int) -> None:
        """Count a request that was answered from the cache, and the time that this took. It executed nothing."""
        self.last_inference_ms = now_ms
        self.success_count += 1
        self.success_ns += taken_ns
        self.by_duration[bisect_left(self.bounds_ns, taken_ns)] += 1
        if self.cache is not None:
            self.cache.add_hit(taken_ns)
        if self.summaries is not None:
            self.summaries.request.add(taken_ns)
            self.summaries.queue.add(0)

    def record_failures(self, now_ms: int, requests: int, fail_ns: int, reason: str = "BACKEND") -> None:
        """Count requests that ended with an error, in the queue or later. `fail_ns` is the sum of their durations."""
        self.last_inference_ms = now_ms
        self.fail_count += requests
        self.fail_counts[reason] += requests
        self.fail_ns += fail_ns

    def within(self, bounds_ns: Sequence[int]) -> list[int]:
        """Return the requests that succeeded by these bounds alone, as `by_duration`. Each must be one of
        `bounds_ns`.
        """
        counts, below = [], 0
        wanted = set(bounds_ns)
        for bound, count in zip_longest(self.bounds_ns, self.by_duration.copy()):
            below += count
            if bound is None or bound in wanted:
                counts.append(below)
                below = 0
        return counts

    def batch_sizes(self) -> dict[int, int]:
        """Return the number of executions by their rows."""
        return {rows: batch[0] for rows, batch in sorted(self._batches.copy().items())}

    def snapshot(self) -> ModelStat:
        """Return one entry of `model_stats`, ready for JSON."""
        served, cache = self.success_count, self.cache or CacheCounts()
        computed = served - cache.hits
        return {
            "name": self.name,
            "version": self.version,
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {
                "success": _duration(served, self.success_ns),
                "fail": _duration(self.fail_count, self.fail_ns),
                "queue": _duration(served, self.queue_ns),
                "compute_input": _duration(computed, self.input_ns),
                "compute_infer": _duration(computed, self.infer_ns),
                "compute_output": _duration(computed, self.output_ns),
                "cache_hit": _duration(cache.hits, cache.hit_ns),
                "cache_miss": _duration(cache.misses, cache.miss_ns),
            },
            "response_stats": self.responses.snapshot(),
            "batch_stats": [
                {
                    "batch_size": rows,
                    "compute_input": _duration(count, input_ns),
                    "compute_infer": _duration(count, infer_ns),
                    "compute_output": _duration(count, output_ns),
                }
                for rows, (count, input_ns, infer_ns, output_ns) in sorted(self._batches.copy().items())
            ],
            # Only the model knows how much memory of a GPU, or pinned memory, it takes.
            "memory_usage": [],
        }


def _duration(count: int, ns: int) -> Duration:
    return {"count": count, "ns": ns}
