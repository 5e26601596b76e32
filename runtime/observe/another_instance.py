"""Decides whether a model would profit from another instance, and why, and writes the line for its configuration.

It is pure: a server or `moonpool bench` measures a model, gives figures, and gets a decision. The rules:

- Requests wait: the median is at least a batch of them. A batch that forms, or a burst, is no reason.
- As many processors are idle as another instance would use. Otherwise the instances would only take turns.
- Either each instance keeps about a core busy (its interpreter runs one thread at a time), or the instances execute
  all the time and use little of a processor: they wait for something else, such as I/O.
- No instance is on a GPU, whose load is not known here.

A decision stands until the figures are clearly below those that led to it, so that it does not come and go.
"""

from __future__ import annotations

import enum
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonpool.runtime.model.config.model import InstanceGroup

# The time for which the figures must hold before there is advice.
WINDOW_S = 10.0
# Each limit has two figures: a decision is made at the first, and stands down to the second.
_WAITING = 1.0, 0.5
_BUSY_CORES = 0.8, 0.6
_EXECUTING = 0.9, 0.7
# The idle part of the processors that another instance would use.
_SPARE = 0.75, 0.5


class Reason(enum.Enum):
    """The reason why another instance would help."""

    PROCESSOR = "processor"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """The load of one model version, over some time."""

    instances: int
    # The processors that each instance used, on average: 1.0 is one core.
    cores: float
    # The part of the time in which an instance executed, on average.
    executing: float
    # Requests that waited, in batches of the largest size.
    waiting: float
    # Processors that were idle.
    spare_cores: float
    is_on_gpu: bool = False


def decide(load: InstanceLoad, before: Reason | None = None) -> Reason | None:
    """Return the reason why another instance would help, or None. `before` is the last decision."""

    def reaches(figure: float, limits: tuple[float, float], *, stands: bool) -> bool:
        return figure >= limits[stands]

    stands = before is not None
    needed = max(1.0, load.cores)
    if load.is_on_gpu or not load.instances or not reaches(load.waiting, _WAITING, stands=stands):
        return None
    if not reaches(load.spare_cores / needed, _SPARE, stands=stands):
        return None
    if reaches(load.cores, _BUSY_CORES, stands=before is Reason.PROCESSOR):
        return Reason.PROCESSOR
    if reaches(load.executing, _EXECUTING, stands=before is Reason.WAITING):
        return Reason.WAITING
    return None


@dataclass(frozen=True, slots=True)
class LoadSample:
    """A model at one moment. Processor times are totals."""

    at_s: float
    # The processor time of each instance so far, by its process.
    cpu_s: Mapping[int, float]
    executing: int
    # Requests that wait, in batches of the largest size.
    waiting: float
    # Idle processors since the previous sample.
    spare_cores: float


class Watch:
    """Decides again with every sample of one model version. Not thread-safe."""

    def __init__(self) -> None:
        self.reason: Reason | None = None
        # The load in the last whole window.
        self.load: InstanceLoad | None = None
        self._samples: deque[LoadSample] = deque()

    @property
    def is_needed(self) -> bool:
        """True if a sample could change the decision although nothing waits now."""
        return self.reason is not None or any(sample.waiting for sample in self._samples)

    def clear(self) -> None:
        """Forget the samples and the decision."""
        self.reason, self.load = None, None
        self._samples.clear()

    def forget(self) -> None:
        """Forget the samples. The decision stands until a whole window contradicts it."""
        self._samples.clear()

    def add(self, sample: LoadSample) -> None:
        """Add a sample, and decide if the window is full of samples of the same processes."""
        samples = self._samples
        if samples and samples[-1].cpu_s.keys() != sample.cpu_s.keys():
            # An instance has a new process.
            self.forget()
        samples.append(sample)
        while len(samples) > 2 and sample.at_s - samples[1].at_s >= WINDOW_S:
            samples.popleft()
        if sample.at_s - samples[0].at_s >= WINDOW_S:
            self.load = _load(samples)
            self.reason = decide(self.load, self.reason)


def _load(samples: Sequence[LoadSample]) -> InstanceLoad:
    first, *later = samples
    last, count = later[-1], len(first.cpu_s)
    used_s = sum(last.cpu_s[pid] - first.cpu_s[pid] for pid in first.cpu_s)
    return InstanceLoad(
        instances=count,
        cores=used_s / (last.at_s - first.at_s) / max(count, 1),
        executing=statistics.mean(sample.executing for sample in later) / max(count, 1),
        # The median, as one burst has a high mean.
        waiting=statistics.median(sample.waiting for sample in later),
        spare_cores=statistics.mean(sample.spare_cores for sample in later),
    )


def advice(reason: Reason, load: InstanceLoad, groups: Sequence[InstanceGroup], batch: int = 1) -> dict[str, object]:
    """Return the reason, a sentence, and the line for the model's config.pbtxt. `batch` is the size of the largest
    batch.
    """
    is_one = load.instances == 1
    its = "its instance" if is_one else f"its {load.instances} instances"
    each = "" if is_one else " each"
    if reason is Reason.PROCESSOR:
        why = f"{its} {'keeps' if is_one else 'keep'} {load.cores:.1f} cores busy{each}"
    else:
        time = "spends its time" if is_one else "spend their time"
        why = f"{its} {time} waiting, as for I/O ({load.cores:.1f} cores busy{each})"
    waiting = f"{load.waiting * batch:.0f}"
    wait = "1 request waits" if waiting == "1" else f"{waiting} requests wait"
    return {
        "reason": reason.value,
        "text": f"another instance would help: {why}; {wait}, {load.spare_cores:.1f} cores are idle",
        "line": _line(groups),
    }


def _line(groups: Sequence[InstanceGroup]) -> str:
    """Write `instance_group` of config.pbtxt with one instance more in the first group."""
    written = []
    for index, group in enumerate(groups):
        kind = "" if group.kind in ("", "AUTO") else f" kind: KIND_{group.kind}"
        written.append(f"{{ count: {group.count + (index == 0)}{kind} }}")
    return f"instance_group [{', '.join(written)}]"


def largest_batch(max_batch_size: int, *, has_batching: bool) -> int:
    """Return the number of requests that one execution can take out of the queue."""
    return max(1, max_batch_size) if has_batching else 1
