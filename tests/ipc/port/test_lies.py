"""The compiled port refuses whatever is refused in Python, with the same words, and leaves the same behind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ipc.port.both import DAMAGE, EDITS, both, damaged, edited, lies, packed
from tests.runtime.lane.built import counts, skip_without_compiled
from tests.runtime.scripted import FP32


@pytest.fixture(autouse=True)
def _with_the_port() -> None:
    skip_without_compiled()


@pytest.mark.parametrize("wants_wire", [False, True])
def test_an_honest_answer_is_read_by_the_compiled_port(wants_wire: bool) -> None:
    with both(wants_wire=wants_wire) as sides:
        sides.answered(packed(sides.usual(2)))
        before = counts()
        answers = sides.answered(packed(sides.usual(2)))[0]
        after = counts()
    wire = (FP32, (2,), "|u1", (8,), bytes(8))
    assert answers == [{"Y": wire if wants_wire else ("<f4", (2,), bytes(8))}] * 2
    assert {name: after[name] - before[name] for name in ("put", "take")} == {"put": 1, "take": 1}


def test_each_lie_about_one_value_ends_the_same_in_both() -> None:
    with both() as sides:
        answer = sides.usual(1)
        answer_paths = len(list(lies(answer)))
        sides.answered(packed(answer))
    assert answer_paths > 500
    for number in range(answer_paths):
        with both(wants_wire=number % 2 == 1) as sides:
            sides.answered(packed(sides.usual(1)))
            sides.answered(packed(list(lies(sides.usual(1)))[number]))


@given(st.integers(1, 3), EDITS, st.integers(0, 2), st.booleans())
def test_lies_about_several_values_end_the_same_in_both(
    rows: int, edits: list[tuple[int, Any]], honest: int, wants_wire: bool
) -> None:
    with both(wants_wire=wants_wire) as sides:
        for _ in range(honest):
            sides.answered(packed(sides.usual(rows)))
        sides.answered(packed(edited(sides.usual(rows), edits)))


@given(DAMAGE, st.integers(-4, 4))
def test_damaged_packets_end_the_same_in_both(damage: list[tuple[int, int]], longer: int) -> None:
    with both() as sides:
        sides.answered(packed(sides.usual(1)))
        sides.answered(damaged(packed(sides.usual(1)), damage, longer))


@pytest.mark.parametrize("size", [32 * 1024, 32 * 1024 + 1])
def test_packets_at_the_bound_end_the_same_in_both(size: int) -> None:
    with both() as sides:
        sides.answered(packed(sides.usual(1)))
        sides.usual(1)
        sides.answered(b"\xc0" * size)
