"""A signal handler of a model's may raise anywhere while a coroutine is handed to its loop: no place is lost, and none
runs twice.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path

import pytest
from tests.runtime.interrupting import OF_A_STUB, interrupted_everywhere

from moonpool.stub.coroutines import Coroutines

PATIENCE_S = 60.0


@pytest.fixture
def coroutines() -> Iterator[Coroutines]:
    made = Coroutines(1)
    yield made
    made.close(PATIENCE_S)


async def nothing() -> None:
    """Do nothing."""


def test_an_interrupt_at_any_point_of_a_start_leaves_room_for_the_next_one(coroutines: Coroutines) -> None:
    ended: list[object] = []
    made: list[Coroutine[None, None, None]] = []

    def start() -> None:
        made.append(nothing())
        coroutines.start(made[-1], lambda *outcome: ended.append(outcome))

    def check() -> None:
        last = threading.Event()
        coroutines.start(nothing(), lambda *_: last.set())
        assert last.wait(PATIENCE_S)
        # Each of those before has run once, or not at all.
        assert set(ended) <= {(None, None)}
        assert len(ended) <= len(made)
        ended.clear()
        while made:
            made.pop().close()

    # The loop starts with the first one.
    start()
    check()
    within = (*OF_A_STUB, str(Path(asyncio.__file__).parent))
    assert interrupted_everywhere(start, check, within=within, at_lines=False) > 10
