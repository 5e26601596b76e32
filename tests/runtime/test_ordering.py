"""Results may come in any order; they leave in one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.runtime.ordering import Ordering


@given(order=st.permutations(range(12)))
def test_results_leave_in_the_order_of_their_numbers_as_soon_as_they_can(order: list[int]) -> None:
    ordering: Ordering[str] = Ordering()
    for number in range(12):
        ordering.opened(number * 3)
    left: list[str] = []
    for step, number in enumerate(order, start=1):
        left += ordering.done(number * 3, f"result {number}")
        first_missing = min(set(range(12)) - set(order[:step]), default=12)
        assert left == [f"result {each}" for each in range(first_missing)]
        assert len(ordering) == 12 - first_missing


def test_numbers_that_are_not_open_are_refused() -> None:
    ordering: Ordering[str] = Ordering()
    ordering.opened(3)
    ordering.opened(5)
    with pytest.raises(ValueError, match="number 4 is not open"):
        ordering.done(4, "never opened")
    with pytest.raises(ValueError, match="number 5 comes after 5"):
        ordering.opened(5)
    assert ordering.done(5, "five") == []
    with pytest.raises(ValueError, match="number 5 is not open"):
        ordering.done(5, "again")
    assert ordering.done(3, "three") == ["three", "five"]
