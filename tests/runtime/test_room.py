"""Copies of what a stub stored have a bound, and one that is larger is alone."""

from __future__ import annotations

import pytest

from moonpool.runtime.errors import ModelUnavailable
from moonpool.runtime.room import Room


def test_copies_are_counted_until_what_was_asked_is_answered() -> None:
    room = Room()
    room.take(1, 60, 100)
    room.take(2, 40, 100)
    with pytest.raises(ModelUnavailable, match="take 100 bytes already; with this one"):
        room.take(3, 1, 100)
    assert room.taken_bytes == 100

    room.give_back(1)
    room.give_back(1)

    room.take(3, 60, 100)
    assert room.taken_bytes == 100


def test_one_that_is_larger_than_all_may_be_is_taken_alone() -> None:
    room = Room()
    room.take(1, 1000, 100)
    with pytest.raises(ModelUnavailable):
        room.take(2, 1, 100)
    room.give_back(1)
    room.take(2, 1, 100)
    with pytest.raises(ModelUnavailable):
        room.take(1, 1000, 100)


def test_what_is_found_in_a_copy_counts_with_it() -> None:
    room = Room()
    room.take(1, 50, 100)
    room.take(1, 80, 100)
    assert room.taken_bytes == 130
    room.give_back(1)
    assert room.taken_bytes == 0
