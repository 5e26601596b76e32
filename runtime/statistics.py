"""Counts and durations of one model version, as Triton's statistics extension reports them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from moonpool.runtime.response_statistics import ResponseStatistics

if TYPE_CHECKING:
    from moonpool.runtime.exposition import Labels
    from moonpool.runtime.latency_summary import LatencySummaries

Duration: TypeAlias = "dict[str, int]"
ModelStat: TypeAlias = "dict[str, Any]"

_MS = 1_000_000
# From a tenth of a millisecond to a minute.
DURATION_BOUNDS_NS = (
    *(100_000, 250_000, 500_000),
    *(n * _MS // 10 for n in (10, 25, 50, 100, 250, 500, 1000, 2500, 5000)),
    *(n * _MS for n in (1000, 2500, 5000, 10_000, 30_000, 60_000)),
)


class Statistics:
    """Everything since the version was loaded.

    Recorded under the scheduler's lock; a snapshot may be taken at any time.  Durations are
    nanoseconds.  As in Triton the durations of a batch count once for every request in it, but once
    for the batch in `batch_stats`.
    """

    __slots__ = (
        "_batches",
        "by_duration",
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

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        # Labels that the model's configuration adds to those of all its metrics.
        self.tags: Labels = ()
        self.last_inference_ms = 0
        self.inference_count = self.execution_count = 0
        self.success_count = self.success_ns = 0
        self.fail_count = self.fail_ns = 0
        # By reason, in Triton's words and order.
        self.fail_counts = dict.fromkeys(("OTHER", "BACKEND", "CANCELED", "REJECTED"), 0)
        self.queue_ns = self.input_ns = self.infer_ns = self.output_ns = 0
        # How many requests that succeeded took so long, or less, but longer than the bound before.
        self.by_duration = [0] * (len(DURATION_BOUNDS_NS) + 1)
        # Of decoupled models.
        self.responses = ResponseStatistics()
        # Only where somebody wants them.
        self.summaries: LatencySummaries | None = None
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
        batch = self._batches.get(batch_rows)
        if batch is None:
            batch = self._batches[batch_rows] = [0, 0, 0, 0]
        batch[0] += 1
        batch[1] += input_ns
        batch[2] += infer_ns
        batch[3] += output_ns
        if self.summaries is not None and requests:
            self.summaries.add_batch(requests, input_ns, infer_ns, output_ns)

    def record_failures(
        self, now_ms: int, requests: int, fail_ns: int, reason: str = "BACKEND"
    ) -> None:
        """Count requests that ended with an error, wherever; `fail_ns` is the sum over them."""
        self.last_inference_ms = now_ms
        self.fail_count += requests
        self.fail_counts[reason] += requests
        self.fail_ns += fail_ns

    def batch_sizes(self) -> dict[int, int]:
        """How many executions there were of so many rows."""
        return {rows: batch[0] for rows, batch in sorted(self._batches.copy().items())}

    def snapshot(self) -> ModelStat:
        """One entry of `model_stats`, ready for JSON."""
        served = self.success_count
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
                "compute_input": _duration(served, self.input_ns),
                "compute_infer": _duration(served, self.infer_ns),
                "compute_output": _duration(served, self.output_ns),
                # There is no response cache.
                "cache_hit": _duration(0, 0),
                "cache_miss": _duration(0, 0),
            },
            "response_stats": self.responses.snapshot(),
            "batch_stats": [
                {
                    "batch_size": rows,
                    "compute_input": _duration(count, input_ns),
                    "compute_infer": _duration(count, infer_ns),
                    "compute_output": _duration(count, output_ns),
                }
                for rows, (count, input_ns, infer_ns, output_ns) in sorted(
                    self._batches.copy().items()
                )
            ],
            # What a model takes of a GPU or of pinned memory only it knows.
            "memory_usage": [],
        }


def _duration(count: int, ns: int) -> Duration:
    return {"count": count, "ns": ns}
