"""A model of a look and a send with the store buffers of processors: all interleavings.

The sender stores the packet, stores its number, and reads `asleep`: if that is set, it rings. The receiver clears
`asleep`, looks for the number, sets `asleep`, looks once more, and sleeps until it is rung for. A store waits in the
buffer of its processor, in order, until it reaches the memory at any later moment. A fence is a step that is possible
once the buffer is empty.
"""

from __future__ import annotations

from typing import NamedTuple

# A step is an operation and a name; the last item is where to go if the value that was read is not 0.
Step = tuple[str, str, int]
SENDER: list[Step] = [("store", "packet", 1), ("store", "number", 1), ("fence", "", 0), ("ring if", "asleep", 0)]
RECEIVER: list[Step] = [
    ("store", "asleep", 0),
    ("found if", "number", 0),
    ("store", "asleep", 1),
    ("fence", "", 0),
    ("found if", "number", 0),
    ("sleep", "", 4),
]


class State(NamedTuple):
    """The memory, the buffer and the place of each side, the rings, and if the packet was found whole."""

    memory: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]
    places: tuple[int, int]
    rings: int
    found: str


FIRST = State((("asleep", 1), ("number", 0), ("packet", 0)), ((), ()), (0, 0), 0, "")


def stuck_states(*, has_fences: bool) -> list[State]:
    """Return the states from which nothing goes on although the packet was not received whole."""
    programs = [[step for step in program if has_fences or step[0] != "fence"] for program in (SENDER, RECEIVER)]
    seen, todo, stuck = {FIRST}, [FIRST], []
    while todo:
        state = todo.pop()
        following = [each for side in (0, 1) for each in _steps(state, side, programs[side])]
        if not following and state.found != "whole":
            stuck.append(state)
        for each in following:
            if each not in seen:
                seen.add(each)
                todo.append(each)
    return stuck


def _steps(state: State, side: int, program: list[Step]) -> list[State]:
    buffer, place = state.buffers[side], state.places[side]
    following = []
    if buffer:
        name, value = buffer[0]
        memory = tuple((each, value if each == name else old) for each, old in state.memory)
        following.append(_with(state, side, buffer[1:], place)._replace(memory=memory))
    if place == len(program) or (side == 1 and state.found):
        return following
    operation, name, value = program[place]
    after = _with(state, side, buffer, place + 1)
    if operation == "store":
        following.append(_with(state, side, (*buffer, (name, value)), place + 1))
    elif operation == "fence":
        following += [] if buffer else [after]
    elif operation == "ring if":
        following.append(after._replace(rings=state.rings + _read(state, buffer, name)))
    elif operation == "found if":
        if _read(state, buffer, name):
            found = "whole" if _read(state, buffer, "packet") else "torn"
            following.append(after._replace(found=found))
        else:
            following.append(after)
    elif state.rings:  # it sleeps until then, and looks again
        again = len(program) - 2
        following.append(_with(state, side, buffer, again)._replace(rings=state.rings - 1))
    return following


def _with(state: State, side: int, buffer: tuple[tuple[str, int], ...], place: int) -> State:
    buffers, places = list(state.buffers), list(state.places)
    buffers[side], places[side] = buffer, place
    return state._replace(buffers=(buffers[0], buffers[1]), places=(places[0], places[1]))


def _read(state: State, buffer: tuple[tuple[str, int], ...], name: str) -> int:
    """A processor reads its own latest store, whether or not it has reached the memory."""
    return next((value for each, value in reversed(buffer) if each == name), dict(state.memory)[name])
