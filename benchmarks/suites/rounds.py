"""Measure A and B in turns: a disturbance hits both, and their ratio stays."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Key = TypeVar("Key")


class Series(NamedTuple):
    """The measurements of one case: the values of each round."""

    rounds: list[list[float]]

    @property
    def values(self) -> list[float]:
        """Every value of every round."""
        return [value for values in self.rounds for value in values]

    def over(self, other: Series) -> list[float]:
        """The ratio of the medians, a round at a time."""
        return [
            statistics.median(mine) / statistics.median(theirs)
            for mine, theirs in zip(self.rounds, other.rounds, strict=True)
        ]

    def minus(self, other: Series) -> list[float]:
        """The difference of the medians, a round at a time."""
        return [
            statistics.median(mine) - statistics.median(theirs)
            for mine, theirs in zip(self.rounds, other.rounds, strict=True)
        ]


def time_us(call: Callable[[], object], count: int) -> list[float]:
    """Time each of `count` calls."""
    clock = time.perf_counter_ns
    times = []
    for _ in range(count):
        before = clock()
        call()
        times.append((clock() - before) / 1000)
    return times


async def time_us_async(call: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Time each of `count` calls in an event loop, one after the other."""
    clock = time.perf_counter_ns
    times = []
    for _ in range(count):
        before = clock()
        await call()
        times.append((clock() - before) / 1000)
    return times


def in_turns(
    cases: Mapping[Key, Callable[[], Sequence[float]]], rounds: int, most_s: float = math.inf
) -> dict[Key, Series]:
    """Measure each case once a round; the first one changes from round to round.

    A first round is thrown away, so that memory is mapped and caches are warm. After `most_s` no round but the second
    begins.
    """
    names = list(cases)
    found = {name: Series([]) for name in names}
    ends = time.monotonic() + most_s
    for turn in range(-1, rounds):
        if turn > 0 and time.monotonic() > ends:
            break
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            values = list(cases[name]())
            if turn >= 0:
                found[name].rounds.append(values)
    return found


def calls_in_turns(
    cases: Mapping[str, Callable[[], object]], rounds: int, calls: int, most_s: float = math.inf
) -> dict[str, Series]:
    """Time single calls in turns as `in_turns` does, `calls` of each case a round; in microseconds."""

    def timed(call: Callable[[], object]) -> Callable[[], Sequence[float]]:
        return lambda: time_us(call, calls)

    return in_turns({name: timed(call) for name, call in cases.items()}, rounds, most_s)
