"""The compiled port and lane take what is usual, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import Config, hosted, tensor
from tests.e2e.test_ways_agree import link_of
from tests.inside import hosted_in
from tests.runtime.interrupting import interrupted_everywhere
from tests.runtime.lane.built import counts, port_on, skip_without_compiled
from tests.waiting import wait_until

import moonpool
from moonpool.ipc.channel import Channel
from moonpool.ipc.messages import NO_CORE
from moonpool.ipc.tensors import CODES
from moonpool.runtime.model.request import Response, WireTensor
from moonpool.runtime.schedule.callers import FutureWaiter
from moonpool.runtime.schedule.event_loop import wait_for_outcome
from moonpool.runtime.server.inference.request import make_request
from moonpool.runtime.stubs.handle import StubHandle

PATIENCE_S = 60.0
ROOT = Path(__file__).parents[3]
MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(request, "X").as_numpy() * 2)]
            )
            for request in requests
        ]
"""
CONFIG: Config = {
    "max_batch_size": 8,
    "input": [tensor("X", "FP32", -1)],
    "output": [tensor("Y", "FP32", -1)],
    "dynamic_batching": {},
}
X = np.array([[1.0, 2.0]], np.float32)


@pytest.fixture(autouse=True)
def _with_what_is_compiled() -> None:
    skip_without_compiled()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[moonpool.Runtime]:
    file = tmp_path_factory.mktemp("usual") / "double.py"
    file.write_text(MODEL)
    with moonpool.Runtime() as runtime, hosted(runtime, "double", file, CONFIG):
        for _ in range(3):
            runtime.infer("double", {"X": X})
        # The memory of callers stays for the next ones.
        placed = runtime.empty("double", "X", X.shape)
        placed[:] = X
        runtime.infer("double", {"X": placed})
        del placed
        yield runtime


@pytest.fixture
def on_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[moonpool.Runtime]:
    """Load the model where its work channel stays a socket, as without compiled code in the stub."""
    monkeypatch.setattr(StubHandle, "may_use_slots", False)
    file = tmp_path / "double.py"
    file.write_text(MODEL)
    with moonpool.Runtime() as runtime, hosted(runtime, "double", file, CONFIG):
        yield runtime


def taken(before: dict[str, int]) -> dict[str, int]:
    """Return how often each method of the port did its work since then."""
    return {name: count - before[name] for name, count in counts().items()}


def test_a_small_output_that_is_passed_on_is_copied_by_the_port(model: moonpool.Runtime) -> None:
    passed_on = model.infer("double", {"X": X})["Y"]
    before = counts()
    again = model.infer("double", {"X": passed_on})["Y"]

    assert taken(before)["put"] == 1
    assert again.tolist() == (X * 4).tolist()


def test_memory_that_a_caller_writes_itself_is_lent_whatever_its_size(model: moonpool.Runtime) -> None:
    placed = model.empty("double", "X", X.shape)
    placed[:] = X
    before = counts()
    doubled = model.infer("double", {"X": placed})["Y"]

    done = taken(before)
    assert (done["put"], done["copied_bytes"]) == (1, 0)
    assert doubled.tolist() == (X * 2).tolist()


def test_a_large_output_that_is_passed_on_is_lent(model: moonpool.Runtime) -> None:
    large = np.ones((1, 1 << 15), np.float32)
    for _ in range(2):
        passed_on = model.infer("double", {"X": large})["Y"]
        before = counts()
        again = model.infer("double", {"X": passed_on})["Y"]

    done = taken(before)
    assert (done["put"], done["copied_bytes"]) == (1, 0)
    assert (again == 4).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"timeout_s": PATIENCE_S},
        {"request_id": "a", "priority": 1, "queue_timeout_us": 10**9},
        {"parameters": {"text": "é", "number": -1, "real": 0.5, "flag": True}},
    ],
    ids=["with nothing else", "with a deadline", "with an id", "with parameters"],
)
def test_a_lone_request_is_made_sent_awaited_and_read_by_the_port(
    model: moonpool.Runtime, options: dict[str, Any]
) -> None:
    before = counts()
    for _ in range(10):
        assert model.infer("double", {"X": X}, **options)["Y"].tolist() == [[2.0, 4.0]]
    done = taken(before)
    assert {name: done[name] for name in ("request", "wait", "put", "take")} == {
        "request": 10,
        "wait": 10,
        "put": 10,
        "take": 10,
    }


@pytest.mark.parametrize("channel", ["memory", "a socket"])
@pytest.mark.parametrize("timeout_s", [0, 0.05])
def test_a_caller_leaves_at_its_deadline_and_not_before(
    request: pytest.FixtureRequest, channel: str, timeout_s: float
) -> None:
    fixture = "model" if channel == "memory" else "on_a_socket"
    runtime: moonpool.Runtime = request.getfixturevalue(fixture)
    pid = runtime.instances("double")[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(moonpool.RequestTimedOut):
            runtime.infer("double", {"X": X}, timeout_s=timeout_s)
        assert timeout_s <= time.monotonic() - began < PATIENCE_S
    finally:
        os.kill(pid, signal.SIGCONT)
    # The reactor reads the answer that nobody waits for.
    assert runtime.infer("double", {"X": X}, timeout_s=PATIENCE_S)["Y"].tolist() == [[2.0, 4.0]]


def test_requests_of_many_threads_and_tasks_are_sent_and_read_by_the_port(model: moonpool.Runtime) -> None:
    async def ask_all() -> None:
        await asyncio.gather(*(model.ainfer("double", {"X": X}) for _ in range(200)))

    before = counts()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: model.infer("double", {"X": X}), range(200)))
    asyncio.run(ask_all())
    done = taken(before)
    assert done["request"] == 400
    # How many requests are in a batch depends on who comes first.
    assert done["put"] > 10
    assert done["take"] == done["put"]


def test_a_request_of_a_client_is_sent_and_read_by_the_port(model: moonpool.Runtime) -> None:
    hosted = hosted_in(model, "double")

    async def ask() -> WireTensor:
        request = make_request(hosted, {"X": X})
        outcome = await wait_for_outcome(hosted.scheduler, request, PATIENCE_S)
        assert isinstance(outcome, Response)
        return outcome.outputs["Y"]  # type: ignore[return-value]

    before = counts()
    output = asyncio.run(ask())
    done = taken(before)
    assert {done[name] for name in ("request", "put", "take")} == {1}
    assert type(output) is WireTensor
    assert output[:2] == (CODES["FP32"], X.shape)
    assert output.raw.tobytes() == (X * 2).tobytes()


def test_strings_for_a_client_are_read_by_the_port(tmp_path: Path) -> None:
    file = tmp_path / "texts.py"
    file.write_text(MODEL.replace(" * 2", ""))
    config = {**CONFIG, **{put: [tensor(name, "STRING", -1)] for put, name in (("input", "X"), ("output", "Y"))}}
    texts = np.array([["a", "moon"]], object)
    with moonpool.Runtime() as runtime, hosted(runtime, "texts", file, config):
        model = hosted_in(runtime, "texts")

        async def ask() -> WireTensor:
            outcome = await wait_for_outcome(model.scheduler, make_request(model, {"X": texts}), PATIENCE_S)
            assert isinstance(outcome, Response)
            return outcome.outputs["Y"]  # type: ignore[return-value]

        asyncio.run(ask())
        before = counts()
        output = asyncio.run(ask())
        assert taken(before)["take"] == 1
        assert output[:2] == (CODES["BYTES"], (1, 2))
        assert output.raw.tobytes() == b"\1\0\0\0a\4\0\0\0moon"
        # As an array they are decoded there, too.
        assert runtime.infer("texts", {"X": texts})["Y"].tolist() == [[b"a", b"moon"]]
        assert taken(before)["take"] == 2
        del output


def test_a_view_of_ordinary_memory_is_sent_by_the_port(model: moonpool.Runtime) -> None:
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    model.infer("double", {"X": values})
    before = counts()
    assert np.array_equal(model.infer("double", {"X": values})["Y"], values * 2)
    assert taken(before)["put"] == 1


def test_an_interrupt_at_any_call_of_a_usual_request_leaves_a_usable_model(tmp_path: Path) -> None:
    file = tmp_path / "double.py"
    file.write_text(MODEL)
    # An instance that is interrupted while it takes a batch or gives an answer counts as lost.
    limits = {"MOONPOOL_MAX_RESTARTS": "1000", "MOONPOOL_RESTART_BACKOFF_S": "0"}
    parameters = {key: {"string_value": value} for key, value in limits.items()}
    with moonpool.Runtime() as runtime, hosted(runtime, "double", file, {**CONFIG, "parameters": parameters}):
        scheduler = hosted_in(runtime, "double").scheduler

        def check() -> None:
            assert runtime.infer("double", {"X": X}, timeout_s=PATIENCE_S)["Y"].flat[0] == 2
            wait_until(lambda: not scheduler.executing, PATIENCE_S)

        check()
        kept: list[object] = []
        # Outputs that ended inside would end with the exception, too.
        assert interrupted_everywhere(lambda: kept.append(runtime.infer("double", {"X": X})), check) > 5


# It answers when the file is there.
WAITING = MODEL.replace(
    "        return [", "        while not os.path.exists({path!r}):\n            time.sleep(0.001)\n        return ["
).replace("import triton", "import os, time\nimport triton")


def test_every_caller_of_a_batch_gets_its_outcome_whatever_the_waiter_of_another_one_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Planned(BaseException):
        pass

    file, goes_on = tmp_path / "double.py", tmp_path / "goes_on"
    file.write_text(WAITING.format(path=str(goes_on)))
    raising: list[object] = []
    resolve = FutureWaiter.resolve

    def resolve_or_raise(self: FutureWaiter, outcome: Any) -> None:
        resolve(self, outcome)
        if self.future in raising:
            raise Planned

    with moonpool.Runtime() as runtime, hosted(runtime, "double", file, CONFIG):
        goes_on.touch()
        for _ in range(3):
            runtime.infer("double", {"X": X})
        goes_on.unlink()
        first = runtime.submit("double", {"X": X})
        monkeypatch.setattr(FutureWaiter, "resolve", resolve_or_raise)
        batch = [runtime.submit("double", {"X": X}) for _ in range(4)]
        raising += batch[:2]
        behind = [runtime.submit("double", {"X": X}) for _ in range(4)]
        before = counts()["take"]
        goes_on.touch()
        for each in (first, *batch, *behind):
            assert each.result(PATIENCE_S).outputs["Y"].flat[0] == 2
        assert runtime.infer("double", {"X": X}, timeout_s=PATIENCE_S)["Y"].flat[0] == 2
        assert counts()["take"] > before
    # The traceback in the log has the responses.
    caplog.clear()


def test_the_reactor_ends_a_batch_of_the_main_thread_with_which_a_process_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "double.py"
    file.write_text(MODEL)
    recycles = {"parameters": {"MOONPOOL_RECYCLE_REQUESTS": {"string_value": "4"}}}
    with moonpool.Runtime() as runtime, hosted(runtime, "double", file, CONFIG | recycles):
        before, taken_so_far = runtime.instances("double")[0]["pid"], counts()["take"]
        for _ in range(10):
            assert runtime.infer("double", {"X": X}, timeout_s=PATIENCE_S)["Y"].flat[0] == 2
        assert counts()["take"] > taken_so_far
        wait_until(lambda: runtime.instances("double")[0]["pid"] not in (before, None), PATIENCE_S)


def test_a_future_has_its_outcome_from_a_batch_that_the_main_thread_drives(tmp_path: Path) -> None:
    file, goes_on = tmp_path / "double.py", tmp_path / "goes_on"
    file.write_text(WAITING.format(path=str(goes_on)))
    with moonpool.Runtime() as runtime, hosted(runtime, "double", file, CONFIG):
        scheduler = hosted_in(runtime, "double").scheduler
        goes_on.touch()
        for _ in range(3):
            runtime.infer("double", {"X": X})
        goes_on.unlink()
        first = runtime.submit("double", {"X": X})
        futures: list[Future[Response]] = []

        def submit() -> None:
            # The caller of the main thread is the first one in the next batch, which it therefore drives.
            wait_until(lambda: scheduler.queued == 1, PATIENCE_S)
            futures.extend(runtime.submit("double", {"X": X}) for _ in range(3))
            goes_on.touch()

        with ThreadPoolExecutor(1) as pool:
            submitted = pool.submit(submit)
            assert runtime.infer("double", {"X": X})["Y"].flat[0] == 2
            submitted.result(PATIENCE_S)
        for each in (first, *futures):
            assert each.result(PATIENCE_S).outputs["Y"].flat[0] == 2
        wait_until(lambda: not scheduler.executing, PATIENCE_S)


def test_requests_leave_no_objects_behind(model: moonpool.Runtime) -> None:
    def ask(count: int) -> None:
        for _ in range(count):
            model.infer("double", {"X": X})

    ask(1000)
    # Anything that was left behind by each request would be there a thousand times.
    before, constants = sys.getallocatedblocks(), (None, True, False, 0, "", np.dtype("f4"))
    counts = [sys.getrefcount(each) for each in constants]
    ask(5000)
    after = [sys.getrefcount(each) for each in constants]
    assert sys.getallocatedblocks() - before < 1000
    assert all(abs(one - other) < 1000 for one, other in zip(counts, after, strict=True))


def _infer_in_a_loop(model: moonpool.Runtime) -> None:
    asyncio.run(model.ainfer("double", {"X": X}))


@pytest.mark.parametrize(
    "infer", [lambda model: model.infer("double", {"X": X}), _infer_in_a_loop], ids=["thread", "loop"]
)
def test_a_lone_caller_looks_for_an_answer_from_another_core_while_that_helps(
    on_a_socket: moonpool.Runtime, infer: Callable[[moonpool.Runtime], object]
) -> None:
    model = on_a_socket
    port: Any = link_of(model, "double").port
    before = port.look_ns

    def rests_after(look_ns: int, core: int, rests: int) -> int:
        port.look_ns, port.core, port.rests = look_ns, core, rests
        infer(model)
        return int(port.rests)

    # No thread runs on this core; one that is not known is no reason to look.
    other = NO_CORE - 1
    minute_ns = 60_000_000_000
    try:
        assert rests_after(minute_ns, other, 0) == 0
        # The stub may be so quick that the first glance finds the answer.
        wait_until(lambda: rests_after(1, other, 0) == 63, PATIENCE_S)
        assert rests_after(minute_ns, other, 63) == 62
        assert rests_after(1, NO_CORE, 0) == 0
        assert rests_after(0, other, 0) == 0
    finally:
        port.look_ns = before


class _Interrupted(Exception):
    """The exception of the signal handler."""


@pytest.mark.parametrize("raises", [False, True])
def test_a_signal_while_an_answer_is_awaited_loses_no_packet(raises: bool) -> None:
    ours, theirs = Channel.pair()
    waiting = port_on(ours)
    handled = threading.Event()

    def handle(*_: object) -> None:
        handled.set()
        if raises:
            raise _Interrupted

    def interrupt() -> None:
        main = threading.main_thread().ident or 0

        def is_handled() -> bool:
            if not handled.is_set():
                signal.pthread_kill(main, signal.SIGUSR1)
            return handled.is_set()

        wait_until(is_handled, PATIENCE_S)
        theirs.send(b"answer")

    def start_and_wait() -> None:
        thread.start()
        waiting.wait()

    previous = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=interrupt)
    try:
        if raises:
            with pytest.raises(_Interrupted):
                start_and_wait()
            thread.join()
        else:
            start_and_wait()
        waiting.wait()
        assert ours.receive() == b"answer"
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, previous)
        ours.close()
        theirs.close()
