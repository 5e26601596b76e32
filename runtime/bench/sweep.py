"""Loads one after the other, windows in turns, until the figures have settled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonpool.runtime.bench.stability import COUNT, is_stable
from moonpool.runtime.bench.window import merged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moonpool.runtime.bench.load import Load
    from moonpool.runtime.bench.subject import Subject
    from moonpool.runtime.bench.window import Window


@dataclass(frozen=True, slots=True)
class Point:
    """A subject under one load: all windows in order, and whether the last three agree."""

    load: Load
    windows: Sequence[Window]
    stable: bool

    @property
    def whole(self) -> Window:
        """The last three windows together: what a table shows."""
        return merged(self.windows[-COUNT:])


def sweep(
    subjects: Sequence[Subject],
    loads: Sequence[Load],
    *,
    seconds: float,
    warm_up_s: float,
    most_windows: int,
    stable_percent: float,
    tell: Callable[[Load, int, Sequence[Window]], None],
) -> Iterator[list[Point]]:
    """For each load a point of each subject.

    After a warm-up that does not count, the subjects have a window each in turns, the other one first each time, until
    all of them are stable or have had `most_windows`. `tell` is called before each round with its number, which is 0 for the
    warm-up, and the windows of the round before.
    """
    for load in loads:
        if warm_up_s:
            tell(load, 0, ())
            for subject in subjects:
                subject.window(load, warm_up_s)
        windows: list[list[Window]] = [[] for _ in subjects]
        for turn in range(most_windows):
            tell(load, turn + 1, [each[-1] for each in windows if each])
            shift = turn % len(subjects)
            for index in [*range(shift, len(subjects)), *range(shift)]:
                windows[index].append(subjects[index].window(load, seconds))
            if all(is_stable(each, stable_percent) for each in windows):
                break
        yield [Point(load, each, is_stable(each, stable_percent)) for each in windows]
