"""A stub to which several processes send batches."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, hosted, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.refused_threads import refuse_threads
from tests.server.pool.visitors import SHARED, SHARED_CONFIG, Hall, Visitor, infer, visiting
from tests.waiting import wait_until

import moonpool
from moonpool.ipc.codec import encode
from moonpool.ipc.messages import NO_CORE, Kind
from moonpool.runtime.errors import ModelUnavailable, StubDied
from moonpool.runtime.model.config.model import minimal
from moonpool.runtime.server.pool.attached import AttachedModels
from moonpool.runtime.server.pool.messages import Word
from moonpool.runtime.stubs.link import Link

STUB = "shared_0_0"


@pytest.fixture(scope="module")
def hall() -> Hall:
    return Hall()


@pytest.fixture(scope="module")
def runtime(hall: Hall) -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime(_sharing=hall) as runtime:
        yield runtime


@pytest.fixture(scope="module", autouse=True)
def model(runtime: moonpool.Runtime) -> Iterator[None]:
    # With a time limit, stubs report when they begin a batch.
    config = {**SHARED_CONFIG, **options(EXECUTE_TIMEOUT_S="60")}
    with hosted(runtime, "shared", SHARED, config, instances=1):
        yield


def in_vain(visitor: Visitor) -> threading.Thread:
    """A request that ends only with its cancellation."""

    def ask() -> None:
        with pytest.raises(moonpool.MoonpoolError):
            visitor.infer("until cancelled", 1)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def memory_of(hall: Hall) -> int:
    """Return the number of regions of shared memory that the stub has mapped."""
    maps = Path(f"/proc/{hall.stubs[STUB].process.pid}/maps").read_text()
    return maps.count("/memfd:moonpool-")


@pytest.mark.promise(
    "Front ends",
    "Several processes send batches to one stub, each through channels and memory of its own; "
    "each gets its own answers.",
)
def test_each_gets_its_own_answers(hall: Hall, runtime: moonpool.Runtime) -> None:
    wrong: list[Any] = []

    def ask(where: Any, first: int) -> None:
        for i in range(first, first + 200):
            y = where("twice", i, i + 1)
            if y.tolist() != [2 * i, 2 * i + 2]:
                wrong.append((i, y))

    with visiting(hall, "shared") as one, visiting(hall, "shared") as other:
        places = [one.infer, one.infer, other.infer, lambda *what: infer(runtime, *what)]
        threads = [
            threading.Thread(target=ask, args=(place, 1000 * i)) for i, place in enumerate(places)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.promise("Front ends", "A stub serves its peers in turns, so that none starves.")
def test_nobody_starves(hall: Hall, runtime: moonpool.Runtime) -> None:
    with visiting(hall, "shared") as greedy, visiting(hall, "shared") as modest:
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                greedy.infer("slowly", 1)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for i in range(5):
                assert modest.infer("same", i).tolist() == [i]
                assert infer(runtime, "same", i).tolist() == [i]
        finally:
            stop.set()
            for thread in threads:
                thread.join()


@pytest.mark.promise(
    "Front ends",
    "The end of a peer cancels its requests and frees its memory; what the model keeps of it "
    "stays valid.",
)
def test_the_end_of_one_cancels_its_requests_and_frees_its_memory(
    hall: Hall, runtime: moonpool.Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    seen = infer(runtime, "seen", 0)
    # The stub may still hold regions of earlier visitors, which it is about to close.
    before = 2
    wait_until(lambda: memory_of(hall) == before)
    with visiting(hall, "shared") as visitor:
        # While its answer is kept, the stub cannot give the memory back.
        kept = visitor.infer("big", 1)
        assert memory_of(hall) > before + 2
        assert kept[0] == 1
        thread = in_vain(visitor)
        # If the sender goes before the model has seen its batch, the model never sees it.
        wait_until(lambda: "waits for its cancellation" in caplog.text)
    thread.join()
    assert infer(runtime, "seen", 0) == seen + 1
    wait_until(lambda: memory_of(hall) == before)


@pytest.mark.promise("Front ends", "The end of a peer cancels …")
def test_kept_tensors_of_an_ended_peer_stay_unchanged(
    hall: Hall, runtime: moonpool.Runtime
) -> None:
    with visiting(hall, "shared") as visitor:
        assert visitor.infer("keep", 4, 5).tolist() == [4, 5]
    with visiting(hall, "shared") as visitor:
        assert visitor.infer("kept", 0).tolist() == [4, 5]
        assert infer(runtime, "forget", 1).tolist() == [1]


def test_memory_of_the_models_own_is_of_the_one_that_asks(
    hall: Hall, runtime: moonpool.Runtime
) -> None:
    with visiting(hall, "shared") as visitor:
        assert visitor.infer("in memory", 1, 2).tolist() == [2, 3]
        assert infer(runtime, "in memory", 5).tolist() == [6]
        assert visitor.infer("in memory", 7).tolist() == [8]


def test_an_input_of_one_can_be_passed_on_to_another_model(
    hall: Hall, runtime: moonpool.Runtime
) -> None:
    config = {"input": [tensor("X", "FP32", -1)], "output": [tensor("Y", "FP32", -1)]}
    x = np.arange(50_000, dtype=np.float32)
    with (
        hosted(runtime, "square", MODELS / "square.py", config),
        visiting(hall, "shared", STUB) as visitor,
    ):
        assert np.array_equal(visitor.infer("ask", *x), x * x)
        assert np.array_equal(infer(runtime, "ask", *x), x * x)


def test_large_answers_make_the_memory_of_one_grow(hall: Hall) -> None:
    with visiting(hall, "shared") as visitor:
        for i in range(5):
            kept = visitor.infer("big", i)
            assert kept.shape == (1 << 20,)
            assert (kept == i).all()


def test_a_model_that_keeps_nothing_holds_nothing(hall: Hall, runtime: moonpool.Runtime) -> None:
    with visiting(hall, "shared") as visitor:
        for _ in range(3):
            infer(runtime, "twice", 1)
            visitor.infer("twice", 1)
            assert not hall.stubs[STUB].link.borrowed_blocks.is_kept
            assert not any(
                attached.connection.link.borrowed_blocks.is_kept
                for attached in visitor.model._attached.values()
            )


@pytest.mark.promise(
    "Front ends",
    "A peer that breaks the protocol is dropped. The stub and its other peers go on.",
)
@pytest.mark.parametrize(
    "packet",
    [
        encode(Kind.FINALIZE),
        encode(Kind.START, "{}"),
        encode(Kind.EXECUTE, 1, NO_CORE, [], [[77, 0, 8]], encode([]), None, None),
        b"nonsense",
    ],
    ids=["FINALIZE", "START", "a region that is not there", "nonsense"],
)
def test_one_that_says_what_it_may_not_is_dropped(
    hall: Hall, runtime: moonpool.Runtime, packet: bytes
) -> None:
    pid = hall.stubs[STUB].process.pid
    work, control = hall.let_in(STUB)
    with work, control:
        # A stub waits for regions that were named but not sent, unless the sender has gone.
        work.send(packet)
        control.shutdown(socket.SHUT_RDWR)
        assert work.recv(100) == b""
    assert infer(runtime, "same", 1).tolist() == [1]
    assert hall.stubs[STUB].process.pid == pid


def test_one_that_says_what_it_may_not_on_the_control_channel_is_dropped(
    hall: Hall, runtime: moonpool.Runtime
) -> None:
    work, control = hall.let_in(STUB)
    with work, control:
        control.send(encode(Kind.LOGGING, False, False, False, False))
        assert work.recv(100) == b""
    assert infer(runtime, "same", 1).tolist() == [1]


@pytest.mark.promise(
    "Front ends",
    "The death of a stub fails the batches of all its peers, with its reason.",
)
def test_the_death_of_the_stub_fails_the_batches_of_all(
    hall: Hall, runtime: moonpool.Runtime
) -> None:
    with visiting(hall, "shared") as one, visiting(hall, "shared") as other:
        outcomes: list[BaseException] = []
        hall.reasons.clear()

        def ask(where: Any, how: str) -> None:
            try:
                where(how, 1)
            except BaseException as error:
                outcomes.append(error)

        threads = [threading.Thread(target=ask, args=(one.infer, "until cancelled"))]
        threads[0].start()
        wait_until(one.has_begun)
        threads.append(threading.Thread(target=ask, args=(other.infer, "same")))
        threads[1].start()
        wait_until(other.has_sent)
        hall.stubs[STUB].process.kill()
        reason = wait_until(lambda: hall.reasons)[-1]
        assert isinstance(reason, StubDied)
        assert "during execute" in str(reason)
        for visitor in (one, other):
            visitor.on_reactor(lambda visitor=visitor: visitor.model.detach(0, reason))  # type: ignore[misc]
        for thread in threads:
            thread.join()
        assert [str(each) for each in outcomes] == [str(reason)] * 2
    wait_until(lambda: STUB in hall.stubs)
    assert infer(runtime, "same", 1).tolist() == [1]


@pytest.mark.promise("At the limits", "A stub that asks for memory …")
def test_a_stub_that_cannot_be_heard_is_ended_and_each_request_has_an_end(
    hall: Hall,
    runtime: moonpool.Runtime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("as planned")

    with visiting(hall, "shared") as visitor, monkeypatch.context() as patch:
        patch.setattr(Link, "begun", fail)
        thread = in_vain(visitor)
        wait_until(lambda: visitor.lost)
        visitor.on_reactor(lambda: visitor.model.detach(0, StubDied("the stub is gone")))
        thread.join()
        # The stub has not ended: only this front end cannot read its messages.
        inputs = {"HOW": ["until cancelled"], "X": np.ones(1, np.float32)}
        with pytest.raises(StubDied, match="could not be read from and was ended"):
            runtime.infer("shared", inputs, timeout_s=60.0)
    assert "its messages cannot be read" in caplog.text
    wait_until(lambda: STUB in hall.stubs)
    assert infer(runtime, "same", 1).tolist() == [1]


@pytest.mark.promise("At the limits", "If no thread can be started …")
def test_one_that_has_no_thread_to_let_go_of_a_stub_keeps_it(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    left = threading.Event()
    with visiting(hall, "shared") as visitor:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            visitor.on_reactor(lambda: visitor.model.leave(0, left.set))
        for _ in range(2):
            assert visitor.infer("same", 1).tolist() == [1]
        assert not left.is_set()
        visitor.on_reactor(lambda: visitor.model.leave(0, left.set))
        assert left.wait(60)


@pytest.mark.promise("At the limits", "If no thread can be started …")
@pytest.mark.parametrize("timeout_s", [60.0, 0.0], ids=["in time", "late"])
def test_one_that_has_no_thread_to_wait_for_a_drain_asks_again_until_the_time_is_over(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    drained = threading.Event()
    why = ModelUnavailable("it drains")
    with visiting(hall, "shared") as visitor:
        with monkeypatch.context() as patch:
            refused = refuse_threads(patch, "moonpool-drain")
            visitor.on_reactor(lambda: visitor.model.drain(why, timeout_s, drained.set))
            wait_until(lambda: len(refused) > 1 or drained.is_set())
            assert drained.is_set() == (timeout_s == 0.0)
        assert drained.wait(60.0)


@pytest.mark.promise(
    "Front ends",
    "The limit of an execute does not count the time that a batch waits for the batches of others.",
)
def test_a_batch_that_waits_for_its_turn_is_not_overdue(hall: Hall) -> None:
    config = {**SHARED_CONFIG, **options(EXECUTE_TIMEOUT_S="0.3")}
    with (
        moonpool.Runtime(_sharing=hall) as other_runtime,
        hosted(other_runtime, "punctual", SHARED, config, instances=1),
        visiting(hall, "punctual", "punctual_0_0") as one,
        visiting(hall, "punctual", "punctual_0_0") as other,
    ):
        one.infer("same", 1)
        thread = in_vain(one)
        wait_until(one.has_begun)
        waiting = threading.Thread(target=lambda: other.infer("same", 1))
        waiting.start()
        found = wait_until(one.model.overdue)
        assert found == [0]
        assert other.model.overdue() == []
        one.on_reactor(one.model.close)
        thread.join()
        waiting.join()


def test_a_front_end_does_not_look_for_late_batches_all_the_time() -> None:
    """A model may have any limit, and the reactor works for all models."""
    pauses: list[tuple[float, Callable[[], None]]] = []
    reactor: Any = SimpleNamespace(
        call_later=lambda *timer: pauses.append(timer), call_soon=lambda _: None
    )
    models = AttachedModels(reactor, ThreadPoolExecutor(1), lambda *_: None, Path())
    config = {**minimal("m"), **SHARED_CONFIG, **options(EXECUTE_TIMEOUT_S="0.000001")}
    file = os.memfd_create("config")
    os.write(file, json.dumps(config).encode())
    os.lseek(file, 0, os.SEEK_SET)
    pauses.clear()
    models.handle([Word.MODEL, 1, 1, "standard", "triton"], [file])
    ((first_s, look),) = pauses
    look()
    assert first_s == pauses[1][0] == 0.005
    models.leave()
