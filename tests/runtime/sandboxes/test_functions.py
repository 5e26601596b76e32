"""Source calls functions of its caller by name, and cannot do more with that than call them."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import moonpool
from moonpool.runtime.sandboxes import worker
from moonpool.runtime.sandboxes.pool import MOST_WORKERS, close_pool, the_pool


def search(query: str, most: int = 3) -> list[str]:
    return [f"{query} {number}" for number in range(most)]


def summed(x: int) -> float:
    return float(doubled(x).sum())  # type: ignore[name-defined]  # noqa: F821 - the caller's function


@pytest.mark.promise("Source", "Source calls functions of its caller by name, on the caller's thread.")
def test_a_function_is_called_on_the_thread_of_the_caller() -> None:
    threads: list[int] = []

    def double(x: np.ndarray) -> np.ndarray:
        threads.append(threading.get_ident())
        x *= 2
        return x

    functions: dict[str, Callable[..., Any]] = {"search": search, "double": double}
    source = "found = search('a', most=2)\nx = np.ones(1 << 17)\ny = double(x)\nfound, y, x[0], search.__name__"
    done = moonpool.run("import numpy as np\n" + source, functions=functions)

    found, y, first, name = done.unwrap()
    assert (found, float(y.sum()), first, name) == (["a 0", "a 1"], 2.0 * (1 << 17), 1.0, "search")
    assert threads == [threading.get_ident()]
    assert done.usage.calls == 2
    assert 0 < done.usage.calls_s <= done.usage.wall_s
    assert moonpool.run(summed, {"x": 4}, functions={"doubled": lambda x: np.full(2, x)}).unwrap() == 8
    assert asyncio.run(moonpool.arun("search('b')", functions=functions)).value == ["b 0", "b 1", "b 2"]
    assert moonpool.run("1", functions=functions).usage.calls == 0


def test_what_goes_wrong_in_a_call_is_told_to_the_source() -> None:
    def fails() -> None:
        raise LookupError("no \x1b[1m such thing")

    functions: dict[str, Callable[..., Any]] = {
        "search": search,
        "fails": fails,
        "odd": object,
        "nothing": lambda: None,
    }
    source = """
told = [nothing()]
for call in (
    lambda: fails(), lambda: search(), lambda: search("a", 1, 2, 3), lambda: odd(), lambda: search(object()),
    lambda: search(b"x" * (80 << 20)),
):
    try:
        call()
    except Exception as error:
        told.append(f"{type(error).__name__}: {error}"[:70])
told
"""
    told = moonpool.run(source, functions=functions, memory="1G").unwrap()
    assert told[0] is None
    assert told[1] == "HostError: LookupError: no \\x1b[1m such thing"
    assert told[2].startswith("HostError: TypeError: search() missing 1 required positional")
    assert told[3].startswith("HostError: TypeError: search() takes from 1 to 2 positional argu")
    assert told[4].startswith("HostError: what odd returned does not travel: a value of the class")
    assert told[5].startswith("TypeError: the arguments of search cannot be sent: a value")
    assert told[6].startswith("OSError: [Errno 27] the arguments of search take 83886080 bytes, more")
    error = moonpool.run("fails()", functions=functions).error
    assert error is not None
    assert str(error) == "HostError: LookupError: no \\x1b[1m such thing"
    assert 'File "<source>", line 1' in error.traceback


def test_functions_are_checked() -> None:
    async def later() -> None:
        pass

    for functions, text in [
        ({"a b": search}, "names that Python can call"),
        ({"class": search}, "names that Python can call"),
        ({"x": search}, "without names of inputs"),
        ({"f": 5}, r"functions\[f\] must be a function"),
        ({"f": later}, r"functions\[f\] must be a function that is not a coroutine"),
        ({5: search}, "a map of names to functions"),
        ([search], "a map of names to functions"),
    ]:
        with pytest.raises(ValueError, match=text):
            moonpool.run("1", {"x": 1}, functions=functions)  # type: ignore[arg-type]


def test_calls_are_counted() -> None:
    done = moonpool.run("while True: search('a')", functions={"search": search}, calls=5)

    assert done.error is not None
    assert (done.error.type, done.error.limit) == ("HostError", "calls")
    assert done.usage.calls == 6


class Clock:
    """Stands in for the module `time`, and may be put forward."""

    def __init__(self) -> None:
        self.more_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.more_s


def test_a_flood_of_calls_ends_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock(), itertools.count(1)

    def search(_: str) -> None:
        if next(calls) == 11:
            clock.more_s = 1000.0

    monkeypatch.setattr(worker, "time", clock)
    source = "print('x' * 100)\nwhile True:\n    try: search('a' * 1000)\n    except RuntimeError: pass"
    done = moonpool.run(source, functions={"search": search}, timeout_s=100)

    assert done.error is not None
    assert done.error.limit == "timeout_s"
    assert done.usage.calls > 10
    assert done.stdout == "x" * 100 + "\n"


def test_threads_of_the_source_may_call_at_once() -> None:
    source = """
import threading
found = []
threads = [threading.Thread(target=lambda n=n: found.append(search(str(n), 1)[0])) for n in range(20)]
[each.start() for each in threads]
[each.join() for each in threads]
sorted(found, key=lambda text: int(text.split()[0]))
"""
    assert moonpool.run(source, functions={"search": search}).unwrap() == [f"{n} 0" for n in range(20)]


def test_a_call_that_the_source_gives_up_harms_no_later_one() -> None:
    source = """
import signal
def late(*_): raise TimeoutError
signal.signal(signal.SIGALRM, late)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    slow()
except TimeoutError:
    pass
search('a', 1)
"""
    slept = threading.Event()
    functions: dict[str, Callable[..., Any]] = {"search": search, "slow": lambda: slept.wait(0.5)}
    assert moonpool.run(source, functions=functions).unwrap() == ["a 0"]
    with moonpool.Sandbox() as box:
        box.run(source.replace("search('a', 1)", "kept = slow"), functions=functions)
        assert box.run("1").unwrap() == 1
        assert str(box.run("kept()").error).startswith("HostError: slow can be called only during a run")


def test_functions_of_a_sandbox_are_those_of_a_run() -> None:
    with moonpool.Sandbox() as box:
        assert box.run("search('a', 1)", functions={"search": search}).unwrap() == ["a 0"]
        assert "can be called only during a run" in str(box.run("search('a', 1)").error)
        error = box.run("search('a', 1)", functions={"find": search}).error
        assert str(error) == "HostError: there is no function search; there are: find"
        assert box.run("find('b', 1)", functions={"find": search}).unwrap() == ["b 0"]


@pytest.mark.promise("Source", "A function that source calls may run source itself.")
def test_a_function_may_run_source() -> None:
    def runs(depth: int) -> int:
        if not depth:
            return 0
        source, functions = "1 + inner(depth - 1)", {"inner": runs}
        # The time of each has those in it that it waits for, and the starts of their processes.
        return int(moonpool.run(source, {"depth": depth}, functions=functions, timeout_s=150).unwrap())

    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(runs(3))) for _ in range(MOST_WORKERS + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == [3] * len(threads)
    with moonpool.Sandbox() as box:
        error = box.run("again()", functions={"again": lambda: box.run("1").value}).error
        assert "in this very thread" in str(error)
        error = box.run("end()", functions={"end": box.close}).error
        assert error is not None
        assert error.type == "Closed"
    close_pool()
    assert moonpool.run("1").unwrap() == 1
    assert len(the_pool()) <= MOST_WORKERS


@pytest.mark.parametrize("way", ["run", "arun"])
def test_source_cannot_nest_runs_without_an_end(way: str) -> None:
    depths: list[int] = []

    def execute(source: str) -> object:
        depths.append(1)
        functions: dict[str, Callable[..., Any]] = {"execute": execute}
        if way == "run":
            return moonpool.run(source, {"source": source}, functions=functions, timeout_s=150).unwrap()
        return asyncio.run(moonpool.arun(source, {"source": source}, functions=functions, timeout_s=150)).unwrap()

    with pytest.raises(moonpool.SandboxError, match="runs are nested deeper than 8"):
        execute("execute(source)")
    assert len(depths) == 10


def test_an_interruption_in_a_function_ends_the_run() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        moonpool.run("f()", functions={"f": interrupted})
    with moonpool.Sandbox() as box:
        box.run("x = 1")
        with pytest.raises(KeyboardInterrupt):
            box.run("f()", functions={"f": interrupted})
        assert box.run("'x' in dir()").state_lost


async def cancels() -> None:
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def begin() -> None:
        loop.call_soon_threadsafe(begun.set)

    source = "while True: begin()"
    task = asyncio.create_task(moonpool.arun(source, functions={"begin": begin}, calls=1 << 30, timeout_s=100))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await moonpool.arun("1")).value == 1


def test_a_task_that_is_cancelled_ends_a_run_that_calls() -> None:
    asyncio.run(cancels())
