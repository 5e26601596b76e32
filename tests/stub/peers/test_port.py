"""Tests that the compiled port of a stub and the layers answer alike, byte for byte."""

from __future__ import annotations

import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stub.peers.desk import ANSWERS, LENT, REQUESTS, StubDesk, compiled, in_python

from moonpool.ipc.channel import MAX_PACKET_BYTES
from moonpool.ipc.codec import encode, work_codec
from moonpool.ipc.errors import Closed, PeerGone, RemoteProtocolError
from moonpool.ipc.messages import NO_CORE, Details, Kind, Side
from moonpool.ipc.region import SharedRegion
from moonpool.stub import pb_utils
from moonpool.stub.attributes import InferenceResponseBase
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.stub.peers.port import compiled_port

FP32, BYTES = 11, 13
PLACE = [REQUESTS, 0]
FORMS = (compiled, in_python)


def floats(count: int) -> list[list[Any]]:
    """The rows of a request with two inputs, A and B."""
    size = 4 * count
    return [[0, FP32, [count], 0, 0, size], [1, FP32, [count], 0, 1024, size]]


def sum_and_difference(requests: list[InferenceRequest]) -> list[InferenceResponse]:
    responses = []
    for request in requests:
        a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
        b = pb_utils.get_input_tensor_by_name(request, "B").as_numpy()
        outputs = [Tensor("SUM", a + b), Tensor("DIFF", a - b)]
        responses.append(InferenceResponse(outputs))
    return responses


@pytest.fixture(params=FORMS)
def desk(request: pytest.FixtureRequest) -> Iterator[StubDesk]:
    made = StubDesk(request.param)
    yield made
    made.close()


def ask(desk: StubDesk, released: list[list[int]] | None = None, count: int = 4) -> list[Any]:
    """Execute one request, and return the fields of ANSWER."""
    answer = desk.ask([floats(count)], blocks=[[*PLACE, 2048]], released=released)
    return work_codec(Side.RUNTIME).decode(answer)


def test_a_batch_is_answered(desk: StubDesk) -> None:
    desk.execute = sum_and_difference
    a, b = np.arange(4, dtype=np.float32), np.full(4, 2, np.float32)
    for number in range(1, 4):
        desk.write(0, a * number)
        desk.write(1024, b)
        answer = desk.ask([floats(4)], blocks=[[*PLACE, 2048]], released=[] if number == 1 else [[ANSWERS, 0]])
        fields = work_codec(Side.RUNTIME).decode(answer)
        assert [*fields[:2], *fields[3:6]] == [Kind.ANSWER, number, [], [], [[ANSWERS, 0, 128]]]
        assert fields[7:] == [None, None]
        assert desk.outputs(answer) == [
            [((0, FP32, [4]), (a * number + b).tobytes()), ((1, FP32, [4]), (a * number - b).tobytes())]
        ]


def test_a_kept_input_is_held_until_it_is_dropped(desk: StubDesk) -> None:
    kept: list[Any] = []

    def keep(requests: list[InferenceRequest]) -> list[InferenceResponse]:
        kept.extend(tensor.as_numpy() for tensor in requests[0].inputs())
        return sum_and_difference(requests)

    desk.execute = sum_and_difference
    ask(desk)
    desk.execute = keep
    assert ask(desk)[3:5] == [[PLACE], []]
    desk.execute = sum_and_difference
    assert ask(desk)[3:5] == [[], []]
    kept.clear()
    assert ask(desk)[3:5] == [[], [PLACE]]


def test_an_object_of_the_batch_lives_no_longer_than_the_batch(desk: StubDesk) -> None:
    seen: list[weakref.ref[Any]] = []

    def look(requests: list[InferenceRequest]) -> list[InferenceResponse]:
        tensor = requests[0].inputs()[0]
        seen.extend(map(weakref.ref, (requests[0], tensor, tensor.as_numpy())))
        return sum_and_difference(requests)

    desk.execute = look
    for _ in range(3):
        ask(desk)
    assert len(seen) == 9
    assert [each() for each in seen] == [None] * 9


def test_what_is_cancelled_before_its_batch_comes_cancelled(desk: StubDesk) -> None:
    seen: list[bool] = []

    def look(requests: list[InferenceRequest]) -> list[InferenceResponse]:
        seen.extend(request.is_cancelled() for request in requests)
        desk.peer.cancel(3, 0)
        seen.extend(request.is_cancelled() for request in requests)
        return sum_and_difference(requests)

    desk.execute = sum_and_difference
    ask(desk)
    desk.peer.cancel(2, 0)
    desk.execute = look
    ask(desk)
    ask(desk)
    assert seen == [True, True, True, True]


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (1, -1),
        (1, 2.0),
        (1, True),
        (2, -1),
        (2, 128),
        (2, None),
        (3, [[1]]),
        (3, [[1, -1]]),
        (3, None),
        (4, [[1, 0, 2048.0]]),
        (4, [[True, 0, 2048]]),
        (4, [[1, 0]]),
        (5, "layout"),
        (5, b""),
        (6, 1),
        (7, [[0, 0, 1, 0]]),
        (0, 5.0),
        (0, True),
    ],
)
def test_a_packet_that_is_not_as_the_table_says_is_refused(desk: StubDesk, at: int, value: object) -> None:
    desk.execute = sum_and_difference
    ask(desk)
    fields: list[Any] = [Kind.EXECUTE, 2, NO_CORE, [], [[*PLACE, 2048]], encode(floats(4)), None, None]
    fields[at] = value
    with pytest.raises(RemoteProtocolError):
        desk.ask_with(encode(*fields))


@pytest.mark.parametrize("packet", [b"\xc1", b"", b"\x97\x05", encode(5), encode()])
def test_what_is_no_message_is_refused(desk: StubDesk, packet: bytes) -> None:
    with pytest.raises(Exception, match=r"packet|closed|EXECUTE"):
        desk.ask_with(packet)


def test_a_batch_in_a_region_that_was_closed_is_refused(desk: StubDesk) -> None:
    desk.execute = sum_and_difference
    ask(desk)
    desk.peer.regions.requests[REQUESTS].close()
    with pytest.raises(Closed):
        ask(desk)


# Looking for a packet before the thread blocks

ANOTHER_CORE = 100  # which no machine of ours has, modulo NO_CORE


class _Interrupted(Exception):
    pass


@pytest.fixture
def looking() -> Iterator[StubDesk]:
    made = StubDesk(compiled, look_us=1000)
    made.execute = sum_and_difference
    # A batch from another core, and a packet that came at once: now `receive` looks.
    ask(made)
    for number in (2, 3):
        made.work.send(_execute(number))
        assert made.port.open(made.port.receive())
        made.peer.executing = (0, [])
        made.peer.batch.returned.clear()
        made.peer.conversation.turn = made.peer.conversation.after[Kind.ANSWER]
    yield made
    made.close()


def _execute(number: int) -> bytes:
    blocks, layout = [[*PLACE, 2048]], encode(floats(4))
    return encode(Kind.EXECUTE, number, ANOTHER_CORE, [], blocks, layout, None, None)


def test_a_packet_is_received_while_it_is_looked_for_and_after(looking: StubDesk) -> None:
    looking.work.send(_execute(4))
    assert looking.port.receive() == _execute(4)
    sender = threading.Timer(0.05, looking.work.send, [_execute(5)])
    sender.start()
    try:
        assert looking.port.receive() == _execute(5)
    finally:
        sender.join()


def test_a_signal_that_comes_while_a_packet_is_looked_for_is_handled(looking: StubDesk) -> None:
    def interrupt(*_: object) -> None:
        raise _Interrupted

    def receive() -> None:
        # On a busy machine the signal comes at once.
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
        looking.port.receive()

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(_Interrupted):
            receive()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    looking.work.send(_execute(4))
    assert looking.port.receive() == _execute(4)


def test_the_end_of_the_peer_is_met_while_it_is_looked_for(looking: StubDesk) -> None:
    looking.work.close()
    with pytest.raises(PeerGone):
        looking.port.receive()


@pytest.mark.parametrize("size", [MAX_PACKET_BYTES, MAX_PACKET_BYTES + 1])
def test_a_packet_has_a_largest_size(desk: StubDesk, size: int) -> None:
    desk.work.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    desk.work.send(bytes(size))
    if size <= MAX_PACKET_BYTES:
        assert desk.port.receive() == bytes(size)
    else:
        with pytest.raises(RemoteProtocolError, match="more than 32768 bytes"):
            desk.port.receive()


# Both ports, with everything that a runtime and a model may do


KEEP: list[Any] = []


class Mine(InferenceResponse):
    """A response of the model's own class."""


def _resized(array: np.ndarray) -> Tensor:
    tensor = Tensor("SUM", np.zeros(8, np.float32))
    tensor._array = array
    return tensor


def _typed(datatype: Any) -> Tensor:
    tensor = Tensor("SUM", np.zeros(0, np.uint8))
    tensor._datatype = datatype
    return tensor


def _sent(request: InferenceRequest, returned: InferenceResponse | None = None) -> InferenceResponse | None:
    request.get_response_sender().send(InferenceResponse([Tensor("SUM", np.ones(2))]), 1)
    return returned


def _sent_apart(requests: list[InferenceRequest], responses: list[Any]) -> None:
    """Send each response twice, and then the flag that it was the last."""
    for request, response in zip(requests, responses, strict=True):
        sender = request.get_response_sender()
        for flags in (0, 0, 1):
            sender.send(None if flags else response, flags)


def _empty(a: np.ndarray) -> np.ndarray:
    array = pb_utils.empty(a.shape, a.dtype)
    array[...] = a
    return array


def _keep(request: InferenceRequest, a: np.ndarray, most: int = 9) -> InferenceResponse:
    del KEEP[: -most + 1 or None]
    KEEP.append(request.inputs()[0].as_numpy())
    return InferenceResponse([Tensor("SUM", a)])


def _rescheduled(request: InferenceRequest, *, response: Any) -> Any:
    request.set_release_flags(2)
    return response


def _flagged(request: InferenceRequest, a: np.ndarray) -> InferenceResponse:
    request.set_release_flags(1)
    return InferenceResponse([Tensor("SUM", a)])


def _without(found: Any, name: str) -> Any:
    delattr(found, name)
    return found


def _broken(**fields: Any) -> InferenceResponse:
    response = InferenceResponse([])
    for name, value in fields.items():
        setattr(response, name, value)
    return response


# What a model may return for the request r with the inputs a and b.
RESPONSES = {
    "both": "InferenceResponse([Tensor('SUM', a + b), Tensor('DIFF', a - b)])",
    "other order": "InferenceResponse([Tensor('DIFF', a - b), Tensor('SUM', a + b)])",
    "one": "InferenceResponse([Tensor('SUM', a * b)])",
    "none of them": "InferenceResponse([])",
    "twice": "InferenceResponse([Tensor('SUM', a + b), Tensor('SUM', a - b)])",
    "unknown": "InferenceResponse([Tensor('SUM', a + b), Tensor('ELSE', a - b)])",
    "other type": "InferenceResponse([Tensor('SUM', (a + b).astype(np.int64))])",
    "strings": "InferenceResponse([Tensor('SAID', np.array([b'x'] * len(a)))])",
    "scalar": "InferenceResponse([Tensor('SUM', np.array(1.0))])",
    "nothing in it": "InferenceResponse([Tensor('SUM', np.zeros((0, 3)))])",
    "input": "InferenceResponse([Tensor('SUM', a), Tensor('DIFF', a + b)])",
    "part of input": "InferenceResponse([Tensor('SUM', a[1:])])",
    "view": "InferenceResponse([Tensor('SUM', (a + b)[1:])])",
    "every other": "InferenceResponse([Tensor('SUM', np.arange(9)[::2])])",
    "empty": "InferenceResponse([Tensor('SUM', _empty(a)), Tensor('DIFF', b + 1)])",
    "large": "InferenceResponse([Tensor('SUM', np.full(3000, a.sum()))])",
    "too large": "InferenceResponse([Tensor('SUM', np.zeros(1 << 15))])",
    "resized": "InferenceResponse([_resized(np.zeros(6, np.float32))])",
    "not contiguous": "InferenceResponse([_resized(np.arange(16, dtype=np.float32)[::2])])",
    "no datatype": "InferenceResponse([_typed(0)])",
    "unknown datatype": "InferenceResponse([_typed(99)])",
    "parameters": "InferenceResponse([Tensor('SUM', a + b)], None, {'k': 1})",
    "no parameters": "InferenceResponse([Tensor('SUM', a + b)], None, {})",
    "error": "InferenceResponse([], pb_utils.TritonError('no', pb_utils.TritonError.NOT_FOUND))",
    "error with outputs": "InferenceResponse([Tensor('SUM', a * b)], pb_utils.TritonError('no', pb_utils.TritonError.NOT_FOUND))",
    "subclass": "Mine([Tensor('SUM', a + b)])",
    "without constructor": "InferenceResponse.__new__(InferenceResponse)",
    "broken outputs": "_broken(_outputs=None)",
    "broken list": "_broken(_outputs=[None])",
    "broken error": "_broken(_error=5)",
    **{f"no{name}": f"_without(InferenceResponse([]), '{name}')" for name in InferenceResponseBase.__slots__},
    **{
        f"tensor without {name}": f"InferenceResponse([_without(Tensor('SUM', a + b), '{name}')])"
        for name in ("_array", "_datatype", "_name", "_shape")
    },
    "strings without _wire": "InferenceResponse([_without(Tensor('SAID', np.array([b'x'])), '_wire')])",
    **{
        f"request without {name}": f"_without(r, '{name}') and InferenceResponse([Tensor('SUM', a)])"
        for name in ("_preferred_memory", "_release_flags", "_requested_output_names")
    },
    "None": "None",
    "text": "'text'",
    "keep": "_keep(r, a + b)",
    "keep this alone": "_keep(r, a + b, 1)",
    "sent": "_sent(r)",
    "sent and returned": "_sent(r, InferenceResponse([Tensor('SUM', a * b)]))",
    "sender asked for": "r.get_response_sender() and InferenceResponse([Tensor('SUM', a * b)])",
    "again": "_rescheduled(r, response=None)",
    "again with a response": "_rescheduled(r, response=InferenceResponse([Tensor('SUM', a * b)]))",
    "flagged": "_flagged(r, a + b)",
}
USUAL_RESPONSES = ("both", "other order", "one", "view", "large", "none of them")

# What a model may return for the batch, or do besides.
RETURNS = {
    "list": "responses",
    "tuple": "tuple(responses)",
    "None": "None",
    "short": "responses[1:]",
    "long": "[*responses, InferenceResponse([])]",
    "subclass": "type('Mine', (list,), {})(responses)",
    "raise": "1 / 0",
    "exit": "exec('raise SystemExit(3)')",
    "change the list": "requests.clear() or responses",
    "send": "_sent_apart(requests, responses)",
}

REQUESTED = (
    *("plain", "plain", "plain", "other shape", "text", "detailed", "wanted", "two blocks"),
    *("lent", "targets", "lent and targets", "small target"),
)


def _evaluated(code: str, **names: object) -> object:
    return eval(code, {**globals(), **names})


def _weighted(usual: tuple[str, ...], others: dict[str, str]) -> st.SearchStrategy[str]:
    return st.one_of(st.sampled_from(usual), st.sampled_from(usual), st.sampled_from([*others]))


BATCHES = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(REQUESTED), _weighted(USUAL_RESPONSES, RESPONSES)), min_size=1, max_size=3),
        _weighted(("list",), RETURNS),
        # How many of the answers' blocks come back before, and whether what was kept is dropped.
        st.integers(0, 4),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)
Batches = list[tuple[list[tuple[str, str]], str, int, bool]]


def _rows(form: str, index: int) -> list[list[Any]]:
    count, start = (3 if form == "other shape" else 4), index * 256
    block = 1 if form in ("two blocks", "lent", "lent and targets") else 0
    rows = [[0, FP32, [count], 0, start, 4 * count], [1, FP32, [count], block, start + 64, 4 * count]]
    return [*rows, [2, BYTES, [1], 0, start + 128, 5]] if form == "text" else rows


def _targets(form: str, index: int) -> list[list[int]]:
    """The places of outputs in memory of a client, the second of which is for no array of four numbers."""
    if "target" not in form:
        return []
    size = 4 if form == "small target" else 16
    return [[index, 0, LENT, 32768 + index * 256, size], [index, 1, LENT, 32768 + index * 256 + 64, 15]]


def _details(form: str) -> Details | None:
    if form == "detailed":
        return Details(request_id="seven", parameters={"k": 1})
    return Details(outputs=[0]) if form == "wanted" else None


def _play(desk: StubDesk, batches: Batches) -> list[Any]:
    """Execute the batches, and return everything that the runtime could see."""
    seen: list[Any] = []
    out: list[list[int]] = []
    for number, (requests, returned, back, drops) in enumerate(batches):
        if drops:
            KEEP.clear()
        start = number % 3 * 8192
        released, out = out[:back], out[back:]
        for index in range(len(requests)):
            at = start + index * 256
            desk.write(at, np.arange(4, dtype=np.float32) + index)
            desk.write(at + 64, np.arange(4, dtype=np.float32) * index)
            desk.write(at + 128, np.frombuffer(b"\1\0\0\0x", np.uint8))
            desk.write(at + 4096 + 64, np.full(4, index, np.float32))
            desk.write(at + 4096 + 64, np.full(4, index + 9, np.float32), LENT)

        def execute(given: list[InferenceRequest], requests: Any = requests, returned: str = returned) -> object:
            responses = [
                _evaluated(RESPONSES[name], r=r, a=r.inputs()[0].as_numpy(), b=r.inputs()[1].as_numpy())
                for r, (_, name) in zip(given, requests, strict=True)
            ]
            return _evaluated(RETURNS[returned], responses=responses, requests=given)

        desk.execute = execute
        details = [_details(form) for form, _ in requests]
        blocks = [[REQUESTS, start, 1024]]
        forms = [form for form, _ in requests]
        if "two blocks" in forms:
            blocks.append([REQUESTS, start + 4096, 1024])
        elif any("lent" in form for form in forms):
            blocks.append([LENT, start + 4096, 1024])
        answer = desk.ask(
            [_rows(form, index) for index, (form, _) in enumerate(requests)],
            blocks=blocks,
            released=released,
            details=details if any(details) else None,
            targets=[target for index, form in enumerate(forms) for target in _targets(form, index)] or None,
        )
        fields = work_codec(Side.RUNTIME).decode(answer)
        # A block that was passed through is the runtime's already.
        out += [[region, offset] for region, offset, _ in fields[5] if region == ANSWERS]
        fields[2] = NO_CORE  # which the compiled port tells
        told = desk.told()
        for message in told:
            if message[0] == Kind.RESPONSES:
                out += [[region, offset] for row in message[1] for region, offset, _ in row[3] if region == ANSWERS]
        seen.append((encode(*fields), desk.outputs(answer), [_shown(each) for each in told]))
        seen.append(bytes(desk.regions[ANSWERS].memory()[:8192]))
        seen.append(bytes(desk.regions[LENT].memory()[32768:36864]))
    KEEP.clear()
    return seen


def _shown(message: list[Any]) -> list[Any]:
    """A message, without the lines of a traceback, which name the functions of the loop."""
    if message[0] == Kind.LOG:
        message[2] = message[2].partition("\n")[0]
    return message


def _compare(batches: Batches, **start: Any) -> None:
    seen = []
    for form in FORMS:
        desk = StubDesk(form, **start)
        try:
            seen.append(_play(desk, batches))
        finally:
            desk.close()
    assert all(each == seen[-1] for each in seen)


@given(BATCHES, st.booleans())
def test_both_ports_answer_alike(batches: Batches, reschedules: bool) -> None:
    _compare(batches, reschedules=reschedules)


@pytest.mark.parametrize(
    ("form", "response", "placed"),
    [
        *[(form, "both", 1) for form in dict.fromkeys(REQUESTED)],
        *[("targets", each, 1) for each in ("one", "strings", "large", "input")],
        *[("plain", each, 1) for each in ("one", "strings", "large", "unknown", "input", "empty")],
        *[("plain", each, 0) for each in ("none of them", "error", "parameters")],
    ],
)
def test_the_compiled_port_does_what_most_batches_are(form: str, response: str, placed: int) -> None:
    desk = StubDesk(compiled)
    counts = compiled_port(desk.start).counts
    try:
        # The first time, memory of clients is mapped.
        _play(desk, [([("lent and targets", "both")], "list", 0, False)])
        before = counts()
        _play(desk, [([(form, response)], "list", 0, False)] * 2)
    finally:
        desk.close()
    done = {name: count - before[name] for name, count in counts().items()}
    assert done == {"open": 2, "stacked": 0, "place": 2 * placed, "take": 2, "give": 2, "apart": 0}


@pytest.mark.parametrize(
    ("response", "placed"),
    [
        *[(each, True) for each in ("both", "strings", "view", "input", "empty")],
        *[(each, False) for each in ("none of them", "error", "parameters", "subclass")],
    ],
)
def test_usual_responses_apart_are_placed_compiled(response: str, placed: bool) -> None:
    desk = StubDesk(compiled, decoupled=True)
    counts = compiled_port(desk.start).counts
    try:
        # Their blocks come back.
        _play(desk, [([("plain", response)], "send", 0, False)])
        before = counts()["apart"]
        _play(desk, [([("plain", response)], "send", 0, False), ([("plain", response)], "send", 4, False)])
        assert (counts()["apart"] > before) is placed
    finally:
        desk.close()


def test_a_large_output_that_grows_while_another_one_is_copied_is_not_written_beyond_its_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.stub.peers.desk.REGION_BYTES", 2 << 20)
    values = [np.full(1 << 16, value, np.float32) for value in (1, 2)]
    write = SharedRegion.write

    def grown(region: SharedRegion, offset: int, array: np.ndarray) -> None:
        """Copy as another thread of the model grows the other output."""
        values[1].resize(1 << 17, refcheck=False)
        values[1][:] = 2
        write(region, offset, array)

    desk = StubDesk(compiled)
    try:
        desk.execute = lambda _: [InferenceResponse([Tensor("SUM", values[0]), Tensor("DIFF", values[1])])]
        with monkeypatch.context() as patch:
            patch.setattr(SharedRegion, "write", grown)
            answer = desk.ask([floats(4)], blocks=[[*PLACE, 2048]])
        (outputs,) = desk.outputs(answer)
        assert [value for _, value in outputs] == [np.full(1 << 16, value, np.float32).tobytes() for value in (1, 2)]
        assert not any(desk.regions[ANSWERS].memory()[1 << 19 :])
    finally:
        desk.close()


# Batches after which blocks have come back.
_LEARNED: Batches = [
    ([("plain", "both"), ("plain", "one"), ("plain", "none of them")], "list", 0, False),
    ([("plain", "one")], "list", 0, False),
]


@pytest.mark.parametrize("reschedules", [False, True])
@pytest.mark.parametrize("name", RESPONSES)
def test_each_response_is_answered_alike_behind_usual_ones(name: str, reschedules: bool) -> None:
    batches: Batches = [
        *_LEARNED,
        *[([("plain", "both"), ("plain", name), ("plain", "one")], "list", 1, False)] * 3,
        *[([("plain", name)], "list", 2, False)] * 3,
        *[([("plain", "both")], "list", 4, True)] * 2,
    ]
    _compare(batches, reschedules=reschedules)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("returned", RETURNS)
def test_each_return_is_answered_alike_behind_usual_ones(returned: str, decoupled: bool) -> None:
    batches: Batches = [
        *_LEARNED,
        *[([("plain", "both"), ("plain", "one")], returned, 2, False)] * 3,
        *[([("plain", "both"), ("plain", "one")], "list", 2, True)] * 2,
    ]
    _compare(batches, decoupled=decoupled)


@pytest.mark.parametrize("form", ["plain", "wanted", "text"])
@pytest.mark.parametrize("name", RESPONSES)
def test_each_response_apart_is_sent_alike(name: str, form: str) -> None:
    batches: Batches = [
        ([(form, "both"), (form, "one")], "send", 0, False),
        *[([(form, "both"), (form, name), (form, "one")], "send", 4, False)] * 3,
        *[([(form, name)], "send", 4, True)] * 3,
    ]
    _compare(batches, decoupled=True)


# Models of moonpool's own kind, which get the rows of all requests at once

OWN: dict[str, Any] = {
    "name": "m",
    "max_batch_size": 8,
    "input": [{"name": name, "data_type": "TYPE_FP32", "dims": [-1]} for name in "AB"],
    "output": [{"name": name, "data_type": "TYPE_FP32", "dims": [-1]} for name in ("SUM", "DIFF")],
}
# What such a model may return for the rows of a and b.
OWN_RETURNS = {
    "both": "{'SUM': a + b, 'DIFF': a - b}",
    "inputs": "{'SUM': a, 'DIFF': b}",
    "every other": "{'SUM': np.repeat(a, 2, 1)[:, ::2], 'DIFF': a}",
    "lists": "{'SUM': (a + b).tolist(), 'DIFF': a}",
    "wide": "{'SUM': np.full((len(a), 9000), 2, np.float32), 'DIFF': a}",
    "one of them": "{'SUM': a}",
    "too few rows": "{'SUM': a[1:], 'DIFF': b}",
    "another type": "{'SUM': a.astype(np.float64), 'DIFF': b}",
    "nothing": "None",
    "raise": "1 / 0",
}
# The rows and columns of each request, and the bytes between them; and if the port does it.
OWN_BATCHES: dict[str, tuple[list[tuple[int, int]], int, bool]] = {
    "one": ([(2, 3)], 0, True),
    "three": ([(1, 4), (3, 4), (2, 4)], 0, True),
    "no rows in one": ([(1, 4), (0, 4)], 0, True),
    "a gap": ([(1, 4), (2, 4)], 64, False),
    "other columns": ([(1, 4), (1, 3)], 0, False),
}


@pytest.mark.parametrize("returned", OWN_RETURNS)
@pytest.mark.parametrize("batch", OWN_BATCHES)
def test_models_of_our_own_kind_are_answered_alike(batch: str, returned: str) -> None:
    requests, gap, is_stacked = OWN_BATCHES[batch]
    calls: list[Any] = []

    def model(A: Any, B: Any) -> Any:  # noqa: N803
        calls.append((A.shape, A.tobytes(), B.tobytes()))
        return _evaluated(OWN_RETURNS[returned], a=A, b=B)

    layout, size = [], 0
    for rows, columns in requests:
        bytes_each = rows * columns * 4
        row = [FP32, [rows, columns], 0]
        layout.append([[0, *row, size, bytes_each], [1, *row, 4096 + size, bytes_each]])
        size += bytes_each + gap
    seen, opened = [], []
    for form in FORMS:
        desk = StubDesk(form, model, kind="native", config=OWN, inputs=["A", "B"], outputs=["SUM", "DIFF"])
        forms = compiled_port(desk.start)
        before = forms.counts()["stacked"] if forms else 0
        answers = []
        try:
            desk.write(0, np.arange(64, dtype=np.float32))
            desk.write(4096, np.arange(64, dtype=np.float32) * 2)
            for details in (None, [Details(request_id="seven")] * len(requests)):
                answer = desk.ask(layout, blocks=[[*PLACE, 8192]], details=details)
                fields = work_codec(Side.RUNTIME).decode(answer)
                fields[2] = NO_CORE
                told = [_shown(each) for each in desk.told()]
                answers.append((encode(*fields), desk.outputs(answer), told))
        finally:
            desk.close()
        opened.append((forms.counts()["stacked"] if forms else 0) - before)
        seen.append((answers, calls[:]))
        calls.clear()
    assert seen[0] == seen[1]
    assert opened == [2 if is_stacked else 0, 0]
