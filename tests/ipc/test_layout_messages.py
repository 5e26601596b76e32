"""Layouts: the part of a batch's messages that is packed for itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ipc.described import fits, values

from moonpool.ipc.codec import encode, unpack_layout
from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import LAYOUT


@given(values(LAYOUT.item))
def test_layouts_of_the_table_pass(layout: list[Any]) -> None:
    assert unpack_layout(encode(*layout)) == layout


_THINGS = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 20) | st.floats() | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=20,
)


@given(st.lists(st.lists(st.lists(_THINGS, min_size=5, max_size=7), max_size=2), max_size=2))
def test_anything_else_is_refused(layout: list[Any]) -> None:
    if fits(LAYOUT.item, layout):
        assert unpack_layout(encode(*layout)) == layout
    else:
        with pytest.raises(RemoteProtocolError):
            unpack_layout(encode(*layout))


@given(st.binary(max_size=40))
def test_rubbish_is_refused_with_the_same_error(packed: bytes) -> None:
    try:
        layout = unpack_layout(packed)
    except RemoteProtocolError:
        return
    assert fits(LAYOUT.item, layout)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        ([0, 15, [], 0, 0, 0], "layout.datatype may not be 15"),
        ([0, 1, [True], 0, 0, 0], "layout.shape may not be True"),
        ([0, 1, [1] * 33, 0, 0, 0], "layout.shape may not be list"),
        ([0, 1, [], 0, 0], "layout may not be list"),
    ],
)
def test_a_refusal_names_the_field(tensor: list[Any], reason: str) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        unpack_layout(encode([tensor]))
    assert str(raised.value) == reason
