"""Tests of callers that wait: threads, futures, event loops, and all of them in one batch."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType

import pytest
from tests.inside import hosted_in
from tests.runtime.held_batches import Caller, holding, queued
from tests.runtime.recorder import PATIENCE_S, Planned, row, x
from tests.waiting import wait_until

import moonpool
from moonpool import RequestTimedOut
from moonpool.ipc.errors import PeerGone

BATCHING = {"max_batch_size": 8, "dynamic_batching": {}}
# In this time a batch forms and is sent, on any machine.
HASTE_S = 5.0


class Interrupted(BaseException):
    """The exception that the signal handler raises."""


class Interrupts:
    """Lets SIGUSR1 raise `Interrupted` in the main thread, once for each call of `when`."""

    def __init__(self) -> None:
        self.noticed = threading.Event()

    def handle(self, _: int, __: FrameType | None) -> None:
        if not self.noticed.is_set():
            self.noticed.set()
            raise Interrupted

    def when(self, condition: Callable[[], object]) -> threading.Thread:
        """Interrupt the main thread once the condition holds."""
        main = threading.main_thread().ident
        assert main is not None
        self.noticed.clear()

        def send() -> None:
            wait_until(condition)
            # Python misses a signal that arrives just before it waits in the kernel, so this repeats it.
            while not self.noticed.is_set():
                signal.pthread_kill(main, signal.SIGUSR1)
                self.noticed.wait(0.01)

        thread = threading.Thread(target=send)
        thread.start()
        return thread


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    interrupts = Interrupts()
    interrupts.noticed.set()
    before = signal.signal(signal.SIGUSR1, interrupts.handle)
    yield interrupts
    signal.signal(signal.SIGUSR1, before)


# Threads


def test_threads_of_one_batch_are_all_answered_by_the_one_that_waits_on_the_socket(folder: Path) -> None:
    with holding(folder, **BATCHING) as (backend, runtime):
        callers = [Caller(runtime, row(0))]
        backend.wait_for(1)
        callers += [Caller(runtime, row(i)) for i in range(1, 6)]
        queued(runtime, 5)
        backend.wait_for(1).answer()
        backend.wait_for(2).answer()
        assert [caller.result() for caller in callers] == [0, 1, 2, 3, 4, 5]


def test_a_thread_that_leaves_hands_its_batch_to_the_reactor(folder: Path) -> None:
    with holding(folder, **BATCHING) as (backend, runtime):
        first = Caller(runtime, row(0))
        backend.wait_for(1)
        hasty = [Caller(runtime, row(i), timeout_s=HASTE_S) for i in (1, 2)]
        patient = runtime.submit("m", row(3))
        queued(runtime, 3)
        backend.wait_for(1).answer()
        backend.wait_for(2)
        assert all(isinstance(caller.result(), RequestTimedOut) for caller in hasty)
        backend.wait_for(2).answer()
        assert patient.result(PATIENCE_S).outputs["Y"].flat[0] == 3
        assert first.result() == 0


@pytest.mark.promise("Requests", "A caller that gives up, is …")
def test_a_signal_handler_that_raises_ends_the_wait_and_nothing_else(folder: Path, interrupts: Interrupts) -> None:
    with holding(folder, **BATCHING) as (backend, runtime):
        for i in range(3):
            thread = interrupts.when(partial(backend.wait_for, 2 * i + 1))
            with pytest.raises(Interrupted):
                runtime.infer("m", row(10 * i))
            thread.join()
            other = runtime.submit("m", row(10 * i + 1))
            backend.wait_for(2 * i + 1).answer()
            backend.wait_for(2 * i + 2).answer()
            assert other.result(PATIENCE_S).outputs["Y"].flat[0] == 10 * i + 1
        assert backend.sent == [[0], [1], [10], [11], [20], [21]]
        assert runtime.instances("m")[0]["restarts"] == 0


def test_a_signal_handler_that_raises_takes_a_queued_request_out(folder: Path, interrupts: Interrupts) -> None:
    with holding(folder) as (backend, runtime):
        first = runtime.submit("m", x(0))
        scheduler = hosted_in(runtime, "m").scheduler
        thread = interrupts.when(lambda: scheduler.queued == 1)
        with pytest.raises(Interrupted):
            runtime.infer("m", x(1))
        thread.join()
        # The reactor may be late.
        wait_until(lambda: not scheduler.queued)
        backend.wait_for(1).answer()
        assert first.result(PATIENCE_S).outputs["Y"].flat[0] == 0
        assert backend.sent == [[0]]


@pytest.mark.promise("Requests", "A caller that gives up, is …")
def test_the_others_of_a_batch_are_answered_when_its_driver_is_interrupted(
    folder: Path, interrupts: Interrupts
) -> None:
    with holding(folder, **BATCHING) as (backend, runtime):
        first = runtime.submit("m", row(0))

        def others() -> bool:
            # The main thread is first in the batch, so it drives the batch.
            queued(runtime, 1)
            for i in (2, 3):
                callers.append(Caller(runtime, row(i)))
                queued(runtime, i)
            backend.wait_for(1).answer()
            backend.wait_for(2)
            return True

        callers: list[Caller] = []
        thread = interrupts.when(others)
        with pytest.raises(Interrupted):
            runtime.infer("m", row(1))
        thread.join()
        backend.wait_for(2).answer()
        assert [caller.result() for caller in callers] == [2, 3]
        assert first.result(PATIENCE_S).outputs["Y"].flat[0] == 0
        assert backend.sent == [[0], [1, 2, 3]]


# Futures


def test_a_signal_in_a_callback_of_a_future_reaches_the_main_thread(folder: Path) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with holding(folder) as (backend, runtime):
        first = runtime.submit("m", x(1))
        held, second = backend.wait_for(1), runtime.submit("m", x(2))
        second.add_done_callback(interrupt)
        with pytest.raises(KeyboardInterrupt):
            second.cancel()
        held.answer()
        assert first.result(PATIENCE_S).outputs["Y"].flat[0] == 1
        assert second.cancelled()


def test_futures_have_responses_and_errors(folder: Path) -> None:
    with holding(folder) as (backend, runtime):
        good = runtime.submit("m", x(1, 2))
        assert not good.done()
        backend.wait_for(1).answer()
        response = good.result(PATIENCE_S)
        assert response.outputs["Y"].tolist() == [1, 2]
        bad = runtime.submit("m", x(3))
        backend.wait_for(2).break_down(PeerGone("gone"))
        assert isinstance(bad.exception(PATIENCE_S), PeerGone)
        with pytest.raises(moonpool.InvalidRequest):
            runtime.submit("m", {})


def test_a_cancelled_future_takes_its_request_out_of_the_queue(folder: Path) -> None:
    with holding(folder) as (backend, runtime):
        first, second, third = (runtime.submit("m", x(i)) for i in range(3))
        assert second.cancel()
        assert second.cancelled()
        assert second.cancel()  # a second call has the same result
        assert concurrent.futures.wait([second], PATIENCE_S).done == {second}
        backend.is_quick = True
        backend.wait_for(1).answer()
        assert [f.result(PATIENCE_S).outputs["Y"].flat[0] for f in (first, third)] == [0, 2]
        assert backend.sent == [[0], [2]]
        assert not first.cancel()


def test_a_future_that_is_cancelled_while_its_request_executes_disturbs_nobody(folder: Path) -> None:
    with holding(folder, **BATCHING) as (backend, runtime):
        first = runtime.submit("m", row(0))
        second, third = (runtime.submit("m", row(i)) for i in (1, 2))
        backend.wait_for(1).answer()
        held = backend.wait_for(2)
        assert second.cancel()
        held.answer()
        assert third.result(PATIENCE_S).outputs["Y"].flat[0] == 2
        assert first.result(PATIENCE_S).outputs["Y"].flat[0] == 0
        with pytest.raises(concurrent.futures.CancelledError):
            second.result(0)


def test_a_callback_that_raises_whatever_it_likes_harms_nobody(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    errors = [Planned("in a callback"), SystemExit("in a callback")]

    def fail(_: object) -> None:
        raise errors.pop()

    with holding(folder, **BATCHING) as (backend, runtime):
        while errors:
            before = len(backend.batches)
            first = runtime.submit("m", row(0))
            first.add_done_callback(fail)
            second = runtime.submit("m", row(1))
            backend.wait_for(before + 1).answer()
            backend.wait_for(before + 2).answer()
            assert second.result(PATIENCE_S).outputs["Y"].flat[0] == 1
            assert first.result(PATIENCE_S).outputs["Y"].flat[0] == 0
    assert "in a callback" in caplog.text


@pytest.mark.promise(
    "Requests",
    "Whatever a callback of a future raises or waits for, other requests get their outcomes, those of the same batch, "
    "too.",
)
@pytest.mark.parametrize("kind", [asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, SystemExit, Planned])
def test_a_callback_takes_no_outcome_from_others(folder: Path, kind: type[BaseException]) -> None:
    def fail(called: list[str], _: object) -> None:
        called.append("first")
        raise kind("in a callback")

    with holding(folder, **BATCHING) as (backend, runtime):
        first = runtime.submit("m", row(0))
        futures = [runtime.submit("m", row(i)) for i in range(1, 5)]
        called: list[list[str]] = [[], []]
        for each, of in zip((first, futures[0]), called, strict=True):
            each.add_done_callback(partial(fail, of))
            each.add_done_callback(lambda _, of=of: of.append("second"))  # type: ignore[misc]
        backend.is_quick = True
        backend.wait_for(1).answer()
        done = [each.result(PATIENCE_S).outputs["Y"].flat[0] for each in futures]
        assert done == [1, 2, 3, 4]
        # Each on one thread, and both perhaps at once.
        wait_until(lambda: called == [["first", "second"]] * 2)
        assert runtime.infer("m", row(9), timeout_s=PATIENCE_S)["Y"].flat[0] == 9


@pytest.mark.promise("Requests", "Whatever a callback of a future …")
def test_a_callback_that_waits_holds_up_nobody_else(folder: Path) -> None:
    goes_on, order = threading.Event(), []
    with holding(folder, **BATCHING) as (backend, runtime):
        blocking = [runtime.submit("m", row(i)) for i in range(2)]
        for each in blocking:
            # Before there is an outcome: after it, this thread would run the callback.
            each.add_done_callback(lambda _: goes_on.wait(PATIENCE_S))
        backend.is_quick = True
        backend.wait_for(1).answer()
        others = [runtime.submit("m", row(i)) for i in range(2, 6)]
        for i, each in enumerate(others):
            each.add_done_callback(lambda _, i=i: order.append(i))  # type: ignore[misc]
        assert [each.result(PATIENCE_S).outputs["Y"].flat[0] for each in others] == [2, 3, 4, 5]
        assert next(iter(runtime.stream("m", row(6)))).outputs["Y"].flat[0] == 6
        wait_until(lambda: len(order) == 4)
        goes_on.set()
        for each in blocking:
            each.result(PATIENCE_S)


@pytest.mark.promise(
    "Requests",
    "A lock of a future that stays taken, as after a signal handler that raised in `Future.result`, holds up the "
    "outcome of that future alone.",
)
def test_a_lock_of_a_future_that_stays_taken_holds_up_nobody_else(folder: Path) -> None:
    with holding(folder, **BATCHING) as (backend, runtime):
        backend.is_quick = True
        stuck = [runtime.submit("m", row(i)) for i in range(2)]
        more = []
        for each in stuck:
            each._condition.acquire()
        try:
            for i in range(3):
                more.append(runtime.submit("m", row(i)))
                more[-1].add_done_callback(lambda _: None)
                assert more[-1].result(PATIENCE_S).outputs["Y"].flat[0] == i
            assert runtime.infer("m", row(9), timeout_s=PATIENCE_S)["Y"].flat[0] == 9
        finally:
            for each in stuck:
                each._condition.release()
        for i, each in enumerate(stuck):
            assert each.result(PATIENCE_S).outputs["Y"].flat[0] == i


def test_a_future_leaves_no_garbage_that_holds_tensors(folder: Path) -> None:
    with holding(folder) as (backend, runtime):
        backend.is_quick = True
        inputs = x(1, 2, 3)
        alive = weakref.ref(inputs["X"])
        gc.collect()
        gc.disable()
        try:
            future = runtime.submit("m", inputs)
            future.result(PATIENCE_S)
            for held in backend.held_batches.values():
                held.requests = ()
            del inputs, future
            # The thread that answered may still be leaving the callback.
            wait_until(lambda: alive() is None)
        finally:
            gc.enable()
