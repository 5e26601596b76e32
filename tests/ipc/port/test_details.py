"""The compiled port writes the details of requests with the bytes that Python's way has for them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moonpool.ipc import port
from moonpool.ipc.codec import pack
from moonpool.ipc.messages import NO_DETAILS, Details

pytestmark = pytest.mark.skipif(port.compiled is None, reason="the port is not compiled")


class Number(int):
    pass


class Name(str):
    __slots__ = ()


numbers = st.integers(-(2**63), 2**64 - 1) | st.sampled_from(
    [n + d for n in (0, 32, 128, 256, 2**15, 2**16, 2**31, 2**32, 2**63) for d in (-1, 0, 1)]
)
texts = st.text(max_size=300) | st.builds("é".__mul__, st.integers(0, 70))
scalars = numbers | texts | st.booleans() | st.floats() | st.builds(Number) | st.builds(Name)
maps = st.dictionaries(texts, scalars, max_size=20)
details = st.builds(
    Details,
    texts,
    numbers | texts,
    numbers,
    numbers,
    numbers,
    st.none() | maps,
    st.none() | st.lists(st.integers(0, 65535), max_size=20),
    st.none() | texts,
    numbers,
    numbers,
)


@given(details)
@example(NO_DETAILS)
@example(Details("x" * 31, "x" * 32, parameters={"": -33, "x" * 255: 0.1, "x" * 256: True}))
def test_details_have_the_bytes_that_python_gives_them(given_details: Details) -> None:
    assert port.compiled.packed_details(given_details) == pack(given_details)


@pytest.mark.parametrize(
    "given_details",
    [
        Details("x" * 40_000),
        Details(parameters={"x" * 20_000: "x" * 20_000}),
        Details(parameters={"x": Name("x" * 40_000)}),
        Details(outputs=list(range(40_000))),
    ],
    ids=["id", "parameters", "a text of its own kind", "outputs"],
)
def test_details_that_no_packet_holds_are_left_to_python(given_details: Details) -> None:
    assert port.compiled.packed_details(given_details) is None


@pytest.mark.parametrize(
    "given_details",
    [Details("\ud800"), Details(parameters={"x": 2**64}), Details(parameters={"x": object()})],  # type: ignore[dict-item]
    ids=["no Unicode", "over 64 bits", "an object"],
)
def test_details_that_python_cannot_pack_are_refused_alike(given_details: Any) -> None:
    with pytest.raises((OverflowError, TypeError, UnicodeEncodeError)) as in_python:
        pack(given_details)
    with pytest.raises(in_python.type):
        port.compiled.packed_details(given_details)
