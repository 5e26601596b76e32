"""How hard a window presses: so many requests at once, or so many a second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

DISTRIBUTIONS = ("poisson", "constant")
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Closed loop: so many callers, each of which asks again when it was answered."""

    callers: int

    @property
    def words(self) -> str:
        return f"{self.callers} caller{'s' if self.callers > 1 else ''}"

    def as_dict(self) -> dict[str, object]:
        return {"concurrency": self.callers}


@dataclass(frozen=True, slots=True)
class Rate:
    """Open loop: requests come at their times, whether or not those before were answered."""

    per_s: float
    distribution: str = "poisson"

    @property
    def words(self) -> str:
        return f"{self.per_s:g} requests/s asked for"

    def as_dict(self) -> dict[str, object]:
        return {"request_rate": self.per_s, "distribution": self.distribution}

    def due_ns(self, seconds: float, seed: int) -> NDArray[np.int64]:
        """When requests are due, in nanoseconds from the beginning of the window; at least one is."""
        step_s = 1 / self.per_s
        if self.distribution == "constant":
            times = np.arange(max(1, round(seconds * self.per_s))) * step_s
        else:
            generator = np.random.default_rng(seed)
            # Enough but for one window in many thousands, which is a little shorter then.
            count = round(seconds * self.per_s + 5 * (seconds * self.per_s) ** 0.5) + 5
            times = np.cumsum(generator.exponential(step_s, count))
            times = times[: max(1, int(np.searchsorted(times, seconds)))]
        return (times * _NS).astype(np.int64)


Load = Concurrency | Rate
