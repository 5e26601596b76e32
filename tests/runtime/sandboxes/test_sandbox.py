"""`moonpool.Sandbox`: one namespace from run to run, until its process is gone."""

from __future__ import annotations

import asyncio
import gc
import os
import threading

import numpy as np
import pytest

import moonpool


def twice(x: float) -> float:
    return 2 * x


@pytest.mark.promise("Source", "A `Sandbox` keeps its namespace from run to run, and says when it is lost.")
def test_the_namespace_stays_until_the_process_ends() -> None:
    with moonpool.Sandbox(timeout_s=30) as box:
        assert not box.run("import numpy as np; total = 0").state_lost
        assert box.run("total += x.sum(); total", {"x": np.arange(4)}).unwrap() == 6
        assert str(box.run("total += 1\nraise ValueError('no')").error) == "ValueError: no"
        assert box.run("total").unwrap() == 7
        assert box.run(twice, {"x": 4}).unwrap() == 8
        assert box.run("total, twice(1)").unwrap() == [7, 2]

        late = box.run("while True: pass", timeout_s=0.5)
        assert late.error is not None
        assert late.error.limit == "timeout_s"
        assert not late.state_lost
        after = box.run("'total' in dir()")
        assert (after.value, after.state_lost) == (False, True)
        assert not box.run("1").state_lost
        assert box.run("import os; os._exit(1)").error is not None
        assert box.run("1").state_lost
    with pytest.raises(moonpool.InvalidRequest, match="was closed"):
        box.run("1")


def test_an_answer_stays_as_it_is_when_the_next_one_takes_its_place() -> None:
    with moonpool.Sandbox(files_bytes="256M") as box:
        ones = box.run("import numpy as np; np.ones(1 << 20)").unwrap()
        zeros = box.run("np.zeros(1 << 20)").unwrap()
        few = box.run("np.full(10_000, 7)").unwrap()
        many = box.run("np.full(5 << 20, 9.0)").unwrap()
        again = box.run("np.full(10_000, 8)").unwrap()

    assert ones.all()
    assert not zeros.any()
    assert [set(each.tolist()) for each in (few, many, again)] == [{7}, {9.0}, {8}]
    ones[:] = 2


def test_files_stay_and_come_back_when_they_change() -> None:
    with moonpool.Sandbox() as box:
        assert box.run("open('out/a', 'w').write('1'); open('b', 'w').write('2')").files == {"a": b"1"}
        assert box.run("open('b').read()", files={"c": "3"}).files == {}
        assert box.run("open('out/a', 'a').write(open('c').read())").files == {"a": b"13"}
    with moonpool.Sandbox() as box:
        assert box.run("import os; os.listdir('.')").unwrap() == ["out"]


def test_arrays_of_a_sandbox_are_the_callers_alone() -> None:
    with moonpool.Sandbox() as box:
        box.run("import numpy as np; kept = np.ones(1 << 20)")
        first = box.run("kept").unwrap()
        assert box.run("kept += 1; kept[0]").unwrap() == 2
        assert first.sum() == 1 << 20
        first += 1
        given = np.zeros(1 << 20)
        box.run("kept = x; kept += 1", {"x": given})
        given += 5
        assert box.run("kept.max()").unwrap() == 1


def test_output_of_each_run_is_its_own() -> None:
    with moonpool.Sandbox() as box:
        assert box.run("print(1)").stdout == "1\n"
        pieces: list[str] = []
        assert box.run("print(2)", on_output=lambda text, _: pieces.append(text)).stdout == "2\n"
        assert pieces == ["2\n"]
        assert "line 2" in str(box.run("x = 1\nx / 0").error.traceback)  # type: ignore[union-attr]


def test_a_run_ends_when_its_sandbox_is_closed() -> None:
    box = moonpool.Sandbox(timeout_s=100)
    begun = threading.Event()
    results: list[moonpool.RunResult] = []
    source = "print(1)\nwhile True: pass"
    thread = threading.Thread(target=lambda: results.append(box.run(source, on_output=lambda *_: begun.set())))
    thread.start()
    assert begun.wait(60)
    box.close()
    thread.join()

    assert results[0].error is not None
    assert results[0].error.type == "Closed"


def test_what_gets_the_output_may_close_the_sandbox_but_run_nothing() -> None:
    box = moonpool.Sandbox(timeout_s=100)
    refused: list[str] = []

    def tell(_: str, __: str) -> None:
        try:
            box.run("1")
        except moonpool.InvalidRequest as error:
            refused.append(str(error))
        box.close()

    done = box.run("print(1)\nwhile True: pass", on_output=tell)
    assert done.error is not None
    assert done.error.type == "Closed"
    assert "in this very thread" in refused[0]
    with pytest.raises(moonpool.InvalidRequest, match="was closed"):
        box.run("1")


def test_an_event_loop_may_use_one() -> None:
    asyncio.run(uses_one())


async def uses_one() -> None:
    async with moonpool.Sandbox() as box:
        assert (await box.arun("x = 1; x")).value == 1
        task = asyncio.create_task(box.arun("while True: pass", timeout_s=100))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await box.arun("2")).value == 2


@pytest.mark.promise("Source", "`box.stream` yields what a run prints as it comes, and leaving it ends the run.")
def test_output_can_be_iterated_over() -> None:
    asyncio.run(streams())


async def streams() -> None:
    async with moonpool.Sandbox(timeout_s=100) as box:
        source = "import sys\nfor n in range(3): go(); print(n)\nprint('no', file=sys.stderr)\nx = n"
        stream = box.stream(source + "; x", functions={"go": lambda: None})
        with pytest.raises(moonpool.InvalidRequest, match="no result before the loop"):
            _ = stream.result
        pieces = [piece async for piece in stream]
        assert "".join(text for text, name in pieces if name == "stdout") == stream.result.stdout == "0\n1\n2\n"
        assert "".join(text for text, name in pieces if name == "stderr") == "no\n"
        assert stream.result.unwrap() == 2
        assert [piece async for piece in stream] == []

        # Nobody reads for a while: the run waits, and nothing is lost.
        stream = box.stream("for n in range(40_000): print(str(n) * 20)")
        count = 0
        async for text, _ in stream:
            count += len(text)
            if count < 1 << 20:
                await asyncio.sleep(0)
        assert count == sum(20 * len(str(n)) + 1 for n in range(40_000))

        # It is left in the middle, in four ways.
        endless = "while True: print('x' * 1000)"
        async for _ in box.stream(endless):
            break
        assert (await box.arun("'x' in dir()")).state_lost
        stream = box.stream(endless)
        await stream.__anext__()
        await stream.aclose()
        assert (await box.arun("1")).state_lost
        with pytest.raises(ZeroDivisionError):
            await divides(box.stream(endless))
        assert (await box.arun("1")).state_lost
        begun = asyncio.Event()
        task = asyncio.create_task(reads(box.stream(endless), begun))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await box.arun("1")).state_lost

        with pytest.raises(ValueError, match="files must be"):
            box.stream("1", files={"out": ""})
        stream = box.stream("print(1)\n1 / 0")
        assert [piece async for piece in stream] == [("1\n", "stdout")]
        assert str(stream.result.error) == "ZeroDivisionError: division by zero"
        stream = box.stream(endless)
        await stream.__anext__()
        closing = asyncio.create_task(asyncio.to_thread(box.close))
        async for _ in stream:
            pass
        await closing
        assert stream.result.error is not None
        assert stream.result.error.type == "Closed"


async def divides(stream: moonpool.RunStream) -> None:
    async for text, _ in stream:
        assert len(text) / 0


async def reads(stream: moonpool.RunStream, begun: asyncio.Event) -> None:
    async for _ in stream:
        begun.set()


def test_a_task_that_waits_for_a_run_and_is_cancelled_leaves_it_alone() -> None:
    asyncio.run(waits())


async def waits() -> None:
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with moonpool.Sandbox(timeout_s=100) as box:

        def wait_for_the_end() -> None:
            loop.call_soon_threadsafe(begun.set)
            goes_on.wait()

        goes_on = threading.Event()
        first = asyncio.create_task(box.arun("f(); 1", functions={"f": wait_for_the_end}))
        await begun.wait()
        second = asyncio.create_task(box.arun("2"))
        await asyncio.sleep(0.1)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        goes_on.set()
        assert (await first).value == 1


def test_sandboxes_are_apart() -> None:
    with moonpool.Sandbox() as one, moonpool.Sandbox() as two:
        pids = [box.run("import os; mark = 1; open('x', 'w').write('x'); os.getppid()").unwrap() for box in (one, two)]
        assert len(pids) == 2
        assert two.run("del mark; import os; os.remove('x'); 1").unwrap() == 1
        assert one.run("mark, open('x').read()").unwrap() == [1, "x"]


def test_one_that_nobody_closed_is_taken_back() -> None:
    box = moonpool.Sandbox()
    box.run("1")
    del box
    gc.collect()
    assert moonpool.run("1").unwrap() == 1
    assert os.getpid()


@pytest.mark.promise("Source", "A fork of the program neither uses nor ends the sandboxes of its parent.")
def test_a_fork_leaves_the_sandbox_to_its_parent() -> None:
    with moonpool.Sandbox() as box:
        box.run("x = 7")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with pytest.raises(moonpool.InvalidRequest, match="forked"):
                    box.run("x = 8")
                box.close()
                code = 0
            finally:
                os._exit(code)

        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert box.run("x").value == 7
