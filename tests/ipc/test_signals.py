"""Tests that what a signal handler raises in a function is no error of the function's arguments, whatever its type."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.runtime.interrupting import interrupted_everywhere

from moonpool.ipc.codec import calls_codec, encode
from moonpool.ipc.errors import BadTensor, LocalProtocolError
from moonpool.ipc.messages import Kind, Side
from moonpool.ipc.signals import at_once, replacing
from moonpool.ipc.tensors import encode_bytes

CODEC = calls_codec(Side.STUB)
REPLY = encode(Kind.REPLY, 1, True, [], [[1, 64, 8]], [["Y", 11, [2], 0, 0, 8]], None, None)
# Compiles the check, which takes longer.
CODEC.decode(REPLY)
TEXTS = np.array([1, "two"], object)


@pytest.mark.parametrize(
    "act",
    [lambda: encode(Kind.READY, 1), lambda: CODEC.decode(REPLY), lambda: encode_bytes(TEXTS, "X")],
    ids=["encode", "decode", "text"],
)
@pytest.mark.parametrize("error", [TimeoutError, ValueError, KeyError])
def test_what_a_handler_raises_is_raised(act: Callable[[], object], error: type[Exception]) -> None:
    raised: list[None] = []

    def handle() -> None:
        raise error

    def call() -> None:
        try:
            act()
        except error:
            raised.append(None)

    count = interrupted_everywhere(call, lambda: None, act=handle)
    assert len(raised) == count - 1 > 0


def test_errors_of_the_arguments_are_told_as_before() -> None:
    with pytest.raises(LocalProtocolError, match="cannot be sent"):
        encode(Kind.READY, 1 << 70)
    with pytest.raises(BadTensor, match="no UTF-8 form"):
        encode_bytes(np.array(["\ud800", 1], object), "X")


class Holder:
    value: object = None


def test_steps_behind_a_value_that_was_replaced_meanwhile_are_not_taken() -> None:
    holder, taken = Holder(), list[str]()
    before = holder.value = object()
    steps = replacing(holder, "value", before, "ours")
    holder.value = "another's"
    at_once(*steps, lambda: taken.append("late"))
    assert (holder.value, taken) == ("another's", [])
    at_once(*replacing(holder, "value", "another's", "ours"), lambda: taken.append("in time"))
    assert (holder.value, taken) == ("ours", ["in time"])
