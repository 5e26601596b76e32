"""Decides if an instance that died is started again, and when.

The decision is pure: times are monotonic seconds that the caller passes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

# 0.1 s doubled this often is longer than any machine runs, and does not overflow.
_DOUBLINGS = 60
# After a shortage, the next start may succeed as soon as a client closes a connection.
_SHORTAGE_MAX_S = 5.0


@dataclass(frozen=True, slots=True)
class RestartAt:
    """Start it again at this time, which is not in the past."""

    at_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start it again; the reason is a clause for a person, with the instance as its subject."""

    reason: str


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Restarts at once after the first death, then after longer and longer waits, and finally gives up.

    At most `max_restarts` restarts follow deaths within any `window_s`; 0 means no restart at all. The restart after
    the first death in a window waits for `first_backoff_s`, that after the second for `backoff_s`, and each further one
    twice as long as the one before, up to `backoff_max_s`.
    """

    max_restarts: int = 5
    window_s: float = 60.0
    first_backoff_s: float = 0.0
    backoff_s: float = 0.1
    backoff_max_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # NaN is not at least 0 either.
            if not value >= 0:
                raise ValueError(f"{field.name} is {value}; it must be 0 or more")
        if self.window_s == 0:
            raise ValueError(f"window_s is {self.window_s}; without a window no death would count")

    def decide(self, deaths_s: Sequence[float], now_s: float) -> RestartAt | GiveUp:
        """Decide after the last of these deaths, which are in order.

        A failed restart counts as a death. The last `max_restarts + 1` deaths are enough.
        """
        if not deaths_s:
            raise ValueError("there is nothing to decide before the first death")
        recent = sum(1 for death_s in deaths_s if now_s - death_s < self.window_s)
        if recent > self.max_restarts:
            return GiveUp(self._reason(recent))
        return RestartAt(max(now_s, deaths_s[-1] + self.backoff_after_s(max(recent, 1))))

    def pause_after_s(self, shortages: int) -> float:
        """Return the seconds to wait after so many failed starts in a row, 1 or more, for which the model is not to
        blame.
        """
        return min(self.backoff_after_s(1 + shortages), _SHORTAGE_MAX_S)

    def backoff_after_s(self, deaths: int) -> float:
        """Return the seconds to wait after so many deaths within the window, 1 or more."""
        if deaths == 1:
            return min(self.first_backoff_s, self.backoff_max_s)
        return min(self.backoff_s * 2.0 ** min(deaths - 2, _DOUBLINGS), self.backoff_max_s)

    def _reason(self, deaths: int) -> str:
        if self.max_restarts == 0:
            return "died, and restarts are switched off"
        times = "once" if deaths == 1 else f"{deaths} times"
        allowed = "1 restart is" if self.max_restarts == 1 else f"{self.max_restarts} restarts are"
        return f"died {times} within {self.window_s:g} s, in which {allowed} allowed"
