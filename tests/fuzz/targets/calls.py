"""Calls of a model, made without the real stub's library."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.fuzz.choices import Choices
from tests.runtime.recorder import tensor
from tests.runtime.scripted import Pair

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import encode
from moonpool.ipc.errors import PeerGone, RemoteProtocolError
from moonpool.ipc.messages import Kind
from moonpool.runtime.errors import InvalidRequest, ModelNotFound, NotGranted
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import InferenceRequest, Response
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.observe.metrics import MetricRegistry
from moonpool.runtime.stubs.calls.dispatcher import CallDispatcher
from moonpool.runtime.stubs.control import MessageRateLimiter
from moonpool.runtime.stubs.metrics import StubMetrics

_CONFIG = ModelConfig.from_dict(
    {
        "name": "echo",
        "backend": "any",
        "input": [tensor("X", "FP32", -1), {**tensor("S", "STRING", -1), "optional": True}],
        "output": [tensor("Y", "FP32", -1)],
    }
)


class _Reactor:
    """A reactor that does at once what should be done soon, and nothing later."""

    def call_soon(self, callback: Callable[[], object]) -> None:
        callback()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _Echo:
    """A scheduler that answers at once. A request with an id it answers when its caller leaves."""

    limited = ()

    def __init__(self) -> None:
        self.waiting: list[InferenceRequest] = []

    def submit(self, request: InferenceRequest) -> None:
        if request.details is not None and request.details.request_id:
            self.waiting.append(request)
        else:
            request.waiter.resolve(Response({"Y": np.zeros(4, np.float32)}))

    def leave(self, request: InferenceRequest) -> None:
        self.waiting.remove(request)


class _Models:
    """The runtime as the model sees it: it has the model `echo` and no other."""

    def __init__(self) -> None:
        self.asker = SimpleNamespace(name="asker")
        self.scheduler = _Echo()
        self._hosted = SimpleNamespace(
            model=SimpleNamespace(config=_CONFIG), signature=Signature(_CONFIG), scheduler=self.scheduler
        )

    def find(self, name: str, version: int | None = None) -> Any:
        if name != "echo" or version not in (None, 1):
            raise ModelNotFound(f"no model '{name}'")
        return self._hosted

    def check_may_load(self, name: str) -> None:
        if name == "closed":
            raise NotGranted(f"'{name}' is not yours")

    def load(self, name: str, config: str, files: Mapping[str, bytes] | None) -> None:
        if len(name) % 2:
            raise InvalidRequest(f"{config}{files}")

    def begin_unload(self, name: str, *, with_members: bool = False) -> None:
        """Do nothing, since no such model is loaded."""

    def ask_ready(self, name: str, version: str, answer: Callable[[bool], object]) -> None:
        if version:
            raise InvalidRequest(version)
        if name:
            answer(name == "echo")


def _alarm(_level: int, text: str, *_: object) -> None:
    """Fail, since no line is expected in the log."""
    raise AssertionError(text)


def call_dispatcher(data: bytes) -> None:
    """Let the dispatcher read calls. It answers each with an error, or ends the stub for a breach of the protocol."""
    pair, choices = Pair(), Choices(data)
    ours, theirs = Channel.pair()
    peer = Channel(theirs)
    models, reactor = _Models(), _Reactor()
    metrics = StubMetrics(MetricRegistry(), lambda: None)
    limiter = MessageRateLimiter(reactor)  # type: ignore[arg-type]
    dispatcher = CallDispatcher(ours, pair.link, reactor, models, metrics, limiter)  # type: ignore[arg-type]
    dispatcher.watch(lambda *_: None, lambda: None, _alarm)
    told: list[bytes] = []
    try:
        while choices:
            packet = _packet(pair, choices, told)
            dispatcher._take(packet)
            while (answer := peer.receive_ready()) is not None:
                told.append(answer)
    except (RemoteProtocolError, PeerGone):
        pass
    finally:
        for thread in threading.enumerate():
            if thread.name == "moonpool-call":
                thread.join()
        dispatcher.close()
        if dispatcher.open_calls or models.scheduler.waiting:
            raise AssertionError("calls are left open")
        peer.close()
        metrics.close()
        pair.close()


def _packet(pair: Pair, choices: Choices, told: list[bytes]) -> bytes:
    if choices.byte() % 16 == 15:
        return choices.take(1 + choices.byte())
    number = choices.number(1, 2, 3)
    name = choices.of(["echo", "", "other", "x" * 300])
    message: list[Any] = choices.of(
        [
            choices.of([[Kind.WITHDRAW, number], [Kind.CANCEL_CALL, number]]),
            [Kind.LET_GO, [[choices.number(*pair.peer.regions), choices.number(0, 64)]]],
            [Kind.LOAD_MODEL, number, name, "{}", choices.of([None, [["file:a", b"b"]]])],
            [Kind.UNLOAD_MODEL, number, name, False],
            [Kind.IS_MODEL_READY, number, name, choices.of(["", "1", "x"])],
            [Kind.NEW_METRIC, number, name, "d", choices.byte() % 3, [["a", "b"]], None],
            [Kind.METRIC_VALUE, number, choices.number(1)],
            [Kind.INDIRECT, *_block(pair, choices)],
            *[_infer(pair, choices, number, name)] * 16,
            *[_usual(choices, number)] * 8,
        ]
    )
    packet = encode(*message)
    if choices.byte() % 8 == 7 and told:
        return told[-1]
    return packet


def _usual(choices: Choices, number: int) -> list[Any]:
    """Make a request that differs from the others of its kind in number and block, or in a little more."""
    rows = [["X", 11, [4], 0, 0, 16]]
    block = [2, 64 * (choices.byte() % 8), 16]
    released = [[1, 64 * choices.byte()]] if choices.byte() % 8 == 7 else []
    return [Kind.INFER, number, "echo", -1, False, 0, released, [block], rows, ["Y"], None]


def _block(pair: Pair, choices: Choices) -> list[int]:
    region = choices.number(*pair.peer.regions)
    return [region, choices.number(0, 0, 64), choices.number(16, 16, 4)]


def _infer(pair: Pair, choices: Choices, number: int, name: str) -> list[Any]:
    rows = []
    for _ in choices.some(2):
        shape = [choices.number(4, 4, 1)]
        tensor_name = choices.of(["X", "X", "S", "Z"])
        place = choices.number(0), choices.number(0), choices.number(16, 16, 4)
        rows.append([tensor_name, choices.number(11, 11, 13, 14), shape, *place])
    blocks = [_block(pair, choices) for _ in choices.some(2)]
    details = [choices.of(["", "id"]), choices.of([0, "s", 7]), choices.byte() % 4, None, None]
    return [
        Kind.INFER,
        number,
        name,
        choices.of([-1, 1, 2]),
        bool(choices.byte() % 2),
        choices.number(0, 1000) % 2**63,
        [],
        blocks,
        rows,
        choices.of([[], ["Y"], ["Z"]]),
        choices.of([None, details]),
    ]
