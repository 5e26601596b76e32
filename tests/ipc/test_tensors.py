"""Datatypes and shapes."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from moonpool.ipc import tensors
from moonpool.ipc.errors import BadTensor

FIXED = sorted(set(tensors.NAMES) - {tensors.BYTES})
SHAPES = npst.array_shapes(min_dims=0, max_dims=6, min_side=0, max_side=5)


@pytest.mark.parametrize("code", FIXED)
def test_a_code_and_its_dtype_name_each_other(code: int) -> None:
    dtype = tensors.DTYPES[code]

    assert tensors.code_of(dtype) == code
    assert dtype.itemsize == tensors.ITEMSIZE[code]
    assert tensors.CODES[tensors.NAMES[code]] == code


def test_the_codes_are_those_of_triton() -> None:
    names = "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BYTES BF16"

    assert list(tensors.NAMES) == list(range(1, 15))
    assert list(tensors.NAMES.values()) == names.split()


@pytest.mark.parametrize("code", [0, 15, -1, None, "FP32"])
def test_an_unknown_code_has_no_dtype(code: int) -> None:
    with pytest.raises(BadTensor, match="not a datatype code"):
        tensors.DTYPES[code]


def test_strings_have_no_fixed_dtype() -> None:
    with pytest.raises(BadTensor, match="no fixed size"):
        tensors.DTYPES[tensors.BYTES]


@pytest.mark.parametrize("dtype", ["O", "S", "S1", "S300"])
def test_object_and_s_arrays_are_bytes(dtype: str) -> None:
    assert tensors.code_of(np.dtype(dtype)) == tensors.BYTES


def test_every_spelling_of_a_native_integer_is_known() -> None:
    assert tensors.code_of(np.dtype("longlong")) == tensors.CODES["INT64"]
    assert tensors.code_of(np.dtype("=u8")) == tensors.CODES["UINT64"]
    assert tensors.code_of(np.dtype("<i4", metadata={"unit": "m"})) == tensors.CODES["INT32"]


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        (np.dtype(">f4"), r"dtype >f4.*astype\('float32'\)"),
        (np.dtype("c8"), "dtype complex64.*real and imaginary parts"),
        (np.dtype("M8[s]"), r"dtype datetime64\[s\].*astype\('int64'\)"),
        (np.dtype("m8[s]"), r"dtype timedelta64\[s\].*astype\('int64'\)"),
        (np.dtype("U5"), r"dtype <U5.*astype\(object\)"),
        (np.dtype([("a", "i4"), ("b", "f4")]), "one array for each field"),
        (np.dtype(("f4", (2,))), "one array for each field"),
        (np.dtype("V3"), "one of BOOL, UINT8"),
        (np.dtype(np.longdouble), "one of BOOL, UINT8"),
    ],
)
def test_a_dtype_without_a_datatype_is_refused_with_advice(dtype: np.dtype[np.generic], advice: str) -> None:
    with pytest.raises(BadTensor, match=f"tensor 'INPUT0' has.*{advice}"):
        tensors.code_of(dtype, "INPUT0")


def test_bf16_is_raw_words_where_ml_dtypes_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    table = type(tensors.DTYPES)()

    assert table[tensors.BF16] == np.dtype(np.uint16)


def test_ml_dtypes_is_imported_only_when_a_bf16_tensor_is_met() -> None:
    # The test needs a process of its own, because other tests may have imported the package in this one.
    program = (
        "import sys\n"
        f"sys.path[:] = {sys.path!r}\n"
        "from moonpool.ipc import tensors\n"
        "before = 'ml_dtypes' in sys.modules\n"
        "tensors.view(bytearray(4), 0, tensors.BF16, (2,))\n"
        "sys.exit(before or 'ml_dtypes' not in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-I", "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(("shape", "count"), [((), 1), ((0,), 0), ((3, 4), 12), ((1,) * 32, 1), ((5, 0, 2**40), 0)])
def test_a_good_shape_gives_its_number_of_elements(shape: tuple[int, ...], count: int) -> None:
    assert tensors.check_shape(shape) == count
    assert tensors.element_count(shape) == count


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((1,) * 33, "33 dimensions, and 32 is the most"),
        ((2, -1), "dimension -1; each dimension must be an integer of at least 0"),
        ((2.0,), "dimension 2.0"),
        ((True,), "dimension True"),
        ((None,), "dimension None"),
        (("3" * 1000,), r"dimension '3{30,39};"),
        ((2**30, 2**30), r"more than 2\*\*59 elements"),
        ((0, 2**60), r"more than 2\*\*59 elements"),
        ((0, 2**30, 2**30), r"more than 2\*\*59 elements"),
    ],
)
def test_a_bad_shape_is_refused_by_name(shape: tuple[int, ...], why: str) -> None:
    with pytest.raises(BadTensor, match=f"the shape of tensor 'X' has.*{why}"):
        tensors.check_shape(shape, "X")


@given(st.lists(st.integers() | st.none() | st.text() | st.floats() | st.booleans(), max_size=40))
@settings(deadline=timedelta(seconds=1))
def test_no_shape_raises_anything_but_bad_tensor(shape: list[int]) -> None:
    try:
        count = tensors.check_shape(shape)
    except BadTensor:
        return
    assert count == np.prod(np.array(shape, dtype=object))
    assert 0 <= count <= tensors.MAX_ELEMENTS


@given(st.sampled_from(FIXED), SHAPES, st.integers(0, 70), st.randoms())
def test_a_view_shows_what_was_written(code: int, shape: tuple[int, ...], offset: int, rng) -> None:  # type: ignore[no-untyped-def]
    size = tensors.size_bytes(code, shape)
    content = rng.randbytes(size)
    memory = bytearray(offset) + content + bytearray(9)

    array = tensors.view(memory, offset, code, shape)

    assert array.shape == shape
    assert tensors.code_of(array.dtype) == code
    assert array.tobytes() == content


def test_writing_to_a_view_writes_to_the_memory() -> None:
    memory = bytearray(16)

    tensors.view(memory, 4, tensors.CODES["INT32"], (2,))[1] = 7

    assert memory[8:12] == b"\7\0\0\0"


def test_a_view_of_memory_that_must_not_change_is_read_only() -> None:
    assert not tensors.view(bytes(4), 0, tensors.CODES["INT32"], (1,)).flags.writeable


@pytest.mark.parametrize(("offset", "shape"), [(0, (5,)), (13, (1,)), (17, (0,)), (-4, (1,)), (2**70, (1,))])
def test_a_view_beyond_its_memory_is_refused(offset: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(BadTensor, match=r"FP32 tensor of shape .* does not lie within its memory"):
        tensors.view(bytearray(16), offset, tensors.CODES["FP32"], shape)


def test_a_view_of_a_bad_shape_is_refused() -> None:
    with pytest.raises(BadTensor, match="dimension -1"):
        tensors.view(bytearray(16), 8, tensors.CODES["FP32"], (-1,))


@given(npst.arrays(npst.integer_dtypes(endianness="="), SHAPES))
def test_arrays_that_are_not_contiguous_keep_their_datatype_and_content(
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]],
) -> None:
    turned = array.T
    memory = bytearray(turned.tobytes())

    copy = tensors.view(memory, 0, tensors.code_of(turned.dtype), turned.shape)

    assert np.array_equal(copy, turned)
