"""Tests of callers in event loops: several loops, loops beside threads, and loops that end in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.inside import hosted_in
from tests.runtime.held_batches import Caller, HoldingBackend, holding, pending, queued
from tests.runtime.recorder import PATIENCE_S, counted, row, x
from tests.waiting import wait_until

import moonpool
from moonpool import RequestTimedOut, Runtime
from moonpool.ipc.errors import PeerGone
from moonpool.runtime.schedule import event_loop

BATCHING = {"max_batch_size": 8, "dynamic_batching": {}}


def _uvloop() -> Any:
    return pytest.importorskip("uvloop").new_event_loop()


@pytest.fixture(scope="module", autouse=True)
def _first_uvloop() -> None:
    """Make a loop: the first one of a process opens a pipe that stays open."""
    with contextlib.suppress(ImportError):
        importlib.import_module("uvloop").new_event_loop().close()


@pytest.fixture(params=[asyncio.new_event_loop, _uvloop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Return `asyncio.run` for asyncio's own loop or uvloop's."""

    def run(coroutine: Any) -> Any:
        try:
            with asyncio.Runner(loop_factory=request.param) as runner:
                return runner.run(coroutine)
        except BaseException:
            coroutine.close()
            raise

    return run


async def ask(runtime: Runtime, inputs: dict[str, Any], **options: Any) -> float:
    return float((await runtime.ainfer("m", inputs, **options))["Y"].flat[0])


def rescued(runtime: Runtime) -> None:
    """Let the supervisor look for stranded executions until none is left."""
    hosted = hosted_in(runtime, "m")

    def is_done() -> bool:
        hosted.supervisor.rescue(0)
        return not hosted.scheduler.executing

    wait_until(is_done)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what it waits for happens in other threads
            await asyncio.sleep(0.001)


def test_a_loop_asks_many_things_at_once(folder: Path, run: Any) -> None:
    async def main() -> list[float]:
        return await asyncio.gather(*(ask(runtime, row(i)) for i in range(50)))

    with holding(folder, **BATCHING, **counted(2)) as (backend, runtime):
        backend.is_quick = True
        assert run(main()) == list(range(50))


def test_arequest_gives_the_whole_response(folder: Path, run: Any) -> None:
    async def main() -> moonpool.Response:
        return await runtime.arequest("m", x(1), request_id="first")

    with holding(folder) as (backend, runtime):
        backend.is_quick = True
        assert run(main()).outputs["Y"].tolist() == [1]


def test_the_loop_runs_on_while_a_request_executes(folder: Path, run: Any) -> None:
    async def main() -> float:
        task = asyncio.create_task(ask(runtime, x(5)))
        await until(lambda: backend.batches)
        for _ in range(10):
            await asyncio.sleep(0)
        backend.wait_for(1).answer()
        return await task

    with holding(folder) as (backend, runtime):
        assert run(main()) == 5


def test_errors_reach_the_task(folder: Path, run: Any) -> None:
    async def main() -> None:
        with pytest.raises(moonpool.InvalidRequest):
            await ask(runtime, {})
        task = asyncio.create_task(ask(runtime, x(1)))
        await until(lambda: backend.batches)
        backend.wait_for(1).break_down(PeerGone("the instance is gone"))
        with pytest.raises(PeerGone, match="the instance is gone"):
            await task

    with holding(folder) as (backend, runtime):
        run(main())


def test_a_time_limit_is_over_for_the_task_alone(folder: Path, run: Any) -> None:
    async def main() -> None:
        with pytest.raises(RequestTimedOut, match=r"^Request timeout expired$"):
            await ask(runtime, x(1), timeout_s=0.01)
        task = asyncio.create_task(ask(runtime, x(2)))
        await asyncio.sleep(0)
        backend.wait_for(1).answer()
        await until(lambda: len(backend.batches) == 2)
        backend.wait_for(2).answer()
        assert await task == 2

    with holding(folder) as (backend, runtime):
        run(main())


def test_a_time_limit_of_the_caller_is_not_taken_for_one_of_the_request(folder: Path, run: Any) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.01):
                await ask(runtime, x(1), timeout_s=PATIENCE_S)
        assert not isinstance(caught.value, RequestTimedOut)
        backend.wait_for(1).answer()

    with holding(folder) as (backend, runtime):
        run(main())


def test_a_cancelled_task_takes_its_request_out_of_the_queue(folder: Path, run: Any) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(ask(runtime, x(i))) for i in range(3)]
        await until(lambda: backend.batches)
        queued(runtime, 2)
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        backend.is_quick = True
        backend.wait_for(1).answer()
        assert [await tasks[0], await tasks[2]] == [0, 2]
        assert backend.sent == [[0], [2]]

    with holding(folder) as (backend, runtime):
        run(main())


def test_a_task_that_is_cancelled_while_its_request_executes_disturbs_nobody(folder: Path, run: Any) -> None:
    async def main() -> None:
        first = asyncio.create_task(ask(runtime, row(0)))
        await until(lambda: backend.batches)
        tasks = [asyncio.create_task(ask(runtime, row(i))) for i in (1, 2, 3)]
        await asyncio.sleep(0)
        backend.wait_for(1).answer()
        await until(lambda: len(backend.batches) == 2)
        tasks[0].cancel()
        await asyncio.sleep(0)
        backend.wait_for(2).answer()
        assert [await first, await tasks[1], await tasks[2]] == [0, 2, 3]
        assert tasks[0].cancelled()
        backend.is_quick = True
        assert await ask(runtime, row(4)) == 4

    with holding(folder, **BATCHING) as (backend, runtime):
        run(main())


def test_a_loop_may_end_while_its_requests_are_inside(folder: Path, run: Any) -> None:
    async def leave_behind() -> None:
        for i in (1, 2):
            asyncio.create_task(ask(runtime, row(i)), name=f"left {i}").add_done_callback(gone.add)
        queued(runtime, 1) if not backend.batches else None
        await until(lambda: pending(runtime) == 2)
        backend.wait_for(1).answer()
        await until(lambda: len(backend.batches) == 2)

    gone: set[Any] = set()
    with holding(folder, **BATCHING) as (backend, runtime):
        first = Caller(runtime, row(0))
        backend.wait_for(1)
        run(leave_behind())
        assert all(task.cancelled() for task in gone)
        assert len(gone) == 2
        behind = Caller(runtime, row(3))
        backend.wait_for(2).answer()
        backend.wait_for(3).answer()
        assert (first.result(), behind.result()) == (0, 3)


def test_a_loop_that_stops_for_good_does_not_keep_the_batch_of_others(folder: Path) -> None:
    loop = asyncio.new_event_loop()
    try:
        with holding(folder, **BATCHING) as (backend, runtime):
            first = runtime.submit("m", row(0))
            left = loop.create_task(ask(runtime, row(1)))
            loop.run_until_complete(asyncio.sleep(0))
            other = Caller(runtime, row(2))
            queued(runtime, 2)
            # The loop is appointed to drive the next batch, and never runs again to do it.
            backend.wait_for(1).answer()
            backend.wait_for(2).answer()
            wait_until(lambda: len(backend.batches) == 2)
            rescued(runtime)
            assert other.result() == 2
            assert first.result(PATIENCE_S).outputs["Y"].flat[0] == 0
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                loop.run_until_complete(left)
    finally:
        loop.close()


def test_a_loop_that_stopped_while_it_drove_does_not_keep_the_batch_of_others(folder: Path) -> None:
    loop = asyncio.new_event_loop()
    try:
        with holding(folder, **BATCHING) as (backend, runtime):
            left = loop.create_task(ask(runtime, row(1)))
            loop.run_until_complete(until(lambda: backend.batches))
            waiting = Caller(runtime, row(2))
            queued(runtime, 1)
            backend.wait_for(1).answer()
            backend.is_quick = True
            rescued(runtime)
            assert waiting.result() == 2
            # The loop learns of the answer when it runs again.
            assert loop.run_until_complete(left) == 1
    finally:
        loop.close()


def test_a_loop_that_was_closed_is_forgotten_and_what_it_drove_goes_on(folder: Path) -> None:
    with holding(folder, **BATCHING) as (backend, runtime):
        loop = asyncio.new_event_loop()
        left = loop.create_task(ask(runtime, row(1)))
        loop.run_until_complete(until(lambda: backend.batches))
        waiting = Caller(runtime, row(2))
        queued(runtime, 1)
        loop.close()
        left._log_destroy_pending = False  # type: ignore[attr-defined]
        is_alive = weakref.ref(loop)
        del loop, left
        backend.is_quick = True
        backend.wait_for(1).answer()
        rescued(runtime)
        assert waiting.result() == 2
        gc.collect()
        assert is_alive() is None


def test_a_loop_does_not_read_before_there_is_something_to_read(folder: Path) -> None:
    async def main() -> None:
        task = asyncio.create_task(ask(runtime, x(3)))
        await until(lambda: backend.batches)
        driver = event_loop.driver_of(asyncio.get_running_loop())
        assert len(driver._sockets.all()) == 1
        # This is the state if a thread has read its answer since the loop's poll.
        driver._look()
        backend.wait_for(1).answer()
        assert await task == 3

    with holding(folder) as (backend, runtime):
        asyncio.run(main())
        assert runtime.instances("m")[0]["restarts"] == 0


def _in_a_loop(runtime: Runtime, first: int, count: int) -> list[float]:
    async def main() -> list[float]:
        answers = []
        for i in range(first, first + count, 4):
            answers += await asyncio.gather(*(ask(runtime, row(i + j)) for j in range(4)))
        return answers

    return asyncio.run(main())


def _in_a_thread(runtime: Runtime, first: int, count: int) -> list[float]:
    return [float(runtime.infer("m", row(i))["Y"].flat[0]) for i in range(first, first + count)]


def _as_futures(runtime: Runtime, first: int, count: int) -> list[float]:
    futures = [runtime.submit("m", row(i)) for i in range(first, first + count)]
    return [float(future.result(PATIENCE_S).outputs["Y"].flat[0]) for future in futures]


def test_loops_threads_and_futures_share_the_instances_of_a_model(folder: Path) -> None:
    answers: dict[int, list[float]] = {}
    count = 80

    def run(number: int, way: Callable[[Runtime, int, int], list[float]]) -> None:
        answers[number] = way(runtime, 1000 * number, count)

    with holding(folder, **BATCHING, **counted(2)) as (backend, runtime):
        backend.is_quick = True
        ways = [_in_a_loop, _in_a_thread, _as_futures] * 3
        threads = [threading.Thread(target=run, args=pair) for pair in enumerate(ways)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert answers == {i: list(range(1000 * i, 1000 * i + count)) for i in range(len(ways))}
        assert isinstance(backend, HoldingBackend)
        assert all(shown["restarts"] == 0 for shown in runtime.instances("m"))


PLUS = """
from moonpool import Float32, Outputs

class Plus:
    def __call__(self, X: Float32[3]) -> Outputs(Y=Float32[3]):
        return {"Y": X + 1}
"""


@pytest.mark.promise(
    "Tensors and requests of clients", "Threads and event loops may wait for the same stub, uvloop's too."
)
def test_a_thread_asks_a_stub_that_a_loop_has_watched(tmp_path: Path, run: Any) -> None:
    """uvloop makes descriptors that it watches non-blocking.

    A thread that waits on the same channel must not notice.
    """
    inputs = {"X": [1.0, 2.0, 3.0]}
    (tmp_path / "plus.py").write_text(PLUS)

    async def main() -> None:
        await runtime.ainfer("plus", inputs)

    with Runtime() as runtime:
        runtime.load("plus", tmp_path / "plus.py")
        run(main())
        assert runtime.infer("plus", inputs)["Y"].tolist() == [2.0, 3.0, 4.0]


def test_a_stub_that_ends_with_a_request_unread_is_watched_no_more(tmp_path: Path, run: Any) -> None:
    """The socket has an error then, which uvloop would not report."""
    inputs = {"X": [1.0, 2.0, 3.0]}
    (tmp_path / "plus.py").write_text(PLUS)

    async def main() -> None:
        await runtime.ainfer("plus", inputs)
        pid = runtime.instances("plus")[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        asked = asyncio.create_task(runtime.ainfer("plus", inputs))
        await until(lambda: hosted_in(runtime, "plus").scheduler.executing)
        driver = event_loop.driver_of(asyncio.get_running_loop())
        (watched,) = driver._sockets.all()
        os.kill(pid, signal.SIGKILL)
        # What a process never took from memory goes to the next one.
        with contextlib.suppress(moonpool.StubDied):
            assert (await asked)["Y"].tolist() == [2.0, 3.0, 4.0]
        await until(lambda: watched not in driver._sockets.all())
        await until(lambda: runtime.instances("plus")[0]["state"] == "READY")

    with Runtime() as runtime:
        runtime.load("plus", tmp_path / "plus.py")
        run(main())
