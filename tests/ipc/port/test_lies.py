"""Tests that the quick forms refuse whatever Python's forms refuse, with the same words, and leave the same behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.lane.built import counts, skip_without_forms
from tests.runtime.lane.twins import ODD, changed, packed, paths, twins
from tests.runtime.scripted import FP32


@pytest.fixture(autouse=True)
def _with_forms() -> None:
    skip_without_forms()


@pytest.mark.parametrize("wants_wire", [False, True])
def test_an_honest_answer_is_read_the_quick_way(wants_wire: bool) -> None:
    with twins(wants_wire=wants_wire) as both:
        both.answered(packed(both.usual(2)))
        before = counts()
        answers = both.answered(packed(both.usual(2)))[0]
        after = counts()
    wire = (FP32, (2,), "|u1", (8,), bytes(8))
    assert answers == [{"Y": wire if wants_wire else ("<f4", (2,), bytes(8))}] * 2
    assert {name: after[name] - before[name] for name in ("put", "take")} == {
        "put": 1,
        "take": 1,
    }


def lies(fields: list[Any]) -> Iterator[list[Any]]:
    """Yield the fields with one value replaced, and with one more or less."""
    for path in paths(fields):
        for value in ODD:
            yield changed(fields, path, value)
    for i in range(len(fields)):
        yield [*fields[:i], *fields[i + 1 :]]
        yield [*fields[:i], None, *fields[i:]]


def test_each_lie_about_one_value_ends_the_same_in_both_forms() -> None:
    with twins() as both:
        answer = both.usual(1)
        answer_paths = len(list(lies(answer)))
        both.answered(packed(answer))
    assert answer_paths > 500
    for number in range(answer_paths):
        with twins(wants_wire=number % 2 == 1) as both:
            both.answered(packed(both.usual(1)))
            both.answered(packed(list(lies(both.usual(1)))[number]))


edits = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.sampled_from(ODD) | st.integers(0, 2**64 - 1)), max_size=4
)


@given(st.integers(1, 3), edits, st.integers(0, 2), st.booleans())
def test_lies_about_several_values_end_the_same_in_both_forms(
    rows: int, edits: list[tuple[int, Any]], honest: int, wants_wire: bool
) -> None:
    with twins(wants_wire=wants_wire) as both:
        for _ in range(honest):
            both.answered(packed(both.usual(rows)))
        fields = both.usual(rows)
        for number, value in edits:
            places = paths(fields)
            fields = changed(fields, places[number % len(places)], value)
        both.answered(packed(fields))


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3), st.integers(-4, 4)
)
def test_damaged_packets_end_the_same_in_both_forms(
    damage: list[tuple[int, int]], longer: int
) -> None:
    with twins() as both:
        both.answered(packed(both.usual(1)))
        packet = bytearray(packed(both.usual(1)))
        for at, byte in damage:
            packet[at % len(packet)] = byte
        both.answered(bytes(packet[:longer] if longer < 0 else packet + b"\xc0" * longer))


@pytest.mark.parametrize("size", [32 * 1024, 32 * 1024 + 1])
def test_packets_at_the_bound_end_the_same_in_both_forms(size: int) -> None:
    with twins() as both:
        both.answered(packed(both.usual(1)))
        both.usual(1)
        both.answered(b"\xc0" * size)
