"""Threads that the operating system grants or refuses, and pools of them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
from tests.refused_threads import refuse_threads
from tests.waiting import wait_until

from moonpool.ipc.errors import Closed
from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.threads import CountingCondition, TaskPool, start_thread

PATIENCE_S = 60.0
LIMITS = pytest.mark.promise("At the limits", "If no thread can be started …")


@pytest.fixture
def pool() -> Iterator[TaskPool]:
    pool = TaskPool(3, "test-pool")
    yield pool
    pool.shutdown()


@LIMITS
def test_a_thread_that_is_refused_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)

    with pytest.raises(OutOfThreads, match="no thread for mine: can't start new thread; raise the limit") as caught:
        start_thread(threading.Thread(name="mine"))

    assert caught.value.code == "UNAVAILABLE"


def test_a_thread_that_is_refused_because_the_program_ends_is_no_matter_of_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    with pytest.raises(OutOfThreads, match=r"at interpreter shutdown; the program ends$"):
        start_thread(threading.Thread(name="mine"))


@LIMITS
def test_a_reactor_without_a_thread_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    refuse_threads(monkeypatch)

    with pytest.raises(OutOfThreads):
        Reactor()

    assert len(os.listdir("/proc/self/fd")) == before


# Pools


def test_tasks_run_at_once_on_so_many_threads_at_most(pool: TaskPool) -> None:
    together = threading.Barrier(3)

    def act(value: int, *, add: int) -> tuple[int, str]:
        together.wait(PATIENCE_S)
        return value + add, threading.current_thread().name

    results = [each.result(PATIENCE_S) for each in [pool.submit(act, i, add=1) for i in range(9)]]

    assert [value for value, _ in results] == list(range(1, 10))
    assert {name for _, name in results} == {f"test-pool_{i}" for i in range(3)}


def test_a_thread_that_waits_is_used_again(pool: TaskPool) -> None:
    for _ in range(10):
        pool.submit(int).result(PATIENCE_S)
        wait_until(lambda: pool._idle == 1)

    assert len(pool._threads) == 1


def test_what_a_task_raises_is_its_outcome_and_the_thread_goes_on(pool: TaskPool) -> None:
    def fail() -> None:
        raise SystemExit("mine")

    assert isinstance(pool.submit(fail).exception(PATIENCE_S), SystemExit)
    assert pool.submit(int, "7").result(PATIENCE_S) == 7


def test_a_thread_that_waits_keeps_nothing_of_its_task(pool: TaskPool) -> None:
    class Tensor:
        pass

    def act(tensor: Tensor) -> Tensor:
        return tensor

    tensor = Tensor()
    seen = weakref.ref(tensor)
    pool.submit(act, tensor).result(PATIENCE_S)

    del tensor
    wait_until(lambda: seen() is None)


def test_what_a_task_raises_keeps_nothing_of_it_once_it_is_dropped(pool: TaskPool) -> None:
    """No collector has to look for a cycle of the error, its traceback and the future."""
    kept: list[weakref.ref[set[int]]] = []

    def fail() -> None:
        large = {1}
        kept.append(weakref.ref(large))
        raise ValueError("no")

    gc.disable()
    try:
        with pytest.raises(ValueError, match="no"):
            pool.submit(fail).result()
        wait_until(lambda: kept[0]() is None, 60.0)
    finally:
        gc.enable()


def test_a_pool_that_was_shut_down_finishes_and_takes_no_more() -> None:
    pool, proceed = TaskPool(1, "test-pool"), threading.Event()
    running, waiting = pool.submit(proceed.wait, PATIENCE_S), pool.submit(int)

    pool.shutdown(wait=False)
    with pytest.raises(Closed, match="test-pool have ended"):
        pool.submit(int)
    proceed.set()
    pool.shutdown()

    assert running.result(0)
    assert waiting.result(0) == 0


def test_a_pool_can_drop_what_waits() -> None:
    pool, proceed, begun = TaskPool(1, "test-pool"), threading.Event(), threading.Event()

    def act() -> bool:
        begun.set()
        return proceed.wait(PATIENCE_S)

    running, waiting = pool.submit(act), pool.submit(int)
    assert begun.wait(PATIENCE_S)

    pool.shutdown(wait=False, cancel_futures=True)
    proceed.set()
    pool.shutdown()

    assert running.result(0)
    assert waiting.cancelled()


@LIMITS
def test_tasks_wait_for_threads_that_run_if_no_other_can_be_started(
    pool: TaskPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    proceed = threading.Event()
    first = pool.submit(proceed.wait, PATIENCE_S)
    refused = refuse_threads(monkeypatch, "test-pool")

    others = [pool.submit(int, i) for i in range(3)]
    proceed.set()

    assert first.result(PATIENCE_S)
    assert [each.result(PATIENCE_S) for each in others] == [0, 1, 2]
    assert refused


@LIMITS
def test_a_task_that_was_refused_never_runs(pool: TaskPool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        with pytest.raises(OutOfThreads, match="no thread for test-pool_0"):
            pool.submit(ran.append, "refused")

    pool.submit(ran.append, "taken").result(PATIENCE_S)

    assert ran == ["taken"]


# A limit of the kernel, for a user who has nothing but this program.
@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, SystemExit, ValueError])
def test_a_callback_of_a_task_ends_no_thread(pool: TaskPool, kind: type[BaseException]) -> None:
    def fail(_: object) -> None:
        raise kind("in a callback")

    for _ in range(2 * pool.most):
        goes_on = threading.Event()
        future = pool.submit(goes_on.wait, PATIENCE_S)
        future.add_done_callback(fail)
        goes_on.set()
        assert future.result(PATIENCE_S)

    together = threading.Barrier(3)
    tasks = [pool.submit(together.wait, PATIENCE_S) for _ in range(3)]
    assert sorted(each.result(PATIENCE_S) for each in tasks) == [0, 1, 2]


def test_a_condition_is_waited_for_until_it_holds_or_the_time_is_over() -> None:
    lock, seen = threading.Lock(), []
    changed = CountingCondition(lock)
    thread = threading.Thread(
        target=lambda: seen.append(changed.wait_for(lambda: bool(seen), time.monotonic() + PATIENCE_S))
    )
    thread.start()
    wait_until(lambda: changed.waiting == 1)
    assert not changed.wait_for(lambda: False, time.monotonic() + 0.01)
    assert changed.waiting == 1
    with lock:
        seen.append(True)
        changed.notify_all()
    thread.join()
    assert seen == [True, True]
    assert changed.waiting == 0


LIMITED = """
import os, resource, sys, threading
from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.process.parallel import in_parallel
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.spawner import spawn
from moonpool.runtime.process.threads import TaskPool

def refused(act):
    before = len(os.listdir("/proc/self/fd"))
    try:
        act()
    except OutOfThreads as error:
        return len(os.listdir("/proc/self/fd")) == before and "can't start new thread" in str(error)
    return False

user = 2_000_000 + os.getpid()
try:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
except OSError as error:
    sys.exit(f"no other user: {error}")
resource.setrlimit(resource.RLIMIT_NPROC, (4, 4))
pool = TaskPool(8, "pool")
together = threading.Barrier(3)
done = [pool.submit(together.wait, 60) for _ in range(9)]
print(sorted(each.result(60) for each in done), len(pool._threads))
print(refused(Reactor), refused(lambda: TaskPool(1, "other").submit(print, "never")))
print(refused(lambda: spawn([sys.executable], environment={}, folder="/", output_fd=1, fds=())))
print(in_parallel(lambda _: threading.current_thread().name, range(3), "parallel"))
pool.shutdown()
while len(os.listdir("/proc/self/task")) > 1:
    pass
reactor = Reactor()
print(reactor.run(lambda: print("runs"), 60.0))
reactor.close()
"""


@LIMITS
def test_a_program_at_a_limit_of_the_kernel_gets_errors_and_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=2 * PATIENCE_S)
    if done.stderr.startswith("no other user"):
        pytest.skip(done.stderr.strip())
    assert done.stdout.splitlines() == [
        "[0, 0, 0, 1, 1, 1, 2, 2, 2] 3",
        "True True",
        "True",
        "['MainThread', 'MainThread', 'MainThread']",
        "runs",
        "True",
    ], done.stderr
