"""Usual requests to other models, compiled and in Python: both send the same, make the same of the replies, and keep
the same.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stub.closing import close_regions
from tests.stub.peers.desk import _shown
from tests.waiting import wait_until

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import calls_codec, encode
from moonpool.ipc.messages import Kind, Side
from moonpool.ipc.region import SharedRegion
from moonpool.stub import attributes
from moonpool.stub.hosts.calls import Call, Calls
from moonpool.stub.hosts.runtime_host import StubHost
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.stub.peers.regions import Regions

FROM_RUNTIME, OF_STUB = 1, 2
REGION_BYTES = 1 << 14
ROWS = [["SUM", 11, [4], 0, 0, 16], ["DIFF", 11, [2, 2], 0, 64, 16]]
FORMS = [False, *([] if attributes.compiled is None else [True])]


class Asking:
    """A stub's host, whose runtime is the test. A reply is sent before the request, as nobody answers meanwhile."""

    region_bytes = REGION_BYTES

    def __init__(self, *, is_compiled: bool) -> None:
        ours, theirs = Channel.pair()
        self.runtime = ours
        self.codec = calls_codec(Side.RUNTIME)
        self.regions = Regions(lambda *_, **__: None)
        shared = [SharedRegion.create(number, self.region_bytes) for number in (FROM_RUNTIME, OF_STUB)]
        for region, writer in zip(shared, (Side.RUNTIME, Side.STUB), strict=True):
            self.regions.add_first(region.id, self.region_bytes, os.dup(region.fd), writer)
        shared[0].memory()[:512] = bytes(range(256)) * 2
        for region in shared:
            region.close()
        # The answers to all GROW that may come.
        for _ in range(100):
            self.regions.refuse("no more")
        self.calls = Calls(Channel(theirs), self.regions)
        control = cast(Any, type("Control", (), {"metric_changes": None}))
        self.host = StubHost(self.calls, self.regions, control, "m", is_compiled=is_compiled)
        self.host.serves = True
        self.asked = 0

    def reply(self, **changes: Any) -> None:
        """Answer the next request."""
        fields = {
            "call": self.asked + 1,
            "final": True,
            "released": [],
            "blocks": [[FROM_RUNTIME, 0, 80]],
            "outputs": ROWS,
            "parameters": None,
            "error": None,
            **changes,
        }
        self.runtime.send(encode(Kind.REPLY, *fields.values()))

    def ask(self, request: InferenceRequest) -> Any:
        """Ask, and return what a model sees of the response."""
        self.asked += 1
        response: Any = self.host.infer(request, False)
        error = response.error()
        return (
            [_shown(each) for each in response.output_tensors()],
            None if error is None else (error.code(), error.message()),
            response.parameters(),
        )

    def told(self) -> list[bytes]:
        """Return the packets that were sent."""
        packets = []
        while (packet := self.runtime.receive_ready()) is not None:
            packets.append(packet)
        return packets

    def left(self) -> Any:
        arena = self.regions.arena
        blocks = sorted((each.offset, each.size_bytes, each.holds) for each in arena.blocks())
        calls = [each.number for each in gc.get_objects() if type(each) is Call]
        return blocks, [*self.regions.returned], [*self.calls.released], calls

    def close(self) -> None:
        self.runtime.close()
        self.calls.disown()
        close_regions(self.regions)


def request(size: int = 4, **fields: Any) -> InferenceRequest:
    inputs = [Tensor(name, np.arange(size, dtype=np.float32)) for name in ("A", "B")]
    return InferenceRequest(**{"model_name": "sums", "inputs": inputs, "requested_output_names": ["SUM"], **fields})


@pytest.fixture(params=FORMS, ids=["Python", "compiled"][: len(FORMS)])
def asking(request: pytest.FixtureRequest) -> Iterator[Asking]:
    made = Asking(is_compiled=request.param)
    yield made
    made.close()


REQUESTS = st.fixed_dictionaries(
    {"size": st.sampled_from([1, 4, 5])},
    optional={
        "model_name": st.sampled_from(["sums", "other"]),
        "model_version": st.sampled_from([-1, 1, 300]),
        "requested_output_names": st.sampled_from([[], ["SUM", "DIFF"], ["x" * 70_000]]),
        "request_id": st.just("id"),
        "timeout": st.just(7),
        "inputs": st.sampled_from(
            [
                [],
                [Tensor("A", np.array([b"text"], object))],
                [Tensor("A", np.ones((2, 2), np.float32)[:, ::2])],
                [Tensor("A", np.ones(5000, np.float32))],
                [Tensor("A", np.zeros(0, np.float32))],
            ]
        ),
    },
)
REPLIES = st.fixed_dictionaries(
    {},
    optional={
        "released": st.sampled_from([[[OF_STUB, 0]], [[OF_STUB, 0], [OF_STUB, 64]]]),
        "blocks": st.sampled_from(
            [[[FROM_RUNTIME, 128, 80]], [[OF_STUB, 0, 80]], [[FROM_RUNTIME, 0, 80], [OF_STUB, 0, 8]]]
        ),
        "outputs": st.sampled_from(
            [[], [["SUM", 11, [1], 0, 0, 4]], [["SUM", 13, [1], 0, 0, 5]], [["S", 9, [2], 0, 8, 16]]]
        ),
        "parameters": st.just({"k": 1}),
        "error": st.just([1, "no"]),
    },
)


@pytest.mark.skipif(len(FORMS) < 2, reason="moonpool was installed without its compiled code")
@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.tuples(REQUESTS, REPLIES, st.booleans()), min_size=3, max_size=12))
def test_both_forms_send_see_and_keep_the_same(steps: list[tuple[dict[str, Any], dict[str, Any], bool]]) -> None:
    both = [Asking(is_compiled=is_compiled) for is_compiled in FORMS]
    # A collection of garbage in between would give one of them blocks back.
    gc.disable()
    try:
        for asked, replied, is_late in steps:
            seen = []
            for each in both:
                if is_late:  # an answer to a call that is over comes first
                    each.runtime.send(encode(Kind.DONE, 1 << 30, None, {}))
                each.reply(**replied)
                response = each.ask(request(**asked))
                seen.append((response, each.told(), each.left()))
                if not seen[-1][1]:  # it was not sent, so the reply is of nobody
                    return
            assert seen[0] == seen[1]
    finally:
        gc.enable()
        for each in both:
            each.close()


def test_a_usual_request_goes_the_compiled_way(monkeypatch: pytest.MonkeyPatch) -> None:
    if len(FORMS) < 2:
        pytest.skip("moonpool was installed without its compiled code")
    asking = Asking(is_compiled=True)
    by_python = 0
    real = StubHost._send

    def send(*arguments: Any) -> Any:
        nonlocal by_python
        by_python += 1
        return real(*arguments)

    monkeypatch.setattr(StubHost, "_send", send)
    for _ in range(4):
        asking.reply()
        outputs, error, _ = asking.ask(request())
        assert len(outputs) == 2
        assert error is None
    assert by_python == 0
    assert len(asking.told()) == 4
    asking.close()


@pytest.mark.parametrize(
    "name", ["_inputs", "_model_name", "_model_version", "_origin", "_requested_output_names", "_row"]
)
def test_a_request_that_lost_an_attribute_is_refused(asking: Asking, name: str) -> None:
    broken = request()
    delattr(broken, name)
    with pytest.raises(AttributeError, match=name):
        asking.host.infer(broken, False)
    assert asking.told() == []


@pytest.mark.parametrize("name", ["_array", "_datatype", "_name", "_shape"])
def test_a_tensor_that_lost_an_attribute_is_not_sent(asking: Asking, name: str) -> None:
    broken = Tensor("A", np.ones(4, np.float32))
    delattr(broken, name)
    with pytest.raises(AttributeError, match=name):
        asking.host.infer(request(inputs=[broken]), False)
    assert asking.told() == []


def test_a_request_outside_of_execute_is_refused(asking: Asking) -> None:
    asking.host.serves = False
    with pytest.raises(TritonModelException):
        asking.host.infer(request(), False)
    assert asking.told() == []


def test_a_thread_that_waits_gets_its_answer_from_one_that_asks(asking: Asking) -> None:
    for _ in range(2):
        asking.reply()
        asking.ask(request())
    responses: dict[int, Any] = {}

    def ask(number: int) -> None:
        responses[number] = asking.ask(request())

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    messages: list[Any] = []

    def all_have_asked() -> bool:
        messages.extend(map(asking.codec.decode, asking.told()))
        return len(messages) == 6

    wait_until(all_have_asked)
    for message in reversed(messages[2:]):
        asking.runtime.send(encode(Kind.REPLY, message[1], True, [], [[FROM_RUNTIME, 0, 80]], ROWS, None, None))
    for thread in threads:
        thread.join(60.0)
    assert [len(responses[number][0]) for number in range(4)] == [2, 2, 2, 2]
    assert asking.left()[3] == []


class Interrupted(Exception):
    """Raised by the handler of a signal."""


@contextlib.contextmanager
def interrupted(asking: Asking, code: Callable[[], None]) -> Iterator[None]:
    """Have a signal handler run `code`, once, while the main thread waits for a reply."""
    has_run = threading.Event()

    def handle(_: int, __: FrameType | None) -> None:
        leads = asking.calls._leading._is_owned()  # type: ignore[attr-defined]
        if leads and not has_run.is_set():
            has_run.set()
            code()

    def ring() -> bool:
        # Sent again, as a signal that comes before the thread sleeps does not wake it.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return has_run.is_set()

    def interrupt() -> None:
        asking.runtime.wait()
        wait_until(ring)

    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join(60.0)
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_handler_that_raises_withdraws_the_request(asking: Asking) -> None:
    for _ in range(2):
        asking.reply()
        asking.ask(request())
    asking.told()

    def leave() -> None:
        raise Interrupted

    with pytest.raises(Interrupted), interrupted(asking, leave):
        asking.ask(request())
    kinds = [asking.codec.decode(packet)[0] for packet in asking.told()]
    assert kinds == [Kind.INFER, Kind.WITHDRAW]
    asking.runtime.send(encode(Kind.REPLY, 3, True, [], [[FROM_RUNTIME, 0, 80]], ROWS, None, None))
    asking.reply(call=4)
    asking.asked = 3
    outputs, error, _ = asking.ask(request())
    assert (len(outputs), error) == (2, None)
    # Both blocks came back: the one of the reply that nobody wanted, and that of the response, which is gone.
    assert len(asking.calls.take_released()) == 2


def test_code_that_interrupts_a_thread_that_waits_gets_an_error_and_no_deadlock(asking: Asking) -> None:
    errors: list[str] = []

    def ask() -> None:
        asks = (partial(asking.host.infer, request(), False), partial(asking.host.ask, Kind.METRIC_VALUE, 1))
        for each in asks:
            with pytest.raises(TritonModelException) as refused:
                each()
            errors.append(str(refused.value))
        asking.reply(call=asking.asked)

    with interrupted(asking, ask):
        outputs, error, _ = asking.ask(request())
    assert (len(outputs), error) == (2, None)
    assert ["cannot ask while its thread waits" in each for each in errors] == [True, True]
    # Nothing was sent for it, and nothing is left of it. A caught exception refers to the frames of the first call.
    gc.collect()
    assert [asking.codec.decode(packet)[0] for packet in asking.told()] == [Kind.INFER]
    assert asking.left()[3] == []
    # The thread may ask again.
    asking.reply()
    assert asking.ask(request())[1] is None
