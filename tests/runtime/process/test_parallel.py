"""Doing the same for several objects at once, also where the user has had enough."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest
from tests.dispositions import default_signals
from tests.runtime.interrupting import interrupted_everywhere

from moonpool.runtime.process import parallel
from moonpool.runtime.process.parallel import awaited, in_parallel

PATIENCE_S = 60.0


def test_results_are_in_the_order_of_the_items() -> None:
    first_may_end = threading.Event()

    def work(item: int) -> int:
        if item == 1:
            first_may_end.wait(PATIENCE_S)
        else:
            first_may_end.set()
        return item * 10

    assert in_parallel(work, [1, 2], "test") == [10, 20]


def test_all_have_ended_when_an_exception_is_raised() -> None:
    ended = []

    def work(item: int) -> None:
        if item == 1:
            raise ValueError("the first")
        ended.append(item)

    with pytest.raises(ValueError, match="the first"):
        in_parallel(work, [1, 2, 3], "test")

    assert sorted(ended) == [2, 3]


def test_an_interrupt_is_told_at_once_and_raised_when_all_have_ended() -> None:
    told, both_run = threading.Event(), threading.Barrier(2)
    ended = []

    def work(item: int) -> None:
        both_run.wait(PATIENCE_S)
        if item == 1:
            os.kill(os.getpid(), signal.SIGINT)
        if told.wait(PATIENCE_S):
            ended.append(item)

    with default_signals(), pytest.raises(KeyboardInterrupt):
        in_parallel(work, [1, 2], "test", told.set)

    assert sorted(ended) == [1, 2]


def test_an_interrupt_among_the_starts_leaves_nothing_running() -> None:
    told = threading.Event()
    begun, ended = [], []

    def work(item: int) -> None:
        begun.append(item)
        if item == 1:
            os.kill(os.getpid(), signal.SIGINT)
        told.wait(PATIENCE_S)
        ended.append(item)

    with default_signals(), pytest.raises(KeyboardInterrupt):
        in_parallel(work, list(range(1, 20)), "test", told.set)

    assert 1 in begun
    assert sorted(ended) == sorted(begun)


@pytest.mark.promise(
    "Lifecycle",
    "A task that awaits a load, a change of the number of instances, an unload or a close goes on when that has ended, "
    "also if a signal handler raises while its event loop learns of the end. If one raises in the task, the task ends "
    "so when nothing is at work any more.",
)
def test_a_task_goes_on_when_the_work_has_ended_wherever_a_handler_raises() -> None:
    loop = asyncio.new_event_loop()
    # asyncio passes what its callbacks raise to this, and they are over.
    loop.set_exception_handler(lambda *_: None)
    goes_on = threading.Event()
    at_work: list[None] = []
    tasks: list[asyncio.Task[int]] = []

    def work() -> int:
        at_work.append(None)
        loop.call_soon_threadsafe(go_on)
        goes_on.wait(PATIENCE_S)
        at_work.pop()
        return 1

    def go_on() -> None:
        # A task that is done has not waited for the end of the work.
        if not tasks[0].done():
            goes_on.set()

    async def wait() -> int:
        tasks[:] = [asyncio.ensure_future(awaited(work, "test", goes_on.set))]
        return await asyncio.wait_for(tasks[0], PATIENCE_S)

    def ask() -> None:
        assert loop.run_until_complete(wait()) == 1

    def check() -> None:
        was_at_work = list(at_work)
        goes_on.set()
        assert not was_at_work
        assert not asyncio.all_tasks(loop)
        goes_on.clear()

    try:
        assert interrupted_everywhere(ask, check, within=(parallel.__file__,)) > 20
    finally:
        loop.close()
