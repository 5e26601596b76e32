"""Decides which models stay in memory. Pure: no clock, no lock, no process.

`Residency` is the policy's surface. It asks `decide` before a model gets processes, and again whenever models have
grown. `decide` compares what the models take with the budget. If that is too much, it names one that may go, in the
order of `Sieve`.

A model may go if no request is inside, it is not pinned, and it has stayed for as long as its start took, or for the
least stay of the budget. So at most half of a model's time goes into starts, and a machine that is asked for too many
models at once serves fewer of them, in place of starting and ending them all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from moonpool.runtime.arguments import Arguments
from moonpool.runtime.errors import ModelUnavailable

K = TypeVar("K")
_OF_RESIDENT = Arguments(lambda name, what: ValueError(f"Resident({name}=) {what}"))


@dataclass(frozen=True, slots=True)
class Resident:
    """Load models on demand, and keep no more of them in memory than this. None is no limit.

    `memory` and `gpu_memory` are measured sizes in bytes, those of all models together. `least_stay_s` is the least
    time for which a model stays. If no room can be made for a model within `patience_s`, its requests fail. Raises
    ValueError for a limit that is not above 0.
    """

    models: int | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    least_stay_s: float = 0.1
    patience_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("models", "memory", "gpu_memory"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                _OF_RESIDENT.refuse(name, "a whole number from 1 on, or None", value)
        for name in ("least_stay_s", "patience_s"):
            _OF_RESIDENT.seconds(name, getattr(self, name))

    @property
    def measures_memory(self) -> bool:
        """True if a limit of memory is set."""
        return self.memory is not None or self.gpu_memory is not None


NO_LIMITS = Resident()


class Need(NamedTuple):
    """The memory that a model takes, as far as it was measured."""

    memory_bytes: int = 0
    gpu_bytes: int = 0


class Candidate(NamedTuple):
    """A model with processes, as it is now."""

    need: Need
    uses: int
    """A number that grows with each request."""
    may_go: bool
    """False if it must stay now, for whatever reason."""
    stays_because: str = ""
    """The reason, if it must stay."""
    is_dormant: bool = False
    """True if it sleeps with its processes."""


class Act(Enum):
    """A step that the policy allows now."""

    ADMIT = "admit"
    EVICT = "evict"
    WAIT = "wait"


class Verdict(NamedTuple, Generic[K]):
    """A decision: `victim` goes first if the act is EVICT, and `reason` says which limit is short.

    `may_stay`: it is enough if the victim frees memory of GPUs, and its processes may stay.
    """

    act: Act
    victim: K | None = None
    reason: str = ""
    may_stay: bool = False


class Sieve(Generic[K]):
    """The order in which models go: SIEVE (Zhang and others, NSDI 2024).

    A hand goes from the model that came first to the one that came last, and around again. It takes the first model
    that was not used since the hand passed it. Unlike an order by last use, a model that is asked for once goes before
    those that are asked for all the time.
    """

    def __init__(self) -> None:
        # In the order in which they came.
        self._order: list[K] = []
        # The uses that each one had when the hand passed it, or when it came.
        self._seen: dict[K, int] = {}
        self._hand = 0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: K) -> bool:
        return key in self._seen

    def add(self, key: K, uses: int = 0) -> None:
        """Take in a model. Those uses do not count for it."""
        if key not in self._seen:
            self._order.append(key)
        self._seen[key] = uses

    def remove(self, key: K) -> None:
        """Forget a model; one that is not there is no error."""
        if key not in self._seen:
            return
        place = self._order.index(key)
        del self._order[place], self._seen[key]
        if place < self._hand:
            self._hand -= 1

    def choose(self, uses: Callable[[K], int], may_go: Callable[[K], bool]) -> K | None:
        """Return the model that is to go, and move the hand there; None if none may go. It stays until it is removed.

        `uses` gives the present number of uses. The mark of a model that must stay is kept.
        """
        before = self._hand
        # In the first round all marks may be taken away, so the second finds any model that may go.
        for _ in range(2 * len(self._order)):
            self._hand %= len(self._order)
            key = self._order[self._hand]
            self._hand += 1
            if not may_go(key):
                continue
            now = uses(key)
            if now == self._seen[key]:
                self._hand -= 1
                return key
            self._seen[key] = now
        self._hand = before
        return None


def shortage(limits: Resident, needs: Sequence[Need]) -> str:
    """Return which limit models with these needs are over together, as a text; empty if they fit."""
    if limits.models is not None and len(needs) > limits.models:
        plural = "" if limits.models == 1 else "s"
        return f"at most {limits.models} model{plural} may be in memory at the same time"
    for name, limit, total in (
        ("memory", limits.memory, sum(each.memory_bytes for each in needs)),
        ("GPU memory", limits.gpu_memory, sum(each.gpu_bytes for each in needs)),
    ):
        if limit is not None and total > limit:
            return f"models may take {limit} bytes of {name} together, and would take {total}"
    return ""


def decide(
    limits: Resident, sieve: Sieve[K], present: Mapping[K, Candidate], coming: Need | None, *, is_member: bool = False
) -> Verdict[K]:
    """Decide if a model with this need may come; with None, if those that are present may all stay.

    If only memory of GPUs is short, models that are awake go first, as a dormant one has freed what it can. Otherwise
    dormant ones go first: nobody has asked them lately. A model larger than the limits is admitted if no other is
    present. `is_member`: a request that runs in a present model waits for this one, so the two count as one, and it is
    admitted if no other can leave.
    """
    needs = [each.need for each in present.values()]
    reason = shortage(limits, needs if coming is None else [*needs, coming])
    if not reason or not needs or (coming is None and len(needs) == 1):
        return Verdict(Act.ADMIT)
    only_gpus = not shortage(replace(limits, gpu_memory=None), needs if coming is None else [*needs, coming])
    kinds = {each.is_dormant for each in present.values()}
    for is_dormant in (False, True) if only_gpus else (True, False):
        victim = _victim(sieve, present, is_dormant) if is_dormant in kinds else None
        if victim is not None:
            return Verdict(Act.EVICT, victim, reason, only_gpus and not is_dormant)
    if is_member and coming is not None:
        return Verdict(Act.ADMIT, None, f"{reason}; it is in use by a model that is in memory")
    return Verdict(Act.WAIT, None, f"{reason}, and {_why_all_stay(present.values())}")


def _victim(sieve: Sieve[K], present: Mapping[K, Candidate], is_dormant: bool) -> K | None:
    """Choose among the models that are dormant, or among the others."""

    def may_go(key: K) -> bool:
        candidate = present.get(key)
        return candidate is not None and candidate.may_go and candidate.is_dormant is is_dormant

    return sieve.choose(lambda key: present[key].uses, may_go)


def _why_all_stay(present: Iterable[Candidate]) -> str:
    counts: dict[str, int] = {}
    for each in present:
        counts[each.stays_because] = counts.get(each.stays_because, 0) + 1
    return ", ".join(f"{count} {reason or 'may go'}" for reason, count in counts.items())


class NoRoom(ModelUnavailable):
    """No model may leave memory for the one that was asked for. Try again after `retry_after_s`."""

    retry_after_s = 1.0
