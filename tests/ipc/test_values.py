"""Values travel as they are, or not at all, and what is read is checked first."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.source import values


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("values")
    yield fd
    os.close(fd)


def there_and_back(value: object, fd: int) -> Any:
    packet = values.parcel(values.write(value), fd)
    return values.unpacked(packet, lambda size_bytes: memoryview(os.pread(fd, size_bytes, 0)))


# Longer numbers are no keys: any count of them has one hash.
KEYS = st.text() | st.integers(-(1 << 63), (1 << 64) - 1) | st.booleans() | st.none()
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 2000), 1 << 2000)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: object) -> None:
    fd = os.memfd_create("values")
    try:
        assert there_and_back(value, fd) == value
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(12).reshape(3, 4).T,
        np.arange(10)[::-2],
        np.array(5.5),
        np.zeros((0, 3), np.int8),
        np.array(["a", "bcd"]),
        np.array([b"a", b"bcd"]),
        np.array([True, False]),
        np.array([1 + 2j]),
        np.array(["2020-01-01"], "M8[D]"),
        np.arange(3, dtype=">i4"),
        np.ones((1000, 1000), np.float16),
    ],
)
def test_arrays_come_back_as_they_were(array: np.ndarray[Any, Any], memory: int) -> None:
    found = there_and_back({"x": [array]}, memory)["x"][0]

    assert found.dtype == array.dtype
    assert found.shape == array.shape
    np.testing.assert_array_equal(found, array)


def test_what_is_like_a_plain_value_becomes_one(memory: int) -> None:
    class Text(str):
        pass

    given = {"t": Text("a"), "n": np.int32(3), "f": np.float64(0.5), "s": (1, 2), "b": bytearray(b"x"), 1: "\ud800"}
    assert there_and_back(given, memory) == {"t": "a", "n": 3, "f": 0.5, "s": [1, 2], "b": b"x", 1: "\ud800"}
    assert math.isnan(there_and_back(float("nan"), memory))
    assert there_and_back("x" * 100_000, memory) == "x" * 100_000
    assert there_and_back(b"x" * 100_000, memory) == b"x" * 100_000


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


cyclic: list[object] = []
cyclic.append(cyclic)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        np.array([object()]),
        np.zeros(2, [("a", "i4")]),
        1 << 100_000,
        deep(100),
        cyclic,
        {(1, 2): 3},
        {1 << 64: 0},
        {-(1 << 63) - 1: 0},
        [0] * (values.MOST_MEMBERS + 1),
    ],
    ids=[
        "object",
        "set",
        "objects",
        "records",
        "huge",
        "deep",
        "cyclic",
        "key",
        "long key",
        "long negative key",
        "many",
    ],
)
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(values.Unsendable):
        values.write(value)


# Members of a list, each of which counts as several, and how many there may be.
COSTLY = {"arrays": (np.zeros(1, np.float32), 16 + 1), "lists": ([], 2 + 1), "dictionaries": ({1: None}, 2 + 3 + 1)}


@pytest.mark.promise("Source", "A value that takes longer to read than a million numbers does not travel.")
@pytest.mark.parametrize(("member", "count"), COSTLY.values(), ids=COSTLY)
def test_both_ends_count_alike_what_takes_long_to_read(member: object, count: int) -> None:
    most = (values.MOST_MEMBERS - 2) // count
    written = values.write([member] * most)
    assert len(values.read(written.document, memoryview(bytearray(written.size_bytes)))) == most
    with pytest.raises(values.Unsendable, match="of which an array counts as 16"):
        values.write([member] * (most + 1))
    one = values.write([member])
    document = b"\xdd" + (most + 1).to_bytes(4, "big") + one.document[1:] * (most + 1)
    with pytest.raises(RemoteProtocolError, match=f"more than {values.MOST_MEMBERS} members"):
        values.read(document, memoryview(bytearray((most + 1) * one.size_bytes)))


def test_a_dictionary_that_takes_too_long_is_not_even_begun() -> None:
    count = values.MOST_MEMBERS // 3 + 1
    document = b"\xdf" + count.to_bytes(4, "big") + b"".join(msgpack.packb(n) + b"\x00" for n in range(count))
    with pytest.raises(RemoteProtocolError, match="exceeds max_map_len"):
        values.read(document, None)


ARRAY, BYTES = 1, 2


def array(*fields: object) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(ARRAY, msgpack.packb(fields))))


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"\xc1",
        b"\x91" * 1000 + b"\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xdd\x00\x20\x00\x00" + b"\x90" * (1 << 21),
        array("O", [1], 0, 8),
        array("|V8", [1], 0, 8),
        array("f4", [2], 0, 8 + 1),
        array("f4", [2], 1 << 40, 8),
        array("f4", [-1], 0, 8),
        array("f4", [1 << 62, 1 << 62], 0, 0),
        array("S0", [1 << 40], 0, 0),
        array("f4", [1] * 40, 0, 4),
        array("f4", "x", 0, 4),
        array("f4", [1.5], 0, 4),
        array("f4; import os", [1], 0, 4),
        array("f4", [1]),
        msgpack.packb(msgpack.ExtType(BYTES, b"\xff" * 16)),
        msgpack.packb(msgpack.ExtType(BYTES, b"1")),
        msgpack.packb(msgpack.ExtType(9, b"1")),
        msgpack.packb({"a": 1})[:-1],
        b"\x81\x90\x01",
    ],
)
def test_hostile_documents_are_refused(document: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        values.read(document, memoryview(bytes(64)))


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        msgpack.packb(1),
        msgpack.packb([b"", 0, 8]),
        msgpack.packb([b"", 0, 8, -1]),
        msgpack.packb(["", 0, 8, 8]),
        msgpack.packb([b"", 9, 8, 8]),
        msgpack.packb([b"", 0, 8, 0]),
        msgpack.packb([b"", True, 8, 8]),
    ],
)
def test_hostile_packets_are_refused(packet: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        values.unpacked(packet, lambda size_bytes: memoryview(bytes(size_bytes)))
