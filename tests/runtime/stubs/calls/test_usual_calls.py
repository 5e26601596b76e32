"""Usual calls of models: the runtime does with them what it does with any, and says the same."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.recorder import tensor
from tests.runtime.scripted import KiB, Pair

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import calls_codec, encode
from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import Kind, Side
from moonpool.runtime.errors import ModelError, ModelNotFound, ModelUnavailable
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import InferenceRequest, Outcome, Response, WireTensor
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.stubs.calls.dispatcher import CallDispatcher
from moonpool.runtime.stubs.calls.usual import UsualAsk, UsualCalls
from moonpool.runtime.stubs.control import MessageRateLimiter

CONFIG = ModelConfig.from_dict(
    {
        "name": "sums",
        "backend": "any",
        "input": [
            tensor("A", "FP32", -1),
            {**tensor("B", "INT64", -1), "optional": True},
            {**tensor("S", "STRING", -1), "optional": True},
        ],
        "output": [tensor("Y", "FP32", -1), tensor("Z", "FP32", -1)],
    }
)


class LayersOnly(UsualCalls):
    """Leaves every call to the layers."""

    def ask(self, packet: bytes) -> UsualAsk | None:  # noqa: ARG002
        return None

    def reply(self, response: Response) -> None:
        """Place nothing."""


class Counting(UsualCalls):
    """Counts the requests and replies that were usual."""

    asked = replied = 0

    def ask(self, packet: bytes) -> UsualAsk | None:
        usual = super().ask(packet)
        self.asked += usual is not None
        return usual

    def reply(self, response: Response) -> Any:
        usual = super().reply(response)
        self.replied += usual is not None
        return usual


class Desk:
    """A dispatcher by one of both ways, with the stub's end of its channel. It is also all models, and their scheduler."""

    def __init__(self, way: type[UsualCalls]) -> None:
        # Makes the error of the scheduler, if it refuses.
        self.refusal: Callable[[], Exception] | None = None
        self.pair = Pair(region_bytes=256 * KiB)
        ours, theirs = Channel.pair()
        self.stub = Channel(theirs)
        self.requests: list[InferenceRequest] = []
        self.model = SimpleNamespace(config=CONFIG, name="sums")
        self.signature = Signature(CONFIG)
        self.scheduler = self
        # Instances of no rate limiter.
        self.limited: list[object] = []
        self.breaches: list[str] = []
        self.lines: list[str] = []
        reactor: Any = SimpleNamespace(
            call_soon=lambda callback: callback(),
            watch=lambda *_: None,
            forget=lambda *_: None,
            pause=lambda *_: None,
            watch_room=lambda *_, **__: None,
        )
        limiter = MessageRateLimiter(reactor)
        models: Any = self
        self.dispatcher = CallDispatcher(ours, self.pair.link, reactor, models, models, limiter)
        self.usual = self.dispatcher._usual = way(self.pair.link, models)
        self.dispatcher.watch(
            lambda _, text: self.breaches.append(text),
            lambda: None,
            lambda _, text, *__: self.lines.append(text),
        )

    # As the models of the runtime, and as a scheduler

    def find(self, name: str, version: int | None = None) -> Any:
        if name != "sums" or version not in (None, 1):
            raise ModelNotFound(f"no model '{name}' {version}")
        return self

    def submit(self, request: InferenceRequest) -> None:
        if self.refusal is not None:
            raise self.refusal()
        self.requests.append(request)

    def leave(self, request: InferenceRequest) -> None:
        if request in self.requests:  # or it was refused
            self.requests.remove(request)

    # As a stub, and as the model that is asked

    def ask(self, *message: Any) -> None:
        self.stub.send(encode(*message))
        self.dispatcher._ready()

    def answer(self, outcome: Outcome) -> None:
        self.requests.pop(0).waiter.resolve(outcome)

    def told(self) -> list[Any]:
        """Return what was sent to the stub. Regions are called by their order, as their numbers are new in each desk."""
        codec, messages = calls_codec(Side.STUB), []
        while (packet := self.stub.receive_ready()) is not None:
            fields = codec.decode(packet)
            if fields[0] == Kind.REPLY:
                _, number, final, released, blocks, *rest = fields
                fields = [number, final, self._named(released), self._named(blocks), *rest]
            messages.append(fields)
        return messages

    def _named(self, places: Any) -> list[Any]:
        order = sorted(self.pair.peer.regions)
        return [(order.index(region), *rest) for region, *rest in places]

    def seen(self) -> list[Any]:
        """Return all of the open requests that a backend or a caller could see."""
        return [
            (
                [(each.tobytes(), each.dtype, each.shape) for each in request.arrays],
                request.shapes.tensors,
                request.shapes.batch_size,
                request.details,
                request.waiter.number,  # type: ignore[attr-defined]
                request.waiter.model,  # type: ignore[attr-defined]
                request.waiter.batch,  # type: ignore[attr-defined]
                request.waiter.takes_many,
            )
            for request in self.requests
        ]

    def left(self) -> tuple[Any, ...]:
        """Return all that the dispatcher has kept."""
        blocks = self.pair.link.borrowed_blocks
        open_calls, released = self.dispatcher.open_calls, self._named(self.pair.link.released)
        breaches = [re.sub(r"\d+", "#", each) for each in self.breaches]
        return open_calls, released, blocks.count, blocks.used_bytes, breaches, self.lines

    def close(self) -> None:
        self.dispatcher.close()
        self.requests.clear()
        self.stub.close()
        self.pair.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk(Counting)
    yield made
    made.close()


def answers_region(desk: Desk) -> int:
    return next(iter(desk.pair.link.response_regions))


def infer(desk: Desk, number: int, size: int = 4, **changes: Any) -> list[Any]:
    """Make an INFER with one input A of so many elements."""
    rows = [["A", 11, [size], 0, 0, 4 * size]]
    fields = {
        "model": "sums",
        "version": -1,
        "decoupled": False,
        "timeout_us": 0,
        "released": [],
        "blocks": [[answers_region(desk), 64 * number, 4 * size]],
        "inputs": rows,
        "outputs": ["Y", "Z"],
        "details": None,
        **changes,
    }
    return [Kind.INFER, number, *fields.values()]


def response(size: int = 4) -> Response:
    return Response({"Y": np.arange(size, dtype=np.float32), "Z": np.ones(size, np.float32)})


def wire(datatype: int, shape: tuple[int, ...], content: Iterable[int]) -> Response:
    tensor = WireTensor(datatype, shape, np.array(list(content), np.uint8))
    return Response(cast(Any, {"Y": tensor}))


def test_a_call_like_an_earlier_one_is_usual_and_so_is_its_reply(desk: Desk) -> None:
    for number in range(1, 5):
        desk.ask(*infer(desk, number))
        desk.answer(response())
    assert isinstance(desk.usual, Counting)
    assert (desk.usual.asked, desk.usual.replied) == (3, 3)
    assert len(desk.told()) == 4
    assert desk.breaches == desk.lines == []


def test_a_model_that_was_loaded_anew_is_asked_by_its_new_signature(desk: Desk) -> None:
    for number in (1, 2):
        desk.ask(*infer(desk, number))
    desk.signature = Signature(CONFIG)
    for number in (3, 4):
        desk.ask(*infer(desk, number))
    assert isinstance(desk.usual, Counting)
    assert desk.usual.asked == 2
    assert len(desk.usual._asks._known) == 1
    assert len(desk.requests) == 4


def test_an_error_of_the_runtimes_own_is_logged_and_answered(desk: Desk) -> None:
    desk.ask(*infer(desk, 1))
    desk.refusal = lambda: ValueError("a bug")
    desk.ask(*infer(desk, 2))
    (told,) = desk.told()
    assert "the request failed: ValueError('a bug')" in str(told)
    assert len(desk.lines) == 1
    assert "INFER failed in the runtime" in desk.lines[0]


# What a stub may do next. The numbers of calls and blocks are small, so that some are in use.
SIZES = st.sampled_from([1, 4, 5])
ASKS = st.fixed_dictionaries(
    {"number": st.integers(1, 4), "size": SIZES},
    optional={
        "model": st.sampled_from(["sums", "sums", "none"]),
        "version": st.sampled_from([-1, 1, 2]),
        "decoupled": st.booleans(),
        "timeout_us": st.sampled_from([0, 5]),
        "outputs": st.sampled_from([["Y", "Z"], ["Y"], [], ["W"]]),
        "details": st.sampled_from([None, ["id", 0, 0, None, None, 0, 0]]),
        "released": st.sampled_from([[[0, 0]], [[0, 64]], [[1, 0]], [[1, 1 << 40]]]),
        "block": st.tuples(
            st.integers(0, 2), st.sampled_from([0, 64, 1 << 18]), st.integers(0, 32)
        ),
        "blocks": st.just([]),
        "inputs": st.sampled_from(
            [
                [["A", 11, [4], 0, 8, 16]],
                [["A", 11, [4], 0, 0, 16], ["B", 9, [1], 0, 16, 8]],
                [["B", 9, [1], 0, 0, 8], ["A", 11, [2], 0, 8, 8]],
                [["A", 9, [2], 0, 0, 16]],
                [["A", 11, [0], 0, 0, 0]],
                [["A", 11, [4], 0, 0, 16], ["A", 11, [4], 0, 0, 16]],
                [["A", 11, [2, 2], 0, 0, 16]],
                [["A", 11, [4], 0, 0, 16], ["S", 13, [1], 0, 0, 5]],
            ]
        ),
    },
)
OUTPUTS: st.SearchStrategy[Callable[[], Any]] = st.sampled_from(
    [
        lambda: response(),
        lambda: response(5),
        lambda: Response({"Y": np.ones(4, np.float32)}, {"k": 1}),
        lambda: Response({"Y": np.zeros(0, np.float32)}),
        lambda: Response({"Y": np.arange(8, dtype=np.float32)[::2]}),
        lambda: Response({"Y": np.array([b"a", b"bc"], object)}),
        lambda: wire(11, (2,), range(8)),
        lambda: wire(13, (1,), [1, 0, 0, 0, 65]),
        lambda: Response(cast(Any, {"Y": "no array"})),
        lambda: Response({"Y": np.ones(20_000, np.float32)}),
        lambda: ModelError("no", "NOT_FOUND"),
    ]
)
STEPS = st.lists(
    st.tuples(st.just("ask"), ASKS)
    | st.tuples(st.just("answer"), OUTPUTS)
    | st.tuples(st.just("refuse"), st.sampled_from([None, lambda: ModelUnavailable("full")]))
    | st.tuples(st.just("withdraw"), st.integers(1, 4))
    | st.tuples(st.just("release"), st.integers(0, 3)),
    min_size=4,
    max_size=40,
)


def act(desk: Desk, action: str, what: Any) -> None:
    if action == "ask":
        changes = dict(what)
        region, offset, size = changes.pop("block", (None, 0, 0))
        number = changes.pop("number")
        message = infer(desk, number, **changes)
        order = sorted(desk.pair.peer.regions)
        message[6] = [[order[each], offset] for each, offset in message[6]]
        if region is not None:
            message[7] = [[[*order, 77][region], offset, size]]
        desk.ask(*message)
    elif action == "answer" and desk.requests:
        desk.answer(what())
    elif action == "refuse":
        desk.refusal = what
    elif action == "withdraw":
        desk.ask(Kind.WITHDRAW, what)
    elif action == "release":
        # One of the blocks that replies have lent, if there is one.
        kept = sorted(desk.pair.link.borrowed_blocks._kept)
        desk.ask(Kind.LET_GO, [list(kept[what])] if what < len(kept) else [])


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_both_ways_say_and_keep_the_same(steps: list[tuple[str, Any]]) -> None:
    desks = usual, layers = Desk(UsualCalls), Desk(LayersOnly)
    # A collection of garbage at a moment in between would give one of them blocks back, which an error's traceback holds.
    gc.disable()
    try:
        for desk in desks:
            memory = desk.pair.link.response_regions[answers_region(desk)].memory()
            memory[: 1 << 10] = bytes(range(256)) * 4
        for action, what in steps:
            for desk in desks:
                act(desk, action, what)
            assert usual.seen() == layers.seen()
            assert usual.told() == layers.told()
            assert usual.left() == layers.left()
            if usual.breaches:
                break
    finally:
        gc.enable()
        for desk in desks:
            desk.close()


@pytest.mark.parametrize(
    ("block", "wrong"),
    [
        ((0, 0, 15), "does not lie in its block"),
        ((0, (1 << 18) - 8, 16), "which has"),
        ((77, 0, 16), "which is not the stub's to answer from"),
    ],
)
def test_a_lie_about_the_block_of_a_known_call_ends_the_stub(
    desk: Desk, block: tuple[int, int, int], wrong: str
) -> None:
    desk.ask(*infer(desk, 1))
    desk.ask(*infer(desk, 2))
    region, offset, size = block
    named = answers_region(desk) if region == 0 else region
    desk.ask(*infer(desk, 3, blocks=[[named, offset, size]]))

    assert len(desk.breaches) == 1
    assert wrong in desk.breaches[0]
    assert len(desk.requests) <= 2


def test_a_number_that_is_in_use_ends_the_stub_also_if_the_call_is_known(desk: Desk) -> None:
    for _ in range(2):
        desk.ask(*infer(desk, 1))
    assert "call 1 is open already" in desk.breaches[0]


def test_a_block_that_was_not_lent_cannot_be_released_by_a_known_call(desk: Desk) -> None:
    desk.ask(*infer(desk, 1))
    desk.ask(*infer(desk, 2, released=[[0, 64]]))
    assert "which it does not hold" in desk.breaches[0]


def test_a_remote_protocol_error_of_a_known_call_is_raised_by_the_dispatcher(desk: Desk) -> None:
    desk.ask(*infer(desk, 1))
    with pytest.raises(RemoteProtocolError, match=r"INFER\.blocks"):
        desk.dispatcher._take(encode(*infer(desk, 2, blocks=[[1, 2, -3]])))
