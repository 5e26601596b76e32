"""The tables are whole, and a machine never leaves its table."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.runtime.model.states import (
    BACKEND,
    INSTANCE,
    MODEL,
    InstanceState,
    InvalidMove,
    Machine,
    ModelState,
    Step,
    Table,
    draw,
)

pytestmark = pytest.mark.promise("Lifecycle", "A transition that is not in the state tables raises an error.")

if TYPE_CHECKING:
    from collections.abc import Iterable

TABLES: dict[str, Table[StrEnum]] = {"backend": BACKEND, "model": MODEL, "instance": INSTANCE}  # type: ignore[dict-item]
READY = InstanceState.READY

each_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


def reachable(table: Table[StrEnum], start: StrEnum) -> set[StrEnum]:
    seen, new = set[StrEnum](), {start}
    while new:
        seen |= new
        new = {to for state in new for to in table[state]} - seen
    return seen


@each_table
def test_every_state_has_its_row_and_can_be_reached(table: Table[StrEnum]) -> None:
    first = next(iter(table))
    assert set(table) == set(type(first))
    assert reachable(table, first) == set(table)
    assert all(state not in followers for state, followers in table.items())


@each_table
def test_from_everywhere_there_is_a_way_to_rest(table: Table[StrEnum]) -> None:
    rests: set[StrEnum] = {state for state, followers in table.items() if not followers}
    rests = rests or {ModelState.UNAVAILABLE}
    assert all(reachable(table, state) & rests for state in table)


@each_table
def test_the_drawing_says_what_the_table_says(table: Table[StrEnum]) -> None:
    lines = draw(table).splitlines()
    assert lines[0] == "stateDiagram-v2"
    arrows = [re.fullmatch(r"    (\S+) --> (\S+?)(?:: (.+))?", line) for line in lines[1:]]
    drawn = [arrow.groups() for arrow in arrows if arrow]
    assert len(drawn) == len(lines) - 1
    expected: list[tuple[str, str, str | None]] = [("[*]", next(iter(table)).value, None)]
    for state, followers in table.items():
        expected += [(state.value, to.value, event) for to, event in followers.items()]
        expected += [] if followers else [(state.value, "[*]", None)]
    assert drawn == expected


def walk(*states: InstanceState) -> Machine[InstanceState]:
    machine = Machine("add_sub_0", INSTANCE, 10.0)
    for step, state in enumerate(states, start=1):
        machine.move(state, f"step {step}", 10.0 + step)
    return machine


def test_a_machine_says_where_it_is_and_why() -> None:
    machine = walk(InstanceState.STARTING, READY)
    assert (machine.state, machine.because, machine.ended) == (READY, "step 2", False)
    assert repr(machine) == "<add_sub_0: READY because step 2>"
    steps = "CREATED at +0.000 s (created), STARTING at +1.000 s (step 1), READY at +2.000 s (step 2)"
    assert machine.tell() == steps


def test_a_forbidden_move_is_refused_with_the_whole_story_and_changes_nothing() -> None:
    machine = walk(InstanceState.STARTING, READY)
    told: list[Step[InstanceState]] = []
    machine.watch(told.append)
    with pytest.raises(InvalidMove) as caught:
        machine.move(InstanceState.STOPPED, "in a hurry", 13.0)
    assert str(caught.value) == (
        "add_sub_0 cannot go from READY to STOPPED (in a hurry); so far: CREATED at +0.000 s "
        "(created), STARTING at +1.000 s (step 1), READY at +2.000 s (step 2)"
    )
    assert (machine.state, machine.tell().count(" at "), told) == (READY, 3, [])


def test_the_end_is_the_end() -> None:
    machine = walk(InstanceState.STOPPED)
    assert machine.ended
    assert not any(machine.may(state) for state in InstanceState)


@given(st.lists(st.sampled_from(InstanceState), max_size=40))
def test_a_machine_goes_exactly_where_its_table_allows(wishes: Iterable[InstanceState]) -> None:
    machine = Machine("any", INSTANCE, 0.0)
    for wish in wishes:
        before = machine.state
        allowed = wish in INSTANCE[before]
        assert machine.may(wish) == allowed
        if allowed:
            machine.move(wish, "wish", 0.0)
        else:
            with pytest.raises(InvalidMove):
                machine.move(wish, "wish", 0.0)
        assert machine.state is (wish if allowed else before)


def test_the_story_keeps_only_the_latest_steps() -> None:
    machine = Machine("model", MODEL, 0.0)
    for round_ in range(100):
        machine.move(ModelState.LOADING, f"load {round_}", float(round_))
        machine.move(ModelState.UNAVAILABLE, "failed", float(round_))
    assert machine.tell().count(" at +") == 32
    assert "(load 99)" in machine.tell()


def test_watchers_hear_every_step_in_order_until_they_leave() -> None:
    machine = Machine("m", INSTANCE, 0.0)
    told: list[tuple[str, InstanceState]] = []
    leave = machine.watch(lambda step: told.append(("first", step.state)))
    machine.watch(lambda step: told.append(("second", step.state)))
    machine.move(InstanceState.STARTING, "load", 0.0)
    leave()
    leave()
    machine.move(READY, "initialized", 0.0)
    starting = InstanceState.STARTING
    assert told == [("first", starting), ("second", starting), ("second", READY)]


def test_a_watcher_may_leave_while_it_is_called() -> None:
    machine = Machine("m", INSTANCE, 0.0)
    told: list[str] = []

    def once(_step: Step[InstanceState]) -> None:
        told.append("once")
        leave()

    leave = machine.watch(once)
    machine.watch(lambda _step: told.append("always"))
    machine.move(InstanceState.STARTING, "load", 0.0)
    machine.move(READY, "initialized", 0.0)
    assert told == ["once", "always", "always"]


def test_a_watcher_that_raises_keeps_neither_the_move_nor_the_others_back() -> None:
    machine = Machine("m", INSTANCE, 0.0)
    told: list[InstanceState] = []

    def broken(_step: Step[InstanceState]) -> None:
        raise LookupError("broken watcher")

    machine.watch(broken)
    machine.watch(lambda step: told.append(step.state))
    with pytest.raises(LookupError, match="broken watcher"):
        machine.move(InstanceState.STARTING, "load", 0.0)
    assert (machine.state, told) == (InstanceState.STARTING, [InstanceState.STARTING])


def test_a_watcher_cannot_move_what_it_watches() -> None:
    machine = Machine("m", INSTANCE, 0.0)
    machine.watch(lambda _step: machine.move(READY, "eager", 0.0))
    with pytest.raises(InvalidMove, match="m: a watcher tried to move it to READY"):
        machine.move(InstanceState.STARTING, "load", 0.0)
    assert machine.state is InstanceState.STARTING
