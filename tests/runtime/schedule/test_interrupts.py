"""Tests of signal handlers that raise anywhere in a call: the instance stays usable, and other callers lose nothing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.inside import hosted_in, registry_of
from tests.runtime.adders import CONFIG, rows, write_model
from tests.runtime.held_batches import Caller, holding, queued
from tests.runtime.interrupting import PACKAGES, Interrupted, RaisesAt, interrupted_everywhere, interrupted_once
from tests.runtime.recorder import PATIENCE_S, Recorder, config, row
from tests.waiting import wait_until

from moonpool import MoonpoolError, ResponseStream, Runtime
from moonpool.runtime.schedule.lane import IS_COMPILED, Execution
from moonpool.runtime.schedule.scheduler import Scheduler
from moonpool.runtime.stubs.borrowed_blocks import BorrowedBlocks

ROOT = Path(__file__).parents[3]
BATCHING = {"max_batch_size": 8, "dynamic_batching": {}}
# A process that was interrupted in a form which calls Python counts as no death. These allow none.
STRICT = {"MOONPOOL_MAX_RESTARTS": {"string_value": "0"}}


@contextlib.contextmanager
def notebook_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Make a loop of the main thread that runs again and again, as that of a notebook."""
    loop = asyncio.new_event_loop()
    # By default it logs what callbacks raise, with all that the tracebacks refer to.
    loop.set_exception_handler(lambda *_: None)
    try:
        yield loop
    finally:
        loop.close()


def interrupt_everywhere(hosted: Hosted, ask: Ask, *, step: int = 1, again: int = 0) -> int:
    """Interrupt a way to ask at one event after the other, and check after each that all goes on. Returns the number of
    events.
    """
    with notebook_loop() as loop:

        def check() -> None:
            # The loop goes on, and all tasks come to their ends.
            pending = asyncio.all_tasks(loop)
            if pending:
                loop.run_until_complete(asyncio.wait(pending))
            hosted.check()

        act = partial(ask, hosted.runtime, loop)
        return interrupted_everywhere(act, check, step=step, again=again)


Ask = Callable[[Runtime, asyncio.AbstractEventLoop], None]
# Ways to ask a model. Each may be interrupted anywhere.


def infer(runtime: Runtime, _: asyncio.AbstractEventLoop) -> None:
    runtime.infer("m", rows(1))


def infer_in_time(runtime: Runtime, _: asyncio.AbstractEventLoop) -> None:
    runtime.infer("m", rows(1), timeout_s=PATIENCE_S)


def request(runtime: Runtime, _: asyncio.AbstractEventLoop) -> None:
    runtime.request("m", rows(1), request_id="mine")


def submit(runtime: Runtime, _: asyncio.AbstractEventLoop) -> None:
    runtime.submit("m", rows(1)).result(PATIENCE_S)


def cancel(runtime: Runtime, _: asyncio.AbstractEventLoop) -> None:
    runtime.submit("m", rows(1)).cancel()


def stream(runtime: Runtime, _: asyncio.AbstractEventLoop) -> None:
    for _response in runtime.stream("m", rows(1), timeout_s=PATIENCE_S):
        pass


def ainfer(runtime: Runtime, loop: asyncio.AbstractEventLoop) -> None:
    loop.run_until_complete(runtime.ainfer("m", rows(1)))


def arequest(runtime: Runtime, loop: asyncio.AbstractEventLoop) -> None:
    loop.run_until_complete(runtime.arequest("m", rows(1), request_id="mine"))


def tasks(runtime: Runtime, loop: asyncio.AbstractEventLoop) -> None:
    async def ask() -> None:
        await asyncio.gather(*[runtime.ainfer("m", rows(i)) for i in range(3)])

    loop.run_until_complete(ask())


def task_stream(runtime: Runtime, loop: asyncio.AbstractEventLoop) -> None:
    async def read() -> list[Any]:
        return [each async for each in runtime.stream("m", rows(1), timeout_s=PATIENCE_S)]

    assert len(loop.run_until_complete(read())) == 1


def empty(runtime: Runtime, _: asyncio.AbstractEventLoop) -> None:
    placed = runtime.empty("m", "A", (1, 1))
    placed[:] = 1
    runtime.infer("m", {"A": placed, "B": np.ones((1, 1), np.float32)})


ASKING = [infer, infer_in_time, request, submit, cancel, stream, ainfer, arequest, tasks, empty]
# More events than a call has.
MANY = 10**9
# What shows a model and changes nothing of it.
SHOWING: dict[str, tuple[Any, ...]] = {
    "models": (),
    "is_ready": ("m",),
    "why_not_ready": ("m",),
    "config": ("m",),
    "statistics": ("m",),
    "log_settings": (),
    "metrics": (),
    "instances": ("m",),
}


class Hosted:
    """A runtime whose model `m` is used by others while the main thread is interrupted."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Let the model answer nothing."""
        pid = self.runtime.instances("m")[0]["pid"] or 0
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def check(self) -> None:
        """Check that a thread and a future are answered, and that nothing is left of the interrupted request."""
        others: list[Any] = []
        scheduler: Any = hosted_in(self.runtime, "m").scheduler
        # A second signal may have come before the reactor was woken, which would look within seconds.
        scheduler.reactor.wake()

        def ask() -> None:
            others.append(self.runtime.infer("m", rows(2), timeout_s=PATIENCE_S)["SUM"].flat[0])

        thread = threading.Thread(target=ask)
        thread.start()
        assert self.runtime.submit("m", rows(3)).result(PATIENCE_S).outputs["SUM"].flat[0] == 4
        thread.join()
        assert others == [3]
        # The reactor may still have what the caller left.
        wait_until(lambda: not scheduler.executing, PATIENCE_S)
        assert not scheduler.queued


@contextlib.contextmanager
def hosting(folder: Path) -> Iterator[Hosted]:
    model = write_model(folder, "m", 1, config=CONFIG + "dynamic_batching {}")
    with Runtime() as runtime:
        runtime.load("m", model, instances=1, config={"parameters": STRICT})
        # So there is a region for this.
        runtime.empty("m", "A", (1, 1))
        yield Hosted(runtime)


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    with hosting(tmp_path_factory.mktemp("models")) as hosted:
        yield hosted


@pytest.mark.promise("Requests", "A caller that gives up, is …")
@pytest.mark.parametrize("ask", ASKING, ids=lambda ask: ask.__name__)
def test_a_handler_may_raise_at_any_line_of_a_request(hosted: Hosted, ask: Ask) -> None:
    # Where all is compiled, a request has few lines.
    assert interrupt_everywhere(hosted, ask) > 10
    (instance,) = hosted.runtime.instances("m")
    assert (instance["state"], instance["restarts"]) == ("READY", 0)


@pytest.mark.parametrize("name", SHOWING)
def test_a_handler_may_raise_at_any_line_of_what_shows_a_model(hosted: Hosted, name: str) -> None:
    show = partial(getattr(hosted.runtime, name), *SHOWING[name])
    with RaisesAt(MANY) as counts:
        show()
    events = MANY - counts.left[0]
    assert interrupted_everywhere(show, lambda: None, step=max(1, events // 20)) > 1
    hosted.check()
    assert show() is not None or name == "why_not_ready"


def test_a_handler_may_raise_at_any_line_of_a_stream_in_a_task(hosted: Hosted) -> None:
    assert interrupt_everywhere(hosted, task_stream) > 20


def test_another_task_finds_the_end_of_a_stream_whose_close_is_interrupted(hosted: Hosted) -> None:
    with notebook_loop() as loop:
        streams: list[ResponseStream] = []

        async def read() -> list[Any]:
            return [each async for each in streams[0]]

        async def close() -> None:
            reading = asyncio.ensure_future(read())
            await asyncio.sleep(0)
            streams[0].close()
            await reading

        def ask() -> None:
            streams[:] = [hosted.runtime.stream("m", rows(1), timeout_s=PATIENCE_S)]
            loop.run_until_complete(close())

        def check() -> None:
            for task in asyncio.all_tasks(loop):
                loop.run_until_complete(task)
            hosted.check()

        assert interrupted_everywhere(ask, check) > 20


def test_what_a_handler_raises_while_a_stream_is_closed_reaches_its_caller(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hosted.stopped():
        stream = hosted.runtime.stream("m", rows(1), timeout_s=PATIENCE_S)
        with monkeypatch.context() as patch:
            interrupted_once(patch, Scheduler, "leave_soon")
            with pytest.raises(Interrupted):
                stream.close()
    hosted.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("again", [1, 4])
@pytest.mark.parametrize("ask", [infer_in_time, submit, stream], ids=lambda ask: ask.__name__)
def test_a_second_handler_may_raise_while_the_first_one_s_exception_leaves(
    hosted: Hosted, ask: Ask, again: int
) -> None:
    interrupt_everywhere(hosted, ask, step=5, again=again)


def test_a_handler_may_raise_at_any_line_of_waiting_for_a_future(hosted: Hosted) -> None:
    futures: list[concurrent.futures.Future[Any]] = []

    def ask() -> None:
        futures.append(hosted.runtime.submit("m", rows(1)))
        try:
            futures[-1].result(PATIENCE_S)
        except RuntimeError as error:
            # CPython's own: the wait was interrupted before it had its lock again, which `with` releases.
            raise error.__context__ or error from None

    def check() -> None:
        hosted.check()
        # A lock that was left taken is the main thread's own, which can go on.
        for future in futures:
            assert future.result(PATIENCE_S).outputs["SUM"].flat[0] == 2
        futures.clear()

    futures_of_python = Path(concurrent.futures.__file__ or "").with_name("_base.py")
    library = str(futures_of_python), str(Path(threading.__file__ or ""))
    interrupted_everywhere(ask, check, within=(*PACKAGES, *library))


def test_a_handler_may_raise_while_a_request_is_queued(folder: Path) -> None:
    with holding(folder, **BATCHING) as (backend, runtime):
        scheduler: Any = hosted_in(runtime, "m").scheduler
        first = Caller(runtime, row(0))
        held = backend.wait_for(1)

        def ask() -> None:
            with pytest.raises(MoonpoolError):
                runtime.infer("m", row(1), timeout_s=0.001)

        def check() -> None:
            # The handler may have raised right before the reactor was woken, which would look within seconds.
            scheduler.reactor.wake()
            wait_until(lambda: not scheduler.queued, PATIENCE_S)

        interrupted_everywhere(ask, check)
        backend.is_quick = True
        held.answer()
        assert first.result() == 0
        assert backend.sent == [[0]]


@pytest.mark.parametrize("batching", ["sequences", "in order", "alone"])
def test_a_handler_may_raise_in_a_request_that_no_form_takes(folder: Path, batching: str) -> None:
    changes: dict[str, dict[str, Any]] = {
        "sequences": {"sequence_batching": {"max_sequence_idle_microseconds": 1000}},
        "in order": {"max_batch_size": 8, "dynamic_batching": {"preserve_ordering": True}},
        "alone": {},
    }
    options: Any = {"correlation_id": 1, "flags": 3} if batching == "sequences" else {}
    inputs = {"X": np.ones(2, np.float32)} if batching != "in order" else row(1)
    with holding(folder, **changes[batching]) as (backend, runtime):
        backend.is_quick = True
        scheduler: Any = hosted_in(runtime, "m").scheduler

        def check() -> None:
            runtime.infer("m", inputs, timeout_s=PATIENCE_S, **options)
            wait_until(lambda: not scheduler.executing, PATIENCE_S)
            assert not scheduler.queued

        interrupted_everywhere(lambda: runtime.infer("m", inputs, **options), check)
    backend.check_pairs()


# Loads and their ends


def test_a_handler_may_raise_at_any_line_of_a_load_and_an_unload(folder: Path) -> None:
    backend = Recorder()
    with Runtime(backends=[backend]) as runtime:
        load = partial(runtime.load, "m", folder, config=config())

        def check() -> None:
            load()
            assert runtime.infer("m", {"X": np.ones(1, np.float32)}, timeout_s=PATIENCE_S)["Y"] == 1
            runtime.unload("m")

        def load_and_unload() -> None:
            load()
            runtime.scale("m", 2)
            runtime.unload("m")

        assert interrupted_everywhere(load_and_unload, check) > 100
    backend.check_pairs()


def test_a_handler_may_raise_at_any_line_of_a_task_that_loads_and_unloads(folder: Path) -> None:
    backend = Recorder()
    with Runtime(backends=[backend]) as runtime, notebook_loop() as loop:
        aload = partial(runtime.aload, "m", folder, config=config())

        async def load_and_unload() -> None:
            await aload()
            await runtime.ascale("m", 2)
            await runtime.aunload("m")

        def check() -> None:
            # The task that was interrupted has left nothing at work.
            assert not asyncio.all_tasks(loop)
            loop.run_until_complete(aload())
            answer = runtime.ainfer("m", {"X": np.ones(1, np.float32)}, timeout_s=PATIENCE_S)
            assert loop.run_until_complete(answer)["Y"] == 1
            loop.run_until_complete(runtime.aunload("m"))

        act = lambda: loop.run_until_complete(load_and_unload())  # noqa: E731
        assert interrupted_everywhere(act, check, step=5) > 100
    backend.check_pairs()


def test_a_handler_that_raises_in_a_load_lets_the_load_of_another_thread_go_on(folder: Path) -> None:
    entered, goes_on = threading.Event(), threading.Event()

    class Slow(Recorder):
        def model_initialize(self, model: Any) -> None:
            super().model_initialize(model)
            entered.set()
            assert goes_on.wait(PATIENCE_S)

    with Runtime(backends=[Slow()]) as runtime:
        load = partial(runtime.load, "m", folder, config=config())
        other = threading.Thread(target=load)
        other.start()
        assert entered.wait(PATIENCE_S)
        # The main thread waits for the model lock then.
        with pytest.raises(Interrupted), RaisesAt(10, within=(threading.__file__,)):
            load()
        goes_on.set()
        other.join()
        assert runtime.models() == {"m": [1]}


@pytest.mark.parametrize("method", ["close", "aclose"])
def test_a_handler_may_raise_at_any_line_of_a_close(folder: Path, method: str) -> None:
    with notebook_loop() as loop:
        for number in itertools.count(1, 1 if method == "close" else 3):
            backend = Recorder()
            runtime = Runtime(backends=[backend])
            runtime.load("m", folder, config=config())
            raises = RaisesAt(number)
            with contextlib.suppress(Interrupted), raises:
                if method == "close":
                    runtime.close()
                else:
                    loop.run_until_complete(runtime.aclose())
            # What was begun ends by itself, and a second close waits for that.
            runtime.close()
            backend.check_pairs()
            if not raises.is_over:
                break
    assert number > 30


# The others that are interrupted here.
LOADING = {"load", "aload", "scale", "ascale", "unload", "aunload", "close", "aclose"}


# These hold what `stream` returns and nothing else, and its destructor cancels the request.
STREAMING = {"chat", "achat", "embed"}


def test_each_method_of_a_runtime_is_interrupted_by_a_test() -> None:
    methods = {name for name in dir(Runtime) if name[0] != "_" and callable(getattr(Runtime, name))}
    asking = methods & {ask.__name__ for ask in ASKING}
    assert methods == asking | SHOWING.keys() | LOADING | STREAMING


def test_all_runtimes_are_closed_at_the_end_whatever_one_of_them_raises(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moonpool.runtime.runtime import _close_all

    monkeypatch.setattr("moonpool.runtime.runtime._open_registries", set())

    def close_and_raise(close: Callable[[], None]) -> None:
        close()
        raise Interrupted

    runtimes = [Runtime(backends=[Recorder()]) for _ in range(3)]
    for runtime in runtimes:
        runtime.load("m", folder, config=config())
        registry = registry_of(runtime)
        monkeypatch.setattr(registry, "close", partial(close_and_raise, registry.close))

    with pytest.raises(Interrupted):
        _close_all()

    assert all(registry_of(runtime).is_closed for runtime in runtimes)
    monkeypatch.undo()
    for runtime in runtimes:
        runtime.close()


# Drivers


# In these methods a thread that drives for others is interrupted, before or after their work.
DRIVING: list[tuple[type, str, bool]] = [(Scheduler, "finish", False), (Scheduler, "finish", True)]
# A lane that is not compiled has the reactor finish in place of such a thread.
if not IS_COMPILED:
    DRIVING = [(Execution, "drive", False), (Execution, "drive", True)]


@pytest.mark.parametrize(("owner", "name", "after"), DRIVING)
def test_the_others_are_answered_when_the_thread_that_drives_is_interrupted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: bool
) -> None:
    with holding(folder, **BATCHING) as (backend, runtime):
        first = runtime.submit("m", row(0))
        others: list[Caller] = []

        def act() -> None:
            # The main thread is the first in the batch, so it drives the batch.
            queued(runtime, 1)
            for i in (2, 3):
                others.append(Caller(runtime, row(i)))
                queued(runtime, i)
            backend.wait_for(1).answer()
            held = backend.wait_for(2)
            behind.append(Caller(runtime, row(4)))
            queued(runtime, 1)
            backend.is_quick = True
            held.answer()

        behind: list[Caller] = []
        thread = threading.Thread(target=act)
        with monkeypatch.context() as patch:
            interrupted_once(patch, owner, name, after=after)
            thread.start()
            with pytest.raises(Interrupted):
                runtime.infer("m", row(1))
            thread.join()
            assert [caller.result() for caller in (*others, *behind)] == [2, 3, 4]
        assert first.result(PATIENCE_S).outputs["Y"].flat[0] == 0
        assert backend.sent[1:] == [[1, 2, 3], [4]]
        assert runtime.instances("m")[0]["restarts"] == 0


@pytest.mark.promise(
    "Lifecycle",
    "If a signal handler raises while a caller sends a batch or reads its answer, the process may have to end. That "
    "counts as no death of the model.",
)
def test_an_end_that_an_interrupted_caller_causes_is_no_death_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not IS_COMPILED:
        pytest.skip("the lane is not compiled, so this thread takes no step of it")
    with hosting(tmp_path) as hosted:
        ask = hosted.runtime.infer
        for i in range(3):
            ask("m", rows(1))
            with monkeypatch.context() as patch:
                # The form that sends a batch of a size class that has not come before calls this.
                interrupted_once(patch, BorrowedBlocks, "allocate")
                with pytest.raises(Interrupted):
                    ask("m", rows(*range(200 << i)))
            hosted.check()
            assert hosted.runtime.instances("m")[0]["restarts"] == i + 1


PROGRAM = """
import signal, sys, threading
import numpy as np
import moonpool


class Interrupted(BaseException):
    pass


armed = False


def handle(*_):
    global armed
    if armed:
        armed = False
        raise Interrupted


# If a handler raises while an object is collected, Python only prints that.
sys.unraisablehook = lambda unraisable: None
x = np.ones((1, 4), np.float32)
errors, done = [], threading.Event()


def ask():
    while not done.is_set():
        try:
            assert runtime.infer("m", {"A": x, "B": x}, timeout_s=60.0)["SUM"].sum() == 8
        except BaseException as error:
            errors.append(repr(error))


options = {"MOONPOOL_MAX_RESTARTS": "100000", "MOONPOOL_RESTART_BACKOFF_S": "0"}
options["MOONPOOL_RETRY"] = "yes"
parameters = {key: {"string_value": value} for key, value in options.items()}
with moonpool.Runtime() as runtime:
    runtime.load("m", sys.argv[1], instances=1, config={"parameters": parameters})
    threads = [threading.Thread(target=ask) for _ in range(int(sys.argv[2]))]
    for thread in threads:
        thread.start()
    signal.signal(signal.SIGALRM, handle)
    count = 0
    for i in range(300):
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + (i * 37 % 300) * 1e-5)
            while armed:
                runtime.infer("m", {"A": x, "B": x}, timeout_s=60.0)
        except Interrupted:
            count += 1
        armed = False
    for _ in range(100):
        assert runtime.infer("m", {"A": x, "B": x}, timeout_s=60.0)["SUM"].sum() == 8
    done.set()
    for thread in threads:
        thread.join()
    scheduler = runtime._models.find("m").scheduler
    assert scheduler.queued == scheduler.executing == 0
assert not errors, errors
assert count > 100, count
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("others", [0, 3])
def test_interrupts_at_any_moment_break_nothing(tmp_path: Path, others: int) -> None:
    from tests.runtime.adders import CONFIG, write_model

    folder = write_model(tmp_path, "m", 1, config=CONFIG + "dynamic_batching {}")
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(others)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert (program.returncode, program.stdout) == (0, "done\n"), program.stderr[-3000:]
