"""The best place is measured again beside the start, with the same number of callers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from moonpool.benchmarks.tuning.search import Place
from moonpool.benchmarks.tuning.tuner import Confirmation, Measured, Tuner, confirm

START: Place = (0,)
BEST: Place = (1,)
# The rates of loads in turn, by place and callers. One that is not above 0 breaks the limits.
Rates = Mapping[tuple[Place, int], Sequence[float]]


def confirmed(rates: Rates, best: Measured, *seen: Measured) -> tuple[list[tuple[Place, int]], Confirmation]:
    """Confirm with these rates; return what was measured, and the result."""
    left = {key: list(values) for key, values in rates.items()}
    asked = []

    def measure(place: Place, callers: int) -> Measured:
        asked.append((place, callers))
        rate = left[place, callers].pop(0)
        return Measured(place, callers, rate, rate, 1.0, None if rate > 0 else "too slow")

    return asked, confirm(START, best, [*seen, best], measure)


@pytest.mark.promise(
    "Finding settings (`moonpool tune`)",
    "Settings are compared at the same number of callers, and what was not better every time is neither proposed nor "
    "written.",
)
def test_what_more_callers_brought_is_not_credited_to_the_settings() -> None:
    asked, found = confirmed(
        {(START, 32): [4590.0]}, Measured(BEST, 32, 4600.0, 4600.0), Measured(START, 8, 2310.0, 2310.0)
    )

    assert asked == [(START, 32)]
    assert found.pairs == ()
    assert found.as_good is not None
    assert found.as_good.callers == 32


def test_better_settings_are_measured_in_turns() -> None:
    rates: Rates = {(START, 32): [3000.0, 3100.0, 2900.0], (BEST, 32): [4600.0, 4500.0]}
    asked, found = confirmed(rates, Measured(BEST, 32, 4600.0, 4600.0), Measured(START, 8, 2310.0, 2310.0))

    assert asked == [(START, 32), (START, 32), (BEST, 32), (BEST, 32), (START, 32)]
    assert [(ours.rate, theirs.rate) for ours, theirs in found.pairs] == [(3100.0, 4600.0), (2900.0, 4500.0)]
    assert found.holds


def test_a_start_that_breaks_its_limits_with_more_callers_keeps_its_own() -> None:
    rates: Rates = {(START, 32): [-1.2], (START, 8): [2300.0, 2300.0], (BEST, 32): [4600.0, 4500.0]}
    asked, found = confirmed(rates, Measured(BEST, 32, 4600.0, 4600.0), Measured(START, 8, 2310.0, 2310.0))

    assert asked[1:] == [(START, 8), (BEST, 32), (BEST, 32), (START, 8)]
    assert found.holds


@pytest.mark.parametrize("again", [[-1.1, 4600.0], [2000.0, 4600.0]])
def test_what_was_not_better_every_time_does_not_hold(again: list[float]) -> None:
    rates: Rates = {(START, 32): [3000.0, 3000.0], (BEST, 32): again}
    _, found = confirmed(rates, Measured(BEST, 32, 4600.0, 4600.0), Measured(START, 32, 3000.0))

    assert not found.holds


def test_the_start_needs_no_comparison_with_itself() -> None:
    asked, found = confirmed({}, Measured(START, 8, 10.0, 10.0))

    assert (asked, found.pairs, found.as_good, found.holds) == ([], (), None, True)


class Scripted(Tuner):
    """A search without a server, whose loads have the scores of a script."""

    def __init__(self, scores: Sequence[float]) -> None:
        self.left = list(scores)

    def _load_once(self, place: Place, callers: int) -> Measured:
        return Measured(place, callers, self.left.pop(0))


@pytest.mark.parametrize(
    ("scores", "count"), [([-1.03, 0.9], 2), ([-1.05, -1.04], 2), ([-1.2, 0.9], 1), ([0.9, 0.8], 1)]
)
def test_a_load_that_just_misses_its_limits_is_tried_once_more(scores: list[float], count: int) -> None:
    tuner = Scripted(scores)

    found = tuner._load(START, 8)

    assert found.score == scores[count - 1]
    assert tuner.left == scores[count:]
