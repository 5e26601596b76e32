"""Requests that come in one turn of an event loop share batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.inside import hosted_in
from tests.runtime.held_batches import HeldBatch, HoldingBackend, holding, rejected
from tests.runtime.recorder import PATIENCE_S, counted, model_directory, row

import moonpool
from moonpool import Runtime
from moonpool.runtime.schedule.lane import IS_COMPILED, Execution

pytestmark = pytest.mark.skipif(
    not IS_COMPILED,
    reason="the lane is not compiled, so a loop of the main thread leaves its requests to the reactor, one by one",
)
BATCHING = {"max_batch_size": 8, "dynamic_batching": {}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_directory(tmp_path / "m", 1)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what it waits for happens in other threads
            await asyncio.sleep(0.001)


def ask(runtime: Runtime, *values: int) -> list[asyncio.Task[Any]]:
    """Ask for each value in a task of its own; all of them run in the loop's next turn."""
    asked: list[Coroutine[Any, Any, Any]] = [runtime.ainfer("m", row(value)) for value in values]
    return [asyncio.ensure_future(each) for each in asked]


async def several_at_once(runtime: Runtime, backend: HoldingBackend) -> None:
    """Let the loop see a batch of several, and no smaller one after it."""
    tasks = ask(runtime, 0, 1, 2)
    answered: list[HeldBatch] = []
    while not all(task.done() for task in tasks):
        await until(lambda: len(backend.batches) > len(answered))
        held, values = backend.batches[len(answered)]
        held.answer()
        await asyncio.gather(*(tasks[int(value)] for value in values))
        answered.append(held)
    assert len(backend.sent[-1]) > 1
    backend.batches.clear()


@pytest.mark.promise(
    "Batching", "Requests that come in one turn of an event loop share a batch; a single caller waits for nobody."
)
def test_requests_of_one_turn_share_a_batch(folder: Path) -> None:
    async def main() -> None:
        await several_at_once(runtime, backend)
        tasks = ask(runtime, 5, 6, 7, 8)
        await until(lambda: backend.batches)
        backend.batches[0][0].answer()
        await asyncio.gather(*tasks)
        assert backend.sent == [[5, 6, 7, 8]]

    with holding(folder, **BATCHING) as (backend, runtime):
        asyncio.run(main())


@pytest.mark.promise("Batching", "Requests that come in one turn …")
def test_a_caller_alone_is_sent_at_once(folder: Path) -> None:
    async def main() -> None:
        for number in range(3):
            (task,) = ask(runtime, number)
            await asyncio.sleep(0)
            # In the turn in which it asked.
            assert len(backend.batches) == number + 1
            backend.batches[number][0].answer()
            await task

    with holding(folder, **BATCHING) as (backend, runtime):
        asyncio.run(main())


@pytest.mark.promise("Batching", "Idle instances of a slow model share the requests of one turn.")
@pytest.mark.parametrize(("pace_ns", "sizes"), [(10**9, [2, 3, 3]), (0, [8])])
def test_idle_instances_share_the_requests_if_the_model_is_slow(folder: Path, pace_ns: int, sizes: list[int]) -> None:
    async def main() -> None:
        await several_at_once(runtime, backend)
        hosted_in(runtime, "m").scheduler.pace_ns = pace_ns
        tasks = ask(runtime, *range(8))
        await until(lambda: sum(map(len, backend.sent)) == 8)
        for held, _ in list(backend.batches):
            held.answer()
        await asyncio.gather(*tasks)
        assert sorted(map(len, backend.sent)) == sizes

    with holding(folder, **BATCHING, **counted(3)) as (backend, runtime):
        asyncio.run(main())


def test_a_caller_that_leaves_in_the_same_turn_is_not_sent(folder: Path) -> None:
    async def main() -> None:
        await several_at_once(runtime, backend)
        tasks = ask(runtime, 5, 6, 7)
        # They have asked, and the turn is not over.
        asyncio.get_running_loop().call_soon(tasks[1].cancel)
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        await until(lambda: backend.batches)
        backend.batches[0][0].answer()
        await asyncio.gather(tasks[0], tasks[2])
        assert sorted(value for batch in backend.sent for value in batch) in ([5, 7], [5, 6, 7])

    with holding(folder, **BATCHING) as (backend, runtime):
        asyncio.run(main())


def test_a_request_that_is_refused_gets_its_error(folder: Path) -> None:
    async def main() -> None:
        await several_at_once(runtime, backend)
        tasks = ask(runtime, 5, 6, 7)
        outcomes = asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: backend.batches)
        backend.is_quick = True
        backend.batches[0][0].answer()
        answers = await outcomes
        assert [type(each) for each in answers].count(moonpool.QueueFull) == 1
        assert backend.sent == [[5, 6]]
        assert rejected(runtime) == 1

    policy = {"default_queue_policy": {"max_queue_size": 2}}
    with holding(folder, max_batch_size=8, dynamic_batching=policy) as (backend, runtime):
        asyncio.run(main())


def test_a_model_that_is_unloaded_in_the_same_turn_refuses(folder: Path) -> None:
    async def main() -> None:
        await several_at_once(runtime, backend)
        scheduler = hosted_in(runtime, "m").scheduler
        tasks = ask(runtime, 5, 6)
        asyncio.get_running_loop().call_soon(scheduler.refuse, moonpool.ModelUnavailable("it is gone"))
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, moonpool.ModelUnavailable) for each in answers)
        scheduler.open()

    with holding(folder, **BATCHING) as (backend, runtime):
        asyncio.run(main())


def test_a_model_s_pace_is_its_least_time(folder: Path) -> None:
    with holding(folder) as (_, runtime):
        scheduler = hosted_in(runtime, "m").scheduler
        execution = Execution.__new__(Execution)

        def learn(took_ms: int) -> tuple[int, float]:
            """Return the pace in milliseconds, and the time that the execution took at most when that was learned."""
            begin_ns = time.monotonic_ns()
            execution.sent_ns = begin_ns - took_ms * 1_000_000
            scheduler.keep_pace(execution)
            return scheduler.pace_ns // 1_000_000, took_ms + (time.monotonic_ns() - begin_ns) / 1e6

        first, most_ms = learn(1000)
        assert 125 <= first <= most_ms / 8
        second, most_ms = learn(200)
        # A time below the pace would be the pace, and a longer one moves it by an eighth.
        assert min(first + (200 - first) // 8, 200) <= second <= max(first, first + (most_ms - first) / 8) + 1
        third, _ = learn(5000)
        assert third > second + 500
        learn(5000)
        least, most_ms = learn(10)
        assert 10 <= least <= most_ms
