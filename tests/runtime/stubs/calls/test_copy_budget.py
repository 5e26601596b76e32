"""Copies of what a stub stored have a bound, and one that is larger is alone."""

from __future__ import annotations

import pytest

from moonpool.runtime.errors import ModelUnavailable
from moonpool.runtime.stubs.calls.dispatcher import CopyBudget

pytestmark = pytest.mark.promise("Containment", "The runtime reads the beginning of …")


def test_copies_are_counted_until_what_was_asked_is_answered() -> None:
    budget = CopyBudget()
    budget.acquire(1, 60, 100)
    budget.acquire(2, 40, 100)
    with pytest.raises(ModelUnavailable, match="take 100 bytes already; with this one"):
        budget.acquire(3, 1, 100)
    assert budget.taken_bytes == 100

    budget.release(1)
    budget.release(1)

    budget.acquire(3, 60, 100)
    assert budget.taken_bytes == 100


def test_one_that_is_larger_than_all_may_be_is_taken_alone() -> None:
    budget = CopyBudget()
    budget.acquire(1, 1000, 100)
    with pytest.raises(ModelUnavailable):
        budget.acquire(2, 1, 100)
    budget.release(1)
    budget.acquire(2, 1, 100)
    with pytest.raises(ModelUnavailable):
        budget.acquire(1, 1000, 100)


def test_bytes_found_in_a_copy_count_with_it() -> None:
    budget = CopyBudget()
    budget.acquire(1, 50, 100)
    budget.acquire(1, 80, 100)
    assert budget.taken_bytes == 130
    budget.release(1)
    assert budget.taken_bytes == 0
