"""Decides how many instances a model has, by the time that its requests wait. Pure: no clock, no lock, no process.

`Autoscaler.step` gets a sample every tenth of a second. The rules are few:

- *Up*, if requests have waited for longer than the target over `UP_S`: by as many instances as there are processors
  with nothing to do, and at most twice as many as there are. One that comes while no processor is idle, or where its
  memory is not there, would only make the others slower.
- *Down* by one, if requests have waited for less than half of the target over `DOWN_S`, and the others would have been
  busy for 70 % of that time at most.
- After each step the samples count anew. So a step is answered by what it changed, and between the two targets nothing
  happens at all: that is the hysteresis. What went up stays for `DOWN_S` at least.
"""

from __future__ import annotations

import math
from typing import NamedTuple

UP_S = 0.25
DOWN_S = 10.0
# The part of its time for which an instance may be busy after one has gone.
_BUSY = 0.7
# Less than this much of a processor is not idle.
_IDLE_PROCESSOR = 0.5


class Room(NamedTuple):
    """The instances for which the machine has room."""

    idle_processors: float = math.inf
    """Not limited for models that compute on GPUs."""
    by_memory: int = 1 << 20
    """By the memory that one of them takes now."""


class ScaleSample(NamedTuple):
    """A model at one moment."""

    at_s: float
    instances: int
    wait_ms: float
    """The time that its requests have waited lately."""
    busy: float
    """The number of instances that execute."""


class QueueCounts(NamedTuple):
    """Counts of a model's queue at one moment."""

    at_s: float
    ended: int
    """The requests that have ended since the load."""
    queue_ns: int
    """The time that they spent in the queue."""
    waiting: int
    """The requests that are there now."""


class QueueWatch:
    """Makes a waiting time of counts.

    It is the mean of the requests that have ended since the last look. While none ends, it is the time since then.
    """

    def __init__(self) -> None:
        self._last: QueueCounts | None = None
        self._empty_at_s = 0.0

    def wait_ms(self, counts: QueueCounts) -> float:
        """Return the time that requests have waited since the last look."""
        last, self._last = self._last, counts
        # If requests have ended, those in the queue may be new.
        if last is None or not counts.waiting or counts.ended > last.ended:
            self._empty_at_s = counts.at_s
        if last is None:
            return 0.0
        ended = counts.ended - last.ended
        mean_ms = (counts.queue_ns - last.queue_ns) / ended / 1e6 if ended > 0 else 0.0
        return max(mean_ms, (counts.at_s - self._empty_at_s) * 1e3)


class ScaleStep(NamedTuple):
    """The number of instances to have from now on, with the reason."""

    instances: int
    because: str


class Autoscaler:
    """The scaling of one model. Not thread-safe."""

    def __init__(self, bounds: tuple[int, int], target_ms: float) -> None:
        """`bounds` are the least and the greatest number of instances."""
        self.bounds = bounds
        self._target_ms = target_ms
        # The times since which requests have waited too long, and little enough for fewer instances.
        self._over_since_s: float | None = None
        self._under_since_s: float | None = None
        # The sum of busy instances, and the samples, since `_under_since_s`.
        self._busy, self._samples = 0.0, 0
        # The reason for which there are no more instances, while requests wait too long.
        self.held_because = ""

    def is_over(self, sample: ScaleSample) -> bool:
        """Return True if requests wait too long, so that the room for more instances has to be known."""
        return sample.wait_ms > self._target_ms

    def step(self, sample: ScaleSample, room: Room) -> ScaleStep | None:
        """Take a sample, and return the change that is due, if any."""
        least, most = self.bounds
        if not least <= sample.instances <= most:
            self.begin()
            return ScaleStep(min(max(sample.instances, least), most), f"{least}..{most} is allowed")
        if self.is_over(sample):
            self._under_since_s = None
            return self._up(sample, room)
        self._over_since_s, self.held_because = None, ""
        if sample.wait_ms > self._target_ms / 2 or sample.instances == least:
            self._under_since_s = None
            return None
        return self._down(sample)

    def begin(self) -> None:
        """Count samples anew, after a step or after the model was asleep."""
        self._over_since_s = self._under_since_s = None

    def _up(self, sample: ScaleSample, room: Room) -> ScaleStep | None:
        if self._over_since_s is None:
            self._over_since_s = sample.at_s
        if sample.at_s - self._over_since_s < UP_S:
            return None
        present, (_, most) = sample.instances, self.bounds
        if present == most:
            self.held_because = f"{most} are the most that are allowed"
        elif room.idle_processors < _IDLE_PROCESSOR:
            self.held_because = "no processor is idle"
        elif room.by_memory < 1:
            self.held_because = "there is no memory for another one"
        else:
            more = max(1.0, min(present, room.by_memory, room.idle_processors + _IDLE_PROCESSOR))
            self.begin()
            self.held_because = ""
            because = f"requests have waited for {sample.wait_ms:.1f} ms, the target is {self._target_ms:g} ms"
            return ScaleStep(min(most, present + int(more)), because)
        return None

    def _down(self, sample: ScaleSample) -> ScaleStep | None:
        if self._under_since_s is None:
            self._under_since_s, self._busy, self._samples = sample.at_s, 0.0, 0
        self._busy += sample.busy
        self._samples += 1
        if sample.at_s - self._under_since_s < DOWN_S:
            return None
        present, busy = sample.instances, self._busy / self._samples
        self.begin()
        if busy > _BUSY * (present - 1):
            return None
        return ScaleStep(present - 1, f"{busy:.1f} of {present} have been busy, and nothing waits")
