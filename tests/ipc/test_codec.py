"""The codec takes what the tables describe, and judges what does not quite fit as they do."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ipc.described import EVERY_ROW, TABLES, accepts, fits, messages, receiver, refused

from moonpool.ipc import codec
from moonpool.ipc.codec import compile_check, control_codec, encode, work_codec
from moonpool.ipc.errors import LocalProtocolError, RemoteProtocolError
from moonpool.ipc.messages import (
    CALLS,
    CONTROL,
    NO_CORE,
    NO_DEVICE,
    WORK,
    Int,
    Kind,
    ListOf,
    Message,
    OneOf,
    Raw,
    Row,
    Side,
    Table,
    Text,
)

if TYPE_CHECKING:
    from moonpool.ipc.messages import Spec

pytestmark = pytest.mark.usefixtures("_either_msgpack")


@EVERY_ROW
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_message_of_the_tables_arrives_as_it_was(channel: str, kind: Kind, data: st.DataObject) -> None:
    message = data.draw(messages(channel, kind))
    packet = encode(*message)
    codec = receiver(channel, kind)

    for _ in range(2):
        received = codec.decode(packet)
        # Texts are compared, because NaN does not equal NaN.
        assert repr(received) == repr(message)
        assert fits(Row(kind=Int(), **TABLES[channel][kind].fields), received)


@pytest.mark.promise("The wire", "Limits of texts are in bytes of UTF-8. A text is cut between two characters.")
@pytest.mark.parametrize("letter", ["a", "é", "€", "😀"])
def test_texts_are_limited_by_their_bytes(letter: str) -> None:
    message = Message(Side.STUB, {"text": Text(120)})
    check = compile_check(Kind.LOG, message)

    check([int(Kind.LOG), letter * (120 // len(letter.encode()))])
    with pytest.raises(RemoteProtocolError, match=r"LOG\.text may not be str"):
        check([int(Kind.LOG), letter * (120 // len(letter.encode()) + 1)])


JUNK = st.sampled_from([
    None, True, False, -1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 65536, 0.0, 1.0, 5.0,
    float("nan"), float("inf"), "", "x", "1", b"", b"\x05", b"x" * 5, [], [[]], [0, 0], [0, 0, 0],
    [None], {}, {"a": 1}, {"a": None}, {"a": []}, {"a": b"x"}, {b"a": 1}, {1: 1}, {"a": {"b": 1}},
    msgpack.ExtType(5, b""), msgpack.ExtType(5, b"abcd"), msgpack.Timestamp(1), [[[[[[[[0]]]]]]]],
    [0] * 33, "x" * 4097, b"x" * 4097, {str(i): i for i in range(65)},
])  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each thing in a message, the message itself first."""
    yield path
    if isinstance(value, (list, dict)):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in inside:
            yield from places(item, (*path, key))


def spoilt(message: list[Any], path: tuple[Any, ...], how: str, junk: Any) -> Any:
    """The message with one thing in it replaced, wrapped, left out, doubled or added to."""
    holder: list[Any] = [message]
    target: Any = holder
    key: Any = 0
    for step in path:
        target, key = target[key], step
    here = target[key]
    if how == "left out" and target is not holder:
        del target[key]
    elif how == "doubled" and isinstance(target, list) and target is not holder:
        target.insert(key, here)
    elif how == "added to" and isinstance(here, list):
        here.append(junk)
    elif how == "added to" and isinstance(here, dict):
        here["b"] = junk
    elif how == "wrapped":
        target[key] = [here]
    else:
        target[key] = junk
    return holder[0]


@EVERY_ROW
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_message_with_one_thing_wrong_is_judged_as_the_table_says(
    channel: str, kind: Kind, data: st.DataObject
) -> None:
    message = data.draw(messages(channel, kind))
    path = data.draw(st.sampled_from(list(places(message))))
    how = data.draw(st.sampled_from(["replaced", "replaced", "wrapped", "left out", "doubled", "added to"]))
    packet = msgpack.packb(spoilt(message, path, how, data.draw(JUNK)))
    codec = receiver(channel, kind)
    fields = msgpack.unpackb(packet, strict_map_key=False)

    if accepts(codec, fields):
        assert repr(codec.decode(packet)) == repr(fields)
    else:
        refused(codec, packet)


def test_the_channels_share_only_what_stands_for_a_large_message() -> None:
    for one, other in itertools.combinations([WORK, CONTROL, CALLS], 2):
        assert set(one) & set(other) <= {Kind.INDIRECT}
    assert set(WORK) | set(CONTROL) | set(CALLS) == set(Kind)


def test_a_field_may_be_called_as_what_leads_every_message() -> None:
    check = compile_check(Kind.LOG, Message(None, {"kind": Text(3), "it": Int(0, 7)}))

    check([int(Kind.LOG), "abc", 7])
    with pytest.raises(RemoteProtocolError, match=r"LOG\.kind may not be str"):
        check([int(Kind.LOG), "abcd", 7])


@pytest.mark.parametrize(
    ("spec", "most", "beyond"),
    [(Text(10), "ß" * 5, "ß" * 5 + "s"), (Raw(5), b"12345", b"123456"), (ListOf(Int(), 2), [0, 0], [0] * 3),
     (Table(1), {"a": 1}, {"a": 1, "b": 1}), (Int(-5, 5), 5, 6), (Int(-5, 5), -5, -6),
     (OneOf(Int(0, 1), Text(1)), 1, 2), (OneOf(Int(0, 1), Text(1)), "x", "xx")],
    ids=["text", "raw", "list", "table", "high", "low", "one of, number", "one of, text"],
)  # fmt: skip
def test_a_bound_is_the_last_thing_that_is_allowed(spec: Spec, most: object, beyond: object) -> None:
    check = compile_check(Kind.LOG, Message(None, {"it": spec}))
    check([21, most])

    with pytest.raises(RemoteProtocolError, match=r"LOG\.it may not be"):
        check([21, beyond])


def test_a_choice_of_lists_is_refused_when_the_check_is_made() -> None:
    with pytest.raises(TypeError, match=r"LOG\.it: OneOf is for scalars"):
        compile_check(Kind.LOG, Message(None, {"it": OneOf(Int(), ListOf(Int(), 3))}))


def test_a_field_may_have_any_name() -> None:
    for name in ("kind", "m", "v1", "check"):
        check = compile_check(Kind.LOG, Message(None, {name: Int(), "other": Int()}))

        check([int(Kind.LOG), 1, 2])


def _endless() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


def _deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, 1j, np.int64(3), np.zeros(2), 2**64, -(2**63) - 1, "\ud800", print,
     _endless(), _deep(5000), Ellipsis],
    ids=["object", "set", "complex", "numpy", "array", "2**64", "-2**63-1", "surrogate",
         "function", "endless", "deep", "ellipsis"],
)  # fmt: skip
def test_a_message_that_cannot_be_sent_harms_no_later_one(value: object) -> None:
    for message in ((Kind.LOG, value), (Kind.LOG, {"a": [value]}), (Kind.LOG, "x" * 999, value)):
        with pytest.raises(LocalProtocolError, match=r"^\(<Kind\.LOG: 21>,\) cannot be sent: "):
            encode(*message)

        assert encode(Kind.GROW, 5, NO_DEVICE) == b"\x93\x11\x05\xff"


def test_threads_encode_at_the_same_time() -> None:
    wrong: list[bytes] = []
    start = threading.Barrier(4)

    def encode_many(number: int) -> None:
        text = str(number) * 300
        expected = msgpack.packb([int(Kind.REFUSED), [text] * 20])
        start.wait(60)
        for _ in range(200):
            packet = encode(Kind.REFUSED, [text] * 20)
            if packet != expected:
                wrong.append(packet)

    threads = [threading.Thread(target=encode_many, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_each_form_of_msgpack_gets_a_packer_that_threads_may_share() -> None:
    program = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import msgpack; from moonpool.ipc import codec\n"
        "print(msgpack.Packer.__module__, codec.pack is msgpack.packb)"
    )
    command = [sys.executable, "-c", program]
    plain = dict(os.environ, MSGPACK_PUREPYTHON="1")

    assert subprocess.check_output(command, text=True).split() == ["msgpack._cmsgpack", "False"]
    assert subprocess.check_output(command, text=True, env=plain).split() == ["msgpack.fallback", "True"]


def test_a_process_that_is_to_be_copied_makes_all_checks_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_compiled", {})
    codec.compile_checks(Side.STUB)
    monkeypatch.setattr(codec, "_compile", None)  # a call would fail

    layout = encode([])
    packet = encode(Kind.EXECUTE, 1, NO_CORE, [], [], layout, None, None)
    assert work_codec(Side.STUB).decode(packet)[0] == Kind.EXECUTE
    assert codec.unpack_layout(layout) == [[]]
    assert control_codec(Side.STUB).decode(encode(Kind.REFUSED, "no"))[0] == Kind.REFUSED
