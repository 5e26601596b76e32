"""Calls of models by the port and in Python: the runtime does and says the same, and refuses the same lies."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ipc.port.both import DAMAGE, EDITS, damaged, edited, lies
from tests.runtime.recorder import tensor
from tests.runtime.scripted import KiB, Pair

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import calls_codec, encode
from moonpool.ipc.messages import Kind, Side
from moonpool.ipc.port import calls as port
from moonpool.ipc.tensors import ITEMSIZE
from moonpool.runtime.errors import ModelError, ModelNotFound, ModelUnavailable
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import InferenceRequest, Outcome, Response, WireTensor
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.stubs import allotment
from moonpool.runtime.stubs.calls.dispatcher import CallDispatcher
from moonpool.runtime.stubs.control import MessageRateLimiter

RAW: dict[str, Any] = {
    "name": "sums",
    "backend": "any",
    "input": [
        tensor("A", "FP32", -1),
        {**tensor("B", "INT64", -1), "optional": True},
        {**tensor("S", "STRING", -1), "optional": True},
    ],
    "output": [tensor("Y", "FP32", -1), tensor("Z", "FP32", -1)],
}
CONFIG = ModelConfig.from_dict(RAW)


# By the port, where it is compiled, and in Python.
WAYS = [pytest.param(True, id="port")] if port.compiled is not None else []
WAYS.append(pytest.param(False, id="Python"))
BOTH_WAYS = pytest.mark.parametrize("is_quick", WAYS)
COMPILED = pytest.mark.skipif(port.compiled is None, reason="nothing is compiled here")


class Meter(MessageRateLimiter):
    """Keeps what each packet cost."""

    def __init__(self, reactor: Any) -> None:
        super().__init__(reactor)
        self.costs: list[float] = []

    def took(self, size_bytes: int, messages: float = 1) -> None:  # noqa: ARG002
        self.costs.append(messages)


class Desk:
    """A dispatcher by one of both ways, with the stub's end of its channel.

    It is also all models, and their scheduler.
    """

    def __init__(self, is_quick: bool, is_private: bool = False) -> None:
        # Makes the error of the scheduler, if it refuses.
        self.refusal: Callable[[], Exception] | None = None
        # The regions of each desk have the same numbers, so the same bytes mean the same.
        numbers, allotment._numbers = allotment._numbers, itertools.count(1000)
        try:
            self.pair = Pair(region_bytes=256 * KiB, is_private=is_private)
        finally:
            allotment._numbers = numbers
        ours, theirs = Channel.pair()
        self.stub = Channel(theirs)
        self.requests: list[InferenceRequest] = []
        self.model = SimpleNamespace(config=CONFIG, name="sums")
        self.signature = Signature(CONFIG)
        self.scheduler = self
        # Instances of no rate limiter.
        self.limited: list[object] = []
        self.breaches: list[str] = []
        self.lent: list[list[int]] = []
        self.lines: list[str] = []
        reactor: Any = SimpleNamespace(
            call_soon=lambda callback: callback(),
            watch=self._watch,
            forget=lambda *_: None,
            pause=lambda *_: None,
            watch_room=lambda *_, **__: None,
        )
        self.meter = Meter(reactor)
        models: Any = self
        self.dispatcher = CallDispatcher(ours, self.pair.link, reactor, models, models, self.meter)
        if not is_quick:
            self.dispatcher._port.is_plain = False
        self._before = self._counts()
        self.dispatcher.watch(
            lambda _, text: self.breaches.append(text), lambda: None, lambda _, text, *__: self.lines.append(text)
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
        self.hear(encode(*message))

    def hear(self, packet: bytes) -> None:
        self.stub.send(packet)
        self.ready()

    def _watch(self, _: int, ready: Callable[[], object]) -> None:
        self.ready = ready

    def answer(self, outcome: Outcome) -> None:
        self.requests.pop(0).waiter.resolve(outcome)

    @staticmethod
    def _counts() -> dict[str, int]:
        return {} if port.compiled is None else port.compiled.counts()

    def counts(self) -> tuple[int, int]:
        """Return the numbers of calls and of replies that went the port's way so far."""
        now = self._counts()
        return now["read"] - self._before["read"], now["reply"] - self._before["reply"]

    def told(self) -> list[Any]:
        """Return what was sent to the stub."""
        codec, messages = calls_codec(Side.STUB), []
        while (packet := self.stub.receive_ready()) is not None:
            messages.append(codec.decode(packet))
        # The blocks that replies have lent.
        self.lent += [block[:2] for message in messages if message[0] == Kind.REPLY for block in message[4]]
        return messages

    def contents(self, reply: list[Any]) -> dict[str, bytes]:
        """Return the bytes of each output of a REPLY."""
        _, _, _, _, blocks, rows, _, _ = reply
        found = {}
        for name, _, _, block, offset, size in rows:
            region, start, _ = blocks[block]
            memory = self.pair.peer.regions[region].memory()
            found[name] = bytes(memory[start + offset : start + offset + size])
        return found

    def seen(self) -> list[Any]:
        """Return all of the open requests that a backend or a caller could see."""
        return [
            (
                [(each.tobytes(), each.dtype, each.shape) for each in request.arrays],
                request.has_views,
                request.wants_wire,
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
        open_calls, released = self.dispatcher.open_calls, list(self.pair.link.released)
        return open_calls, released, blocks.count, blocks.used_bytes, self.breaches, self.lines

    def close(self) -> None:
        self.dispatcher.close()
        self.requests.clear()
        self.stub.close()
        self.pair.close()


@pytest.fixture(params=WAYS)
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    made = Desk(request.param)
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


REGION = 1001


@contextmanager
def desks() -> Iterator[tuple[Desk, Desk]]:
    """Make a desk of each way, with the same bytes in the stub's memory, and close them."""
    made = Desk(True), Desk(False)
    # A collection of garbage at a moment in between would give one of them blocks back, which an error's traceback
    # holds.
    gc.disable()
    try:
        for each in made:
            memory = each.pair.link.response_regions[answers_region(each)].memory()
            memory[: 1 << 10] = bytes(range(256)) * 4
        yield made
    finally:
        gc.enable()
        for each in made:
            each.close()


def agree(quick: Desk, layers: Desk) -> None:
    """Check that nobody could tell both desks apart."""
    assert quick.seen() == layers.seen()
    told = quick.told()
    assert told == layers.told()
    for message in told:
        if message[0] == Kind.REPLY:
            assert quick.contents(message) == layers.contents(message)
    assert quick.left() == layers.left()


# Calls and responses with nothing in common but that the port takes them.
KINDS: list[tuple[dict[str, Any], Callable[[], Response]]] = [
    ({}, lambda: response()),
    ({"size": 7}, lambda: response(3)),
    ({"model": "sums", "version": 1, "outputs": ["Y"]}, lambda: Response({"Y": np.ones(2, np.float32)})),
    ({"details": ["id", 7, 1, {"a": 1, "b": "x"}, None, 0, 0]}, lambda: Response({}, {"k": 1.5})),
    ({"timeout_us": 10**9}, lambda: Response({"Y": np.ones((2, 3), np.int8)}, {"k": "text"})),
    (
        {"inputs": [["A", 11, [2, 2][:1], 0, 0, 8], ["B", 9, [1], 0, 8, 8]]},
        lambda: Response({"Y": np.zeros(0, np.float32), "Z": np.array(1.5)}),
    ),
    ({"inputs": [["A", 11, [0], 0, 0, 0], ["S", 13, [1], 0, 0, 16]]}, lambda: wire(13, (1,), [1, 0, 0, 0, 65])),
]


@COMPILED
def test_calls_and_replies_of_all_kinds_go_the_ports_way() -> None:
    desk = Desk(True)
    memory = desk.pair.link.response_regions[answers_region(desk)].memory()
    memory[:4096] = b"".join(bytes([12, 0, 0, 0, *range(12)]) for _ in range(256))
    for number, (changes, answer) in enumerate(KINDS, 1):
        fields = dict(changes)
        desk.ask(*infer(desk, number, fields.pop("size", 4), **fields))
        desk.answer(answer())
    assert desk.counts() == (len(KINDS), len(KINDS))
    told = desk.told()
    assert [reply[1:3] + reply[7:] for reply in told] == [[number, True, None] for number in range(1, len(KINDS) + 1)]
    assert desk.contents(told[1]) == {name: each.tobytes() for name, each in response(3).outputs.items()}
    assert told[3][6] == {"k": 1.5}
    assert desk.breaches == desk.lines == []
    # All that the stub has given up is named, each once.
    assert sorted(place for reply in told for place in reply[3]) == [
        [REGION, 64 * number] for number in range(1, len(KINDS) + 1)
    ]
    desk.close()


def test_a_block_that_came_back_is_lent_again(desk: Desk) -> None:
    lent: list[list[int]] = []
    for number in range(1, 5):
        desk.ask(*infer(desk, number, released=lent))
        desk.answer(response())
        (reply,) = desk.told()
        lent = [block[:2] for block in reply[4]]
        assert desk.pair.link.borrowed_blocks.count == 1
    desk.ask(Kind.LET_GO, lent)
    assert desk.pair.link.borrowed_blocks.used_bytes == 0
    assert desk.breaches == []


def test_a_model_that_was_loaded_anew_is_asked_by_its_new_signature(desk: Desk) -> None:
    for number in (1, 2):
        desk.ask(*infer(desk, number))
    desk.signature = Signature(ModelConfig.from_dict({**RAW, "input": [tensor("A", "INT32", -1)]}))
    desk.ask(*infer(desk, 3))
    (told,) = desk.told()
    assert "data-type is 'FP32', but model 'sums' expects 'INT32'" in told[7][1]
    assert len(desk.requests) == 2


def test_an_error_of_the_runtimes_own_is_logged_and_answered(desk: Desk) -> None:
    desk.ask(*infer(desk, 1))
    desk.refusal = lambda: ValueError("a bug")
    desk.ask(*infer(desk, 2))
    (told,) = desk.told()
    assert "the request failed: ValueError('a bug')" in str(told)
    assert len(desk.lines) == 1
    assert "INFER failed in the runtime" in desk.lines[0]


@COMPILED
def test_a_call_costs_less_only_if_a_model_takes_it() -> None:
    desk = Desk(True)
    desk.ask(*infer(desk, 1))
    desk.ask(*infer(desk, 2, model="none"))
    desk.refusal = lambda: ModelUnavailable("full")
    desk.ask(*infer(desk, 3))
    desk.ask(Kind.WITHDRAW, 1)
    assert desk.meter.costs == [0.25, 1, 1, 1]
    desk.close()


@COMPILED
def test_contained_models_are_spared_the_compiled_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_PURE", "contained")
    desk = Desk(True, is_private=True)
    desk.ask(*infer(desk, 1))
    desk.answer(response())
    assert len(desk.told()) == 1
    assert desk.counts() == (0, 0)
    desk.close()


# What a stub may do next. The numbers of calls and blocks are small, so that some are in use.
SIZES = st.sampled_from([1, 4, 5])
# Tensors of any datatype and shape, most of which lie where they say.
ROWS = st.builds(
    lambda name, code, shape, offset, more: [name, code, shape, 0, offset, prod(shape) * ITEMSIZE[code] + more],
    st.sampled_from(["A", "B", "S", "\u00fc"]),
    st.integers(1, 14),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([0, 1, 8]),
    st.sampled_from([0, 0, 0, 1]),
)
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
        "block": st.tuples(st.integers(0, 2), st.sampled_from([0, 64, 1 << 18]), st.integers(0, 32)),
        "blocks": st.just([]),
        "inputs": st.lists(ROWS, max_size=3)
        | st.sampled_from(
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
        # A call is answered, and a block that was lent before comes back.
        desk.ask(*infer(desk, 5))
        act(desk, "answer", response)
        lent, desk.lent[what : what + 1] = desk.lent[what : what + 1], []
        desk.ask(Kind.LET_GO, lent)


@COMPILED
@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_both_ways_say_and_keep_the_same(steps: list[tuple[str, Any]]) -> None:
    with desks() as (quick, layers):
        for action, what in steps:
            for desk in (quick, layers):
                act(desk, action, what)
            agree(quick, layers)
            if quick.breaches:
                break


def hear_after_a_call(packet: bytes) -> None:
    """Let both desks serve a call and answer it, and hear a packet while another one is open."""
    with desks() as both:
        for desk in both:
            for number in (1, 2):
                desk.ask(*infer(desk, number))
            desk.answer(response())
            desk.hear(packet)
        agree(*both)


def honest() -> list[Any]:
    """Make an INFER that says all that one can say."""
    details = ["id", "sequence", 1, {"a": 1}, None, 0, 0]
    rows = [["A", 11, [2], 0, 0, 8], ["B", 9, [1], 1, 0, 8]]
    blocks = [[REGION, 192, 8], [REGION, 256, 8]]
    return [30, 3, "sums", -1, False, 5, [[1000, 0]], blocks, rows, ["Y"], details]


@COMPILED
def test_each_lie_about_one_value_ends_the_same_in_both_ways() -> None:
    hear_after_a_call(msgpack.packb(honest()))
    tried = list(lies(honest()))
    assert len(tried) > 1000
    for fields in tried[:: 1 + len(tried) // 400]:
        hear_after_a_call(msgpack.packb(fields))


@COMPILED
@settings(deadline=None)
@given(EDITS)
def test_lies_about_several_values_end_the_same_in_both_ways(edits: list[tuple[int, Any]]) -> None:
    hear_after_a_call(msgpack.packb(edited(honest(), edits)))


@COMPILED
@settings(deadline=None)
@given(DAMAGE, st.integers(-4, 4))
def test_damaged_packets_end_the_same_in_both_ways(damage: list[tuple[int, int]], longer: int) -> None:
    hear_after_a_call(damaged(msgpack.packb(honest()), damage, longer))


@COMPILED
@pytest.mark.parametrize("size", [32 * 1024, 32 * 1024 + 1])
def test_packets_at_the_bound_end_the_same_in_both_ways(size: int) -> None:
    hear_after_a_call(b"\xc0" * size)


def test_the_end_of_a_stub_leaves_no_call_open(desk: Desk) -> None:
    desk.ask(*infer(desk, 1))
    desk.stub.close()
    desk.ready()
    assert desk.dispatcher.open_calls == 0
    assert desk.requests == []


def test_an_answer_that_comes_after_the_end_of_the_stub_is_dropped(desk: Desk) -> None:
    for number in (1, 2):
        desk.ask(*infer(desk, number))
    desk.answer(response())
    desk.pair.link.close()
    desk.answer(response())
    assert desk.dispatcher.open_calls == 0
    assert desk.breaches == desk.lines == []


class EndingParameters:
    """Gives nothing, and ends the stub meanwhile."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def keys(self) -> list[str]:
        self._desk.pair.link.close()
        return []


def test_a_stub_may_end_while_its_answer_is_placed(desk: Desk) -> None:
    desk.ask(*infer(desk, 1))
    desk.answer(Response({"Y": np.ones(4, np.float32)}, cast(Any, EndingParameters(desk))))
    assert desk.dispatcher.open_calls == 0


class GrowingParameters:
    """Gives nothing, and changes an output meanwhile."""

    def __init__(self, output: np.ndarray[Any, Any]) -> None:
        self._output = output

    def keys(self) -> list[str]:
        self._output.resize(self._output.size + 1000, refcheck=False)
        return []


def test_an_output_that_changes_while_it_is_placed_is_sent_as_it_is_in_the_end(desk: Desk) -> None:
    desk.ask(*infer(desk, 1))
    output = np.arange(4, dtype=np.float32)
    desk.answer(Response({"Y": output}, cast(Any, GrowingParameters(output))))
    (reply,) = desk.told()
    assert reply[7] is None
    assert desk.contents(reply) == {"Y": output.tobytes()}
    assert reply[5][0][2] == [output.size]
    assert desk.pair.link.borrowed_blocks.count == 1


@BOTH_WAYS
@pytest.mark.parametrize("what", ["large", "of callers", "not contiguous", "strings", "many inputs"])
def test_what_is_rare_comes_between_what_is_usual(is_quick: bool, what: str) -> None:
    desk = Desk(is_quick)
    memory = desk.pair.memory.empty((4,), np.dtype(np.float32), 16)
    memory[...] = 7
    rare: dict[str, Any] = {
        "large": np.ones(20_000, np.float32),
        "of callers": memory,
        "not contiguous": np.arange(8, dtype=np.float32)[::2],
        "strings": np.array([b"a", b"bc"], object),
    }
    output = rare.get(what, np.ones(4, np.float32))
    for number in range(1, 4):
        fields = infer(desk, number)
        if what == "many inputs" and number == 2:
            fields[8] = [["A", 11, [4], 0, 0, 16], *(["B", 9, [1], 0, 8, 8] for _ in range(80))]
        desk.ask(*fields)
        if desk.requests:
            desk.answer(Response({"Y": output if number == 2 else np.ones(4, np.float32)}))
    told = desk.told()
    assert [reply[1] for reply in told] == [1, 2, 3]
    assert [desk.contents(told[each])["Y"] for each in (0, 2)] == [np.ones(4, np.float32).tobytes()] * 2
    if what == "many inputs":
        assert "input 'B' is given twice" in told[1][7][1]
    elif what == "strings":
        assert desk.contents(told[1])["Y"] == b"\1\0\0\0a\2\0\0\0bc"
    else:
        assert desk.contents(told[1])["Y"] == output.tobytes()
    # Memory of callers is lent where it lies.
    is_lent = told[1][4] and told[1][4][0][0] == memory.base.region.id  # type: ignore[union-attr]
    assert is_lent == (what == "of callers") or what == "many inputs"
    desk.close()


@pytest.mark.parametrize(
    ("block", "wrong"),
    [
        ((0, 0, 15), "does not lie in its block"),
        ((0, (1 << 18) - 8, 16), "which has"),
        ((77, 0, 16), "which is not the stub's to answer from"),
    ],
)
def test_a_lie_about_the_block_ends_the_stub(desk: Desk, block: tuple[int, int, int], wrong: str) -> None:
    desk.ask(*infer(desk, 1))
    desk.ask(*infer(desk, 2))
    region, offset, size = block
    named = answers_region(desk) if region == 0 else region
    desk.ask(*infer(desk, 3, blocks=[[named, offset, size]]))

    assert len(desk.breaches) == 1
    assert wrong in desk.breaches[0]
    assert len(desk.requests) <= 2


def test_a_number_that_is_in_use_ends_the_stub(desk: Desk) -> None:
    for _ in range(2):
        desk.ask(*infer(desk, 1))
    assert "call 1 is open already" in desk.breaches[0]


def test_a_block_that_was_not_lent_cannot_be_released(desk: Desk) -> None:
    desk.ask(*infer(desk, 1))
    desk.ask(*infer(desk, 2, released=[[0, 64]]))
    assert "which it does not hold" in desk.breaches[0]
