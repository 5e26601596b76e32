"""The BYTES format."""

from __future__ import annotations

import struct
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from moonpool.ipc import tensors
from moonpool.ipc.errors import BadTensor
from moonpool.ipc.tensors import decode_bytes, encode_bytes

SHAPES = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
STRING_ARRAYS = npst.arrays(np.object_, SHAPES, elements=st.binary(max_size=20), fill=st.nothing())


def strings(*elements: object) -> NDArray[np.object_]:
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array


def wire(*payloads: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(payload)) + payload for payload in payloads)


@given(STRING_ARRAYS)
def test_decoding_undoes_encoding(array: NDArray[np.object_]) -> None:
    decoded = decode_bytes(encode_bytes(array), array.shape)

    assert decoded.shape == array.shape
    assert decoded.dtype == np.object_
    assert np.array_equal(decoded, array)


@given(STRING_ARRAYS)
def test_elements_travel_in_c_order_however_the_array_lies(array: NDArray[np.object_]) -> None:
    assert encode_bytes(array.T) == encode_bytes(np.ascontiguousarray(array.T).reshape(array.T.shape))


@given(st.lists(st.binary(max_size=300), max_size=300))
def test_encoding_follows_the_plain_definition(payloads: list[bytes]) -> None:
    assert encode_bytes(strings(*payloads)) == wire(*payloads)


def test_other_elements_travel_as_the_text_of_their_str() -> None:
    array = strings(1, None, 2.5, "é", b"\xff", np.bytes_(b"x\0y"), np.str_("z"), [1, 2])

    assert encode_bytes(array) == wire(b"1", b"None", b"2.5", "é".encode(), b"\xff", b"x\0y", b"z", b"[1, 2]")


def test_an_s_array_loses_trailing_nuls_as_in_numpy() -> None:
    array = np.array([b"a\0", b"\0b", b""], dtype="S4")

    assert encode_bytes(array) == wire(b"a", b"\0b", b"")


def test_a_matrix_is_not_nested() -> None:
    array = np.array([[b"a", b"b"]], dtype=object).view(np.matrix)

    assert encode_bytes(array) == wire(b"a", b"b")


def test_32_dimensions_and_none_come_back() -> None:
    assert decode_bytes(wire(b"a"), (1,) * 32).ndim == 32
    assert decode_bytes(wire(b"a"), ()).item() == b"a"


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), (0, 2**40)])
def test_no_elements_take_no_bytes(shape: tuple[int, ...]) -> None:
    array = decode_bytes(b"", shape)

    assert array.shape == shape
    assert encode_bytes(array) == b""


@pytest.mark.parametrize("dtype", ["U3", "f4", "V2", "M8[s]"])
def test_only_object_and_s_arrays_are_encoded(dtype: str) -> None:
    with pytest.raises(BadTensor, match=r"tensor 'X' has dtype .*astype\(object\)"):
        encode_bytes(np.zeros(2, dtype), "X")


class Mute:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("element", ["\ud800", Mute()])
def test_an_element_without_utf_8_form_is_named(element: object) -> None:
    kind = type(element).__name__
    with pytest.raises(BadTensor, match=f"element 1 of tensor 'X', of type {kind}, has no UTF-8"):
        encode_bytes(strings("good", element), "X")


class Boaster(bytes):
    def __len__(self) -> int:
        return 2**40


def test_a_subclass_cannot_lie_about_its_length() -> None:
    assert encode_bytes(strings(Boaster(b"abc"))) == wire(b"abc")


def test_an_element_that_its_length_field_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "MAX_STRING_BYTES", 3)

    assert encode_bytes(strings(b"123"))
    with pytest.raises(BadTensor, match="tensor 'X' has 4 bytes, and 3 is the most"):
        encode_bytes(strings(b"123", b"1234"), "X")


INCOMPLETE = "Invalid bytes tensor data: incomplete length field"
BEYOND = "Invalid bytes tensor data: string extends beyond buffer"


@pytest.mark.parametrize(
    ("data", "shape", "text"),
    [
        (b"\1", (1,), INCOMPLETE),
        (b"\0\0\0", (1,), INCOMPLETE),
        (wire(b"ab") + b"\0\0", (2,), INCOMPLETE),
        (wire(b"ab") + b"\0\0", (1,), INCOMPLETE),
        (b"\0\0\0", (0,), INCOMPLETE),
        # Its last four bytes look like the length field of an empty string.
        (wire(b"\0\0\0") + b"\0", (2,), INCOMPLETE),
        (b"\1\0\0\0", (1,), BEYOND),
        (b"\xff\xff\xff\xffabc", (1,), BEYOND),
        (wire(b"ab") + b"\3\0\0\0ab", (2,), BEYOND),
        (wire(b"ab")[:-1], (2,), BEYOND),
        # Its last payload looks complete with a length field inside itself.
        (b"\x09\0\0\0\4\0\0\0abcd", (1,), BEYOND),
        (b"", (2,), "expected 2 strings for inference input 'X', got 0"),
        (wire(b"ab"), (2, 2), "expected 4 strings for inference input 'X', got 1"),
        (wire(b""), (2**59,), f"expected {2**59} strings for inference input 'X', got 1"),
        (wire(b"ab", b"c", b"d"), (1,), "unexpected number of string elements 2 for inference input 'X', expecting 1"),
        (wire(b"ab"), (0,), "unexpected number of string elements 1 for inference input 'X', expecting 0"),
    ],
)
def test_a_malformed_buffer_is_refused_in_triton_s_words(data: bytes, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(BadTensor) as caught:
        decode_bytes(data, shape, "X")

    assert str(caught.value) == text


def test_without_a_name_no_input_is_named() -> None:
    with pytest.raises(BadTensor, match=r"^expected 1 strings, got 0$"):
        decode_bytes(b"", (1,))


def test_a_shape_from_outside_is_checked() -> None:
    with pytest.raises(BadTensor, match="33 dimensions"):
        decode_bytes(wire(b"a"), (1,) * 33)
    with pytest.raises(BadTensor, match="dimension -1"):
        decode_bytes(wire(b"a"), (-1,))


def plain_decode(data: bytes, count: int) -> list[bytes] | None:
    """The definition, an element at a time."""
    payloads = []
    while data:
        length = int.from_bytes(data[:4], "little")
        if len(data) < 4 + length:
            return None
        payloads.append(data[4 : 4 + length])
        data = data[4 + length :]
    return payloads if len(payloads) == count else None


SHORT_WIRES = st.lists(
    st.sampled_from([b"\0", b"\1", b"\2", b"\5", b"\0\0\0", b"\1\0\0\0a", b"\0\0\0\0"]), max_size=12
).map(b"".join)


@given(SHORT_WIRES | st.binary(max_size=40), st.integers(0, 6))
def test_a_buffer_decodes_by_the_definition_or_raises_bad_tensor(data: bytes, count: int) -> None:
    expected = plain_decode(data, count)
    try:
        decoded = decode_bytes(data, (count,)).tolist()
    except BadTensor:
        decoded = None

    assert decoded == expected


@pytest.mark.parametrize(
    "buffer", [bytearray(wire(b"ab", b"c")), memoryview(wire(b"ab", b"c")), np.frombuffer(wire(b"ab", b"c"), np.uint8)]
)
def test_any_kind_of_buffer_is_decoded(buffer: memoryview) -> None:
    assert decode_bytes(buffer, (2,)).tolist() == [b"ab", b"c"]


def outcome(memory: bytearray, count: int) -> str:
    try:
        decode_bytes(memory, (count,))
    except BadTensor as error:
        return str(error)
    return "decoded"


def test_a_buffer_that_changes_meanwhile_does_no_harm() -> None:
    memory = bytearray(wire(*[b"ab"] * 500))
    stop = threading.Event()

    def scribble() -> None:
        while not stop.is_set():
            memory[0] ^= 0xFF

    peer = threading.Thread(target=scribble)
    peer.start()
    try:
        results = {outcome(memory, 500) for _ in range(100)}
    finally:
        stop.set()
        peer.join()

    assert results <= {"decoded", INCOMPLETE, BEYOND}
