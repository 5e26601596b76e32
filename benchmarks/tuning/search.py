"""The search for the best of many settings: a hill climb with restarts.

It is pure. A *place* has a number for each setting, its index among the values of that setting. `climb` asks a given
function for the score of a place, and looks at each place once.

Values of a setting are in order, so that neighbours are alike. From a place, the climb walks along one setting after
the other, in random order, as long as the score grows, until no neighbour is better. Settings depend on each other:
more instances may help only with larger batches. So the climb begins again at other places: in turns at the best one
with two settings changed, and at any place. It ends after `restarts` in a row that found nothing better, after `most`
places, or when it has seen all.

Scores are measured, and noise would lead anywhere. A place is better than another one only if its score is greater by
the share `margin`. The start, and then the earlier of two places, wins a tie, so that nothing is changed that does not
help.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

Place = tuple[int, ...]
# Random places that are tried in search of one that is new, before all are looked through.
_THROWS = 50


def is_better(score: float, other: float, margin: float = 0.0) -> bool:
    """Return True if a score is greater than another one by a share of the latter; -inf is a failure."""
    if math.isinf(score) or math.isinf(other):
        return score > other
    return score > other + margin * abs(other)


def climb(
    sizes: Sequence[int],
    start: Place,
    measure: Callable[[Place], float],
    *,
    seed: int = 0,
    most: int | None = None,
    restarts: int = 0,
    margin: float = 0.0,
) -> Place:
    """Return the best place that was found. `sizes` has the number of values of each setting.

    `measure` gives the score of a place, -inf for one that does not work. What it raises ends the climb. A climb with
    the same arguments and scores visits the same places.
    """
    search = _Climb(sizes, measure, random.Random(seed), most, margin)
    search.best = start
    try:
        search.ascend(start)
        search.restart(restarts)
    except _EnoughError:
        pass
    return search.best


class _EnoughError(Exception):
    """Ends a climb that has seen as many places as it may."""


class _Climb:
    def __init__(
        self,
        sizes: Sequence[int],
        measure: Callable[[Place], float],
        chance: random.Random,
        most: int | None,
        margin: float,
    ) -> None:
        self.best: Place = ()
        self._sizes = sizes
        self._measure = measure
        self._chance = chance
        self._most = math.prod(sizes) if most is None else most
        self._margin = margin
        self._scores: dict[Place, float] = {}

    def ascend(self, place: Place) -> None:
        """Go from a place to better ones until no neighbour is better."""
        self._score(place)
        has_moved = True
        while has_moved:
            has_moved = False
            for axis in self._shuffled(range(len(self._sizes))):
                for step in self._shuffled((1, -1)):
                    while (other := self._beside(place, axis, step)) and self._is_better(other, place):
                        place, has_moved = other, True

    def restart(self, patience: int) -> None:
        """Begin again until nothing better was found so many times in a row."""
        failures = count = 0
        while failures < patience:
            begin = self._new_place(is_near=count % 2 == 0)
            if begin is None:
                return
            before = self.best
            self.ascend(begin)
            failures = 0 if self.best != before else failures + 1
            count += 1

    def _score(self, place: Place) -> float:
        if place not in self._scores:
            if len(self._scores) >= self._most:
                raise _EnoughError
            self._scores[place] = self._measure(place)
            if self._is_better(place, self.best):
                self.best = place
        return self._scores[place]

    def _is_better(self, place: Place, other: Place) -> bool:
        return is_better(self._score(place), self._score(other), self._margin)

    def _beside(self, place: Place, axis: int, step: int) -> Place | None:
        index = place[axis] + step
        if not 0 <= index < self._sizes[axis]:
            return None
        return (*place[:axis], index, *place[axis + 1 :])

    def _shuffled(self, values: Sequence[int]) -> list[int]:
        return self._chance.sample(list(values), len(values))

    def _new_place(self, *, is_near: bool) -> Place | None:
        """Return a place that was not seen: the best one with two settings changed, or any. None if all were seen."""
        if len(self._scores) >= math.prod(self._sizes):
            return None
        for _ in range(_THROWS):
            place = self._near_the_best() if is_near else self._anywhere()
            if place not in self._scores:
                return place
        return next(place for place in self._all() if place not in self._scores)

    def _near_the_best(self) -> Place:
        place = list(self.best)
        for axis in self._shuffled(range(len(place)))[:2]:
            place[axis] = self._chance.randrange(self._sizes[axis])
        return tuple(place)

    def _anywhere(self) -> Place:
        return tuple(self._chance.randrange(size) for size in self._sizes)

    def _all(self) -> Iterator[Place]:
        number = math.prod(self._sizes)
        for index in range(number):
            place = []
            for size in self._sizes:
                index, rest = divmod(index, size)
                place.append(rest)
            yield tuple(place)


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the numbers of the points (rate, latency) that no other one beats in both, by growing latency.

    Points with a NaN are left out. Of equal points, the first is in the front.
    """
    known = [i for i, (rate, latency) in enumerate(points) if rate == rate and latency == latency]
    known.sort(key=lambda i: (points[i][1], -points[i][0], i))
    found: list[int] = []
    for number in known:
        if not found or points[number][0] > points[found[-1]][0]:
            found.append(number)
    return found
