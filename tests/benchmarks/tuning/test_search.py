"""The search for the best place, on surfaces whose best place is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.benchmarks.tuning.search import Place, climb, front, is_better

sizes_of_settings = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def places(draw: st.DrawFn, sizes: tuple[int, ...]) -> Place:
    return tuple(draw(st.integers(0, size - 1)) for size in sizes)


class Seen:
    """A surface that notes the places that are looked at."""

    def __init__(self, surface: Callable[[Place], float]) -> None:
        self.places: list[Place] = []
        self._surface = surface

    def __call__(self, place: Place) -> float:
        self.places.append(place)
        return self._surface(place)


def peak(top: Place, weights: tuple[float, ...] = ()) -> Callable[[Place], float]:
    """A surface that falls on all sides of one place."""

    def score(place: Place) -> float:
        steps = zip(place, top, weights or (1.0,) * len(top), strict=True)
        return 1000.0 - sum(weight * abs(at - best) for at, best, weight in steps)

    return score


@given(st.data())
def test_a_climb_reaches_the_top_of_a_surface_with_one_peak(data: st.DataObject) -> None:
    sizes = data.draw(sizes_of_settings)
    top, start = data.draw(places(sizes)), data.draw(places(sizes))
    weights = tuple(data.draw(st.floats(0.1, 9)) for _ in sizes)

    found = climb(sizes, start, peak(top, weights), seed=data.draw(st.integers(0, 99)))

    assert found == top


@given(st.data())
def test_with_enough_restarts_it_finds_the_best_of_any_surface(data: st.DataObject) -> None:
    sizes = data.draw(sizes_of_settings)
    chance = random.Random(data.draw(st.integers(0, 999)))
    scores: dict[Place, float] = {}
    seen = Seen(lambda place: scores.setdefault(place, chance.random()))

    found = climb(sizes, data.draw(places(sizes)), seen, restarts=math.prod(sizes))

    assert len(seen.places) == math.prod(sizes)
    assert scores[found] == max(scores.values())


@given(st.data())
def test_no_place_is_seen_twice_and_no_more_than_allowed(data: st.DataObject) -> None:
    sizes = data.draw(sizes_of_settings)
    most = data.draw(st.integers(1, 30))
    start = data.draw(places(sizes))
    seen = Seen(lambda place: math.sin(sum(place) * 7.3))

    found = climb(sizes, start, seen, most=most, restarts=50, seed=3)

    assert seen.places[0] == start
    assert len(seen.places) == len(set(seen.places)) <= most
    assert found in seen.places
    assert math.sin(sum(found) * 7.3) == max(math.sin(sum(each) * 7.3) for each in seen.places)


@given(st.data())
def test_equal_arguments_take_the_same_way(data: st.DataObject) -> None:
    sizes, seed = data.draw(sizes_of_settings), data.draw(st.integers(0, 99))
    start = data.draw(places(sizes))
    ways = []
    for _ in range(2):
        seen = Seen(lambda place: math.sin(sum(place) * 7.3))
        climb(sizes, start, seen, seed=seed, restarts=5)
        ways.append(seen.places)

    assert ways[0] == ways[1]


@given(st.data())
def test_places_that_fail_are_passed_and_never_the_result(data: st.DataObject) -> None:
    sizes = data.draw(sizes_of_settings)
    start, top = data.draw(places(sizes)), data.draw(places(sizes))
    broken = data.draw(st.sets(places(sizes)).map(lambda found: found - {start, top}))
    surface = peak(top)

    found = climb(
        sizes, start, lambda place: -math.inf if place in broken else surface(place), restarts=math.prod(sizes)
    )

    assert found == top


def test_a_start_that_fails_is_left() -> None:
    assert climb((5,), (2,), lambda place: -math.inf if place == (2,) else 1.0) != (2,)


@given(st.data())
def test_differences_within_the_margin_change_nothing(data: st.DataObject) -> None:
    sizes = data.draw(sizes_of_settings)
    start = data.draw(places(sizes))
    chance = random.Random(data.draw(st.integers(0, 999)))

    found = climb(sizes, start, lambda _: 100 + chance.random() * 2.9, restarts=9, margin=0.03)

    assert found == start


def test_it_leaves_a_ridge_that_no_single_setting_leads_over() -> None:
    # Both settings have to grow together: each alone makes it worse.
    def ridge(place: Place) -> float:
        return 10.0 + place[0] - 5 * abs(place[0] - place[1])

    assert climb((6, 6), (0, 0), ridge) == (0, 0)
    assert climb((6, 6), (0, 0), ridge, restarts=12, seed=1) == (5, 5)


def test_what_a_measurement_raises_ends_the_climb() -> None:
    def measure(place: Place) -> float:
        if place != (0,):
            raise TimeoutError
        return 1.0

    with pytest.raises(TimeoutError):
        climb((4,), (0,), measure)


@pytest.mark.parametrize(
    ("score", "other", "is_it"),
    [
        (104, 100, True),
        (102, 100, False),
        (-1.0, -1.1, True),
        (-1.09, -1.1, False),
        (1, -math.inf, True),
        (-math.inf, -math.inf, False),
        (-math.inf, -5, False),
        (0.0, -1e-9, True),
    ],
)
def test_a_score_is_better_by_a_share(score: float, other: float, *, is_it: bool) -> None:
    assert is_better(score, other, 0.03) is is_it


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=30))
def test_the_front_has_all_that_nothing_beats(points: list[tuple[float, float]]) -> None:
    found = front(points)
    chosen = [points[number] for number in found]

    assert chosen == sorted(chosen, key=lambda point: point[1])
    for rate, latency in points:
        # Everything is in the front, or something in the front is as good in both.
        assert any(other >= rate and at <= latency for other, at in chosen)
    for number in found:
        rate, latency = points[number]
        assert not any(other >= rate and at <= latency and (other, at) != (rate, latency) for other, at in points)


def test_the_front_leaves_out_what_is_not_known() -> None:
    assert front([(math.nan, 1), (5, math.nan), (5, 2)]) == [2]
