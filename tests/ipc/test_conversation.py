"""The work channel in order: who may say what, and what is too large for a packet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.ipc.described import messages

from moonpool.ipc.channel import MAX_PACKET_BYTES, Channel
from moonpool.ipc.codec import encode
from moonpool.ipc.conversation import Conversation, Overflow
from moonpool.ipc.errors import LocalProtocolError, OutOfMemory, PeerGone, ProtocolError, RemoteProtocolError
from moonpool.ipc.messages import NO_CORE, WORK, Kind, Side

pytestmark = pytest.mark.promise("Containment", "Only packets that the tables describe …")

LARGE = "x" * (MAX_PACKET_BYTES + 1)
SPOKEN = [kind for kind in WORK if kind is not Kind.INDIRECT]


class Shelf(Overflow):
    """Memory that both ends see: what one stores the other loads, once."""

    def __init__(self) -> None:
        self.packets: dict[tuple[int, int, int], bytes] = {}
        self.stored = 0

    def store(self, packet: bytes) -> tuple[int, int, int]:
        self.stored += 1
        place = (7, 64 * self.stored, len(packet))
        self.packets[place] = packet
        return place

    def load(self, region: int, offset: int, size_bytes: int) -> bytes:
        try:
            return self.packets.pop((region, offset, size_bytes))
        except KeyError:
            raise RemoteProtocolError("nothing lies there") from None


class Pair:
    """Both ends of a work channel."""

    def __init__(self) -> None:
        ours, theirs = Channel.pair()
        self.shelf = Shelf()
        self.ends = {
            Side.RUNTIME: Conversation(ours, Side.RUNTIME, self.shelf),
            Side.STUB: Conversation(Channel(theirs), Side.STUB, self.shelf),
        }

    @property
    def runtime(self) -> Conversation:
        return self.ends[Side.RUNTIME]

    @property
    def stub(self) -> Conversation:
        return self.ends[Side.STUB]

    def say(self, *message: Any) -> list[Any]:
        """Send from the side whose message it is; what the other side received."""
        sender = WORK[message[0]].sender or Side.RUNTIME
        self.ends[sender].send(*message)
        return self.ends[_other(sender)].receive()

    def close(self) -> None:
        for end in self.ends.values():
            end.channel.close()


def _other(side: Side) -> Side:
    return Side.STUB if side is Side.RUNTIME else Side.RUNTIME


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.fixture
def confined(pair: Pair) -> Pair:
    """After what the stub says first."""
    pair.say(*least(Kind.CONFINED))
    return pair


def least(kind: Kind) -> list[Any]:
    """The shortest message of a kind."""
    fields: dict[Kind, list[Any]] = {
        Kind.CONFINED: [2, [], []],
        Kind.START: ["{}"],
        Kind.COMPLETED: ["{}", True],
        Kind.LOADED: [{}],
        Kind.FAILED: ["load", "no", ""],
        Kind.EXECUTE: [1, 0, [], [], b"\x90", None, None],
        Kind.ANSWER: [1, 0, [], [], [], b"\x90", None, None],
        Kind.FINALIZE: [],
        Kind.FINALIZED: ["", ""],
        Kind.SLEEP: [],
        Kind.SLEPT: ["", ""],
        Kind.WAKE: [],
        Kind.WOKEN: ["", ""],
        Kind.INDIRECT: [7, 64, 100],
    }
    return [kind, *fields[kind]]


START = (Kind.CONFINED, Kind.START)
PATHS: dict[Kind | None, list[Kind]] = {
    None: [],
    Kind.CONFINED: [Kind.CONFINED],
    Kind.START: [*START],
    Kind.COMPLETED: [*START, Kind.COMPLETED],
    Kind.LOADED: [*START, Kind.LOADED],
    Kind.FAILED: [*START, Kind.FAILED],
    Kind.EXECUTE: [*START, Kind.LOADED, Kind.EXECUTE],
    Kind.ANSWER: [*START, Kind.LOADED, Kind.EXECUTE, Kind.ANSWER],
    Kind.FINALIZE: [*START, Kind.LOADED, Kind.FINALIZE],
    Kind.FINALIZED: [*START, Kind.LOADED, Kind.FINALIZE, Kind.FINALIZED],
    Kind.SLEEP: [*START, Kind.LOADED, Kind.SLEEP],
    Kind.SLEPT: [*START, Kind.LOADED, Kind.SLEEP, Kind.SLEPT],
    Kind.WAKE: [*START, Kind.LOADED, Kind.SLEEP, Kind.SLEPT, Kind.WAKE],
    Kind.WOKEN: [*START, Kind.LOADED, Kind.SLEEP, Kind.SLEPT, Kind.WAKE, Kind.WOKEN],
}
AFTER = pytest.mark.parametrize("said", PATHS, ids=lambda kind: f"after {getattr(kind, 'name', 0)}")


@contextmanager
def after(said: Kind | None) -> Iterator[Pair]:
    """Both ends of a channel on which this was said last."""
    pair = Pair()
    try:
        for earlier in PATHS[said]:
            pair.say(*least(earlier))
        yield pair
    finally:
        pair.close()


def allowed_after(said: Kind | None) -> frozenset[Kind]:
    return frozenset({Kind.CONFINED, Kind.FAILED}) if said is None else WORK[said].followers


def test_a_whole_life_in_order(pair: Pair) -> None:
    life = ["CONFINED", "START", "LOADED", "EXECUTE", "ANSWER", "EXECUTE", "ANSWER", "FINALIZE", "FINALIZED"]

    for name in life:
        message = least(Kind[name])
        assert pair.say(*message) == message


@AFTER
def test_only_what_the_table_allows_is_sent(said: Kind | None) -> None:
    for kind in WORK:
        with after(said) as pair:
            for side in Side:
                if kind in allowed_after(said) and WORK[kind].sender is side:
                    continue
                with pytest.raises(LocalProtocolError, match=f"{kind.name} may not be sent now"):
                    pair.ends[side].send(*least(kind))

                assert pair.ends[_other(side)].channel.receive_ready() is None
            if kind in allowed_after(said):
                assert pair.say(*least(kind)) == least(kind)


@AFTER
def test_only_what_the_table_allows_is_accepted(said: Kind | None) -> None:
    for kind in WORK:
        with after(said) as pair:
            packet = encode(*least(kind))
            for side in Side:
                if kind in allowed_after(said) and WORK[kind].sender is not side:
                    continue
                with pytest.raises(RemoteProtocolError):
                    pair.ends[side].accept(packet)
            # The refused message changed nothing.
            for follower in allowed_after(said):
                assert pair.say(*least(follower)) == least(follower)
                break


def test_a_refusal_tells_whose_turn_it_is(confined: Pair) -> None:
    confined.say(*least(Kind.START))

    with pytest.raises(RemoteProtocolError) as refused:
        confined.runtime.accept(encode(*least(Kind.ANSWER)))
    assert str(refused.value) == ("ANSWER came out of turn; COMPLETED or FAILED or LOADED may come next")
    with pytest.raises(LocalProtocolError, match="COMPLETED or FAILED or LOADED may come next"):
        confined.stub.send(*least(Kind.ANSWER))


def test_nothing_follows_the_last_message(pair: Pair) -> None:
    for kind in PATHS[Kind.FINALIZED]:
        pair.say(*least(kind))

    with pytest.raises(LocalProtocolError, match="nothing may come next"):
        pair.runtime.send(*least(Kind.EXECUTE))


def test_a_second_answer_is_refused(pair: Pair) -> None:
    for kind in PATHS[Kind.EXECUTE]:
        pair.say(*least(kind))
    for _ in range(2):
        pair.stub.channel.send(encode(*least(Kind.ANSWER)))
    pair.runtime.receive()

    with pytest.raises(RemoteProtocolError, match="ANSWER came out of turn"):
        pair.runtime.receive()


def test_a_message_that_cannot_be_encoded_takes_no_turn(confined: Pair) -> None:
    with pytest.raises(LocalProtocolError, match="cannot be sent"):
        confined.runtime.send(Kind.START, object())

    assert confined.say(*least(Kind.START)) == least(Kind.START)


def test_a_large_message_goes_through_memory(confined: Pair) -> None:
    received = confined.say(Kind.START, LARGE)

    assert received == [Kind.START, LARGE]
    assert confined.shelf.stored == 1
    assert confined.shelf.packets == {}


@pytest.mark.parametrize("beyond", [0, 1])
def test_only_what_no_packet_holds_goes_through_memory(confined: Pair, beyond: int) -> None:
    frame = len(encode(Kind.START, "x" * 65536)) - 65536
    text = "x" * (MAX_PACKET_BYTES - frame + 2 + beyond)
    packet_bytes = len(encode(Kind.START, text))
    received = confined.say(Kind.START, text)

    assert packet_bytes == MAX_PACKET_BYTES + beyond
    assert received[1] == text
    assert confined.shelf.stored == beyond


def test_both_sides_may_be_long_winded(confined: Pair) -> None:
    confined.say(Kind.START, json.dumps({"much": LARGE}))

    assert confined.say(Kind.FAILED, "load", "no", LARGE) == [Kind.FAILED, "load", "no", LARGE]
    assert confined.shelf.stored == 2


def test_where_no_memory_is_left_nothing_is_sent_and_the_turn_remains(confined: Pair) -> None:
    class Full(Overflow):
        def store(self, packet: bytes) -> tuple[int, int, int]:
            raise OutOfMemory(f"no {len(packet)} bytes")

    confined.runtime.use_overflow(Full())
    with pytest.raises(OutOfMemory):
        confined.runtime.send(Kind.START, LARGE)
    assert confined.stub.channel.receive_ready() is None
    confined.runtime.use_overflow(confined.shelf)

    assert confined.say(Kind.START, LARGE)[1] == LARGE


def test_a_place_where_nothing_lies_is_refused(pair: Pair) -> None:
    pair.runtime.channel.send(encode(Kind.INDIRECT, 7, 64, 100))

    with pytest.raises(RemoteProtocolError, match="nothing lies there"):
        pair.stub.receive()


@pytest.mark.parametrize("inner", [Kind.INDIRECT, Kind.EXECUTE, Kind.LOADED])
def test_a_message_in_memory_obeys_the_same_rules(confined: Pair, inner: Kind) -> None:
    place = confined.shelf.store(encode(*least(inner)))
    confined.shelf.packets[7, 64, 100] = encode(*least(Kind.START))
    confined.runtime.channel.send(encode(Kind.INDIRECT, *place))

    with pytest.raises(RemoteProtocolError, match=r"out of turn|not the peer's to send"):
        confined.stub.receive()


@pytest.mark.parametrize("packet", [b"", b"\xc1", b"\x91\x01", bytes(100)])
def test_rubbish_in_memory_is_refused(pair: Pair, packet: bytes) -> None:
    pair.runtime.channel.send(encode(Kind.INDIRECT, *pair.shelf.store(packet)))

    with pytest.raises(RemoteProtocolError):
        pair.stub.receive()


def test_a_stub_that_answers_without_reading_is_told_apart(pair: Pair) -> None:
    for kind in PATHS[Kind.LOADED]:
        pair.say(*least(kind))
    answer = encode(*least(Kind.ANSWER))

    def converse_without_reading() -> None:
        for _ in range(100_000):
            pair.runtime.send(Kind.EXECUTE, 1, NO_CORE, [[1, 1]] * 5000, [], b"\x90", None, None)
            pair.runtime.accept(answer)

    with pytest.raises(RemoteProtocolError, match="the stub answers without reading"):
        converse_without_reading()


@pytest.mark.parametrize("side", Side)
def test_the_end_of_the_peer_is_told_to_both_sides(pair: Pair, side: Side) -> None:
    path = PATHS[Kind.LOADED] if side is Side.RUNTIME else PATHS[Kind.START]
    for kind in path:
        pair.say(*least(kind))
    pair.ends[_other(side)].channel.close()
    kind = Kind.EXECUTE if side is Side.RUNTIME else Kind.LOADED

    with pytest.raises(PeerGone):
        pair.ends[side].send(*least(kind))
    with pytest.raises(PeerGone):
        pair.ends[side].receive()


class Conversations(RuleBasedStateMachine):
    """Two ends that say whatever the table allows, and now and then what it does not."""

    @initialize()
    def begin(self) -> None:
        self.pair = Pair()
        self.said: Kind | None = None

    @rule(data=st.data(), is_long=st.booleans())
    def speak(self, data: st.DataObject, is_long: bool) -> None:
        followers = sorted(allowed_after(self.said))
        if not followers:
            self.pair.close()
            self.begin()
            return
        kind = data.draw(st.sampled_from(followers))
        message = data.draw(messages("work", kind))
        if is_long and kind in (Kind.START, Kind.COMPLETED):
            message[1] = LARGE
        stored = self.pair.shelf.stored
        packet = encode(*message)

        assert repr(self.pair.say(*message)) == repr(message)
        assert self.pair.shelf.stored - stored == (len(packet) > MAX_PACKET_BYTES)
        self.said = kind

    @rule(kind=st.sampled_from(SPOKEN), side=st.sampled_from(Side))
    def speak_out_of_turn(self, kind: Kind, side: Side) -> None:
        if kind in allowed_after(self.said) and WORK[kind].sender is side:
            return
        with pytest.raises(LocalProtocolError):
            self.pair.ends[side].send(*least(kind))

    @rule(kind=st.sampled_from(SPOKEN), side=st.sampled_from(Side))
    def hear_out_of_turn(self, kind: Kind, side: Side) -> None:
        if kind in allowed_after(self.said) and WORK[kind].sender is not side:
            return
        with pytest.raises(RemoteProtocolError):
            self.pair.ends[side].accept(encode(*least(kind)))

    @rule(packet=st.binary(max_size=20), side=st.sampled_from(Side))
    def hear_rubbish(self, packet: bytes, side: Side) -> None:
        # An end that accepted the rubbish is not used again, because the other end sent nothing.
        try:
            self.pair.ends[side].accept(packet)
        except ProtocolError:
            return
        self.pair.close()
        self.begin()

    @invariant()
    def the_ends_agree_on_what_may_come(self) -> None:
        if hasattr(self, "pair"):
            allowed = [end.allowed for end in self.pair.ends.values()]
            assert allowed == [allowed_after(self.said)] * 2
            assert self.pair.shelf.packets == {}

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.close()


TestConversations = Conversations.TestCase
TestConversations.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
