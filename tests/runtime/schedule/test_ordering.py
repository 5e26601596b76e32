"""Tests of ordering: results may come in any order, and leave in one."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.runtime.schedule.ordering import Departures, Ordering


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


def test_outcomes_that_many_threads_hand_out_at_once_leave_in_order() -> None:
    departures: Departures[list[int], int] = Departures(in_order=True)
    lock = threading.Lock()
    requests = [[number] for number in range(2000)]
    departures.started(requests)
    left: list[int] = []

    def finish(mine: list[list[int]]) -> None:
        for request in mine:
            with lock:
                pairs = departures.done([request], [request[0]])
            departures.leave(pairs, lambda _, outcome: left.append(outcome))

    threads = [threading.Thread(target=finish, args=(requests[first::4],)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert left == list(range(2000))


def test_an_outcome_that_comes_during_another_one_follows_it() -> None:
    departures: Departures[list[int], int] = Departures(in_order=True)
    first, second = [1], [2]
    departures.started([first, second])
    left: list[int] = []

    def resolve(_: list[int], outcome: int) -> None:
        if outcome == 1:
            departures.leave(departures.done([second], [2]), resolve)
        left.append(outcome)

    departures.leave(departures.done([first], [1]), resolve)

    assert left == [1, 2]


def test_without_an_order_outcomes_leave_as_they_come() -> None:
    departures: Departures[list[int], int] = Departures(in_order=False)
    requests = [[1], [2]]
    departures.started(requests)
    left: list[int] = []

    for request in reversed(requests):
        pairs = departures.done([request], request)
        departures.leave(pairs, lambda _, outcome: left.append(outcome))

    assert left == [2, 1]
