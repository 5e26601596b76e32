"""What was seen in a stretch of time under one load."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from moonpool.runtime.bench.split import Split, together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
# A request that is sent so much later than planned was delayed.
_DELAY_NS = 1_000_000
# From this share of a core on, a process of the generator may be what is measured.
SATURATED = 0.9
# With more than this part of the planned requests delayed, a load was not what it was asked to be.
FALLS_BEHIND = 0.05


def _none() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class Window:
    """Times are nanoseconds, one for each request that was answered, in no particular order."""

    seconds: float
    latencies_ns: NDArray[np.int64] = field(default_factory=_none)
    # Requests that failed, by the text of the error.
    errors: Counter[str] = field(default_factory=Counter)
    # By how much requests of an open loop were sent later than planned.
    late_ns: NDArray[np.int64] = field(default_factory=_none)
    # Planned, and never sent.
    unsent: int = 0
    # Streams: until a request's first response, and from one response to the next.
    first_ns: NDArray[np.int64] = field(default_factory=_none)
    between_ns: NDArray[np.int64] = field(default_factory=_none)
    # Share of a core that the busiest process of the generator took; None where callers are in this process.
    generator_share: float | None = None
    # Where the server says the time went; None where it does not say.
    split: Split | None = None

    @property
    def requests_per_s(self) -> float:
        """Answered ones only."""
        return len(self.latencies_ns) / self.seconds if self.seconds else 0.0

    @property
    def responses(self) -> int:
        """Of streams."""
        return len(self.first_ns) + len(self.between_ns)

    @property
    def failed(self) -> int:
        return self.errors.total()

    def latency_us(self, percentile: float) -> float:
        """NaN where nothing was answered."""
        return percentile_us(self.latencies_ns, percentile)

    @property
    def mean_latency_us(self) -> float:
        """NaN where nothing was answered."""
        return float(self.latencies_ns.mean()) / 1000 if len(self.latencies_ns) else float("nan")

    @property
    def delayed(self) -> int:
        """Requests that were sent more than a millisecond late, or not at all."""
        return int((self.late_ns > _DELAY_NS).sum()) + self.unsent


def percentile_us(times_ns: NDArray[np.int64], percentile: float) -> float:
    """In microseconds; NaN of nothing."""
    return float(np.percentile(times_ns, percentile)) / 1000 if len(times_ns) else float("nan")


def merged(windows: Sequence[Window]) -> Window:
    """One window as long as all of these."""
    shares = [w.generator_share for w in windows if w.generator_share is not None]
    return Window(
        seconds=sum(w.seconds for w in windows),
        latencies_ns=np.concatenate([w.latencies_ns for w in windows]),
        errors=sum((w.errors for w in windows), Counter()),
        late_ns=np.concatenate([w.late_ns for w in windows]),
        unsent=sum(w.unsent for w in windows),
        first_ns=np.concatenate([w.first_ns for w in windows]),
        between_ns=np.concatenate([w.between_ns for w in windows]),
        generator_share=max(shares, default=None),
        split=together([w.split for w in windows if w.split is not None]),
    )
