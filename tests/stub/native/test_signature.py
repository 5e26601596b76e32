"""Tests reading inputs and outputs from type hints."""

from __future__ import annotations
import __future__

import functools
from collections.abc import Callable
from typing import Annotated, Any, Optional, TypedDict, TypeVar, Union

import numpy as np
import pytest
from numpy.typing import NDArray

from moonpool.ipc.errors import BadTensor
from moonpool.stub.native import hints
from moonpool.stub.native.hints import Batch, Bytes, Float32, Int64, Outputs, TensorType
from moonpool.stub.native.signature import BadHint, signature_of

# The hints of this file are text, as `from __future__ import annotations` makes them; those of
# models made from source below are objects. Both must be understood.
# ruff: noqa: N803
# mypy: disable-error-code="valid-type, name-defined, type-arg, misc, syntax, attr-defined"


class AddSub:
    def __call__(self, A: Float32[Batch, 4], B: Float32[Batch, 4] | None = None) -> Outputs(
        SUM=Float32[Batch, 4], COUNT=Int64[Batch]
    ):
        raise NotImplementedError


class Sums(TypedDict):
    SUM: Float32[Batch, 4]
    COUNT: Int64[Batch]


def described(tensor: TensorType | None) -> object:
    return tensor and (tensor.data_type, tensor.dims)


def inputs_of(source: str, flags: int = 0) -> dict[str, object]:
    return {name: described(t) for name, t in signature_of(made(source, flags)).inputs.items()}


def outputs_of(source: str) -> dict[str, object]:
    return {name: described(t) for name, t in signature_of(made(source)).outputs.items()}


def made(source: str, flags: int = 0) -> Callable[..., object]:
    space: dict[str, Any] = {
        **{name: getattr(hints, name) for name in hints.__all__},
        "np": np,
        "NDArray": NDArray,
        "Annotated": Annotated,
        "Optional": Optional,
        "Union": Union,
        "Any": Any,
        "Sums": Sums,
    }
    exec(compile(f"def model{source}: ...", "model.py", "exec", flags, dont_inherit=True), space)
    model: Callable[..., object] = space["model"]
    return model


def test_a_class_is_read_by_its_call() -> None:
    signature = signature_of(AddSub)

    assert described(signature.inputs["A"]) == ("TYPE_FP32", (Batch, 4))
    assert {name: described(t) for name, t in signature.outputs.items()} == {
        "SUM": ("TYPE_FP32", (Batch, 4)),
        "COUNT": ("TYPE_INT64", (Batch,)),
    }
    assert signature.is_batched
    assert signature.where == "AddSub.__call__()"


def test_an_input_with_a_default_is_optional() -> None:
    signature = signature_of(AddSub)
    optional = signature.inputs["B"]

    assert signature.required == {"A"}
    assert optional is not None
    assert optional.is_optional
    assert described(optional) == ("TYPE_FP32", (Batch, 4))


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("Float32", ("TYPE_FP32", None)),
        ("Float32[4]", ("TYPE_FP32", (4,))),
        ("Float32[()]", ("TYPE_FP32", ())),
        ("Bool['n', :, -1]", ("TYPE_BOOL", ("n", None, None))),
        ("Bytes[Batch]", ("TYPE_STRING", (Batch,))),
        ("Float32[4] | None", ("TYPE_FP32", (4,))),
        ("NDArray[np.float64]", ("TYPE_FP64", None)),
        ("NDArray[np.object_]", ("TYPE_STRING", None)),
        ("NDArray[np.bytes_]", ("TYPE_STRING", None)),
        ("np.ndarray[Any, np.dtype[np.int8]]", ("TYPE_INT8", None)),
        ("Annotated[NDArray[np.int32], Batch, 4]", ("TYPE_INT32", (Batch, 4))),
        ("Annotated[NDArray[np.int32], ()]", ("TYPE_INT32", ())),
        ("Optional[NDArray[np.uint8]]", ("TYPE_UINT8", None)),
        ("'Float32[4]'", ("TYPE_FP32", (4,))),
        ("np.ndarray", None),
        ("NDArray[Any]", None),
        ("Any", None),
    ],
)
@pytest.mark.parametrize("flags", [0, __future__.annotations.compiler_flag])
def test_a_hint_is_understood_as_an_object_and_as_text(hint: str, expected: object, flags: int) -> None:
    assert inputs_of(f"(X: {hint})", flags) == {"X": expected}


def test_an_alias_stands_for_its_value() -> None:
    from typing_extensions import TypeAliasType

    scalar = TypeVar("scalar", bound=np.generic)
    generic = TypeAliasType("generic", NDArray[scalar], type_params=(scalar,))
    function = made("(X, Y)")
    function.__annotations__.update(X=TypeAliasType("Rows", Float32[4]), Y=generic[np.int8])

    assert {name: described(t) for name, t in signature_of(function).inputs.items()} == {
        "X": ("TYPE_FP32", (4,)),
        "Y": ("TYPE_INT8", None),
    }


def test_a_parameter_without_a_hint_is_known_by_name() -> None:
    signature = signature_of(made("(X, **others)"))

    assert signature.inputs == {"X": None}
    assert signature.takes_any


@pytest.mark.parametrize(
    "hint",
    [
        "Outputs(SUM=Float32[Batch, 4], COUNT=Int64[Batch])",
        "{'SUM': Float32[Batch, 4], 'COUNT': Int64[Batch]}",
        "Sums",
        "'Sums'",
    ],
)
def test_outputs_are_named_in_three_ways(hint: str) -> None:
    assert outputs_of(f"() -> {hint}") == {"SUM": ("TYPE_FP32", (Batch, 4)), "COUNT": ("TYPE_INT64", (Batch,))}


def test_a_single_output_has_a_name_of_its_own() -> None:
    assert outputs_of("() -> Float32[Batch]") == {"OUTPUT0": ("TYPE_FP32", (Batch,))}


@pytest.mark.parametrize("hint", ["dict[str, NDArray[np.float32]]", "Any", "np.ndarray"])
def test_a_hint_that_names_no_outputs_says_nothing(hint: str) -> None:
    assert outputs_of(f"() -> {hint}") == {}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("(X: float)", "model(): the hint of 'X' is <class 'float'>; write a moonpool type"),
        ("(X: 'Flot32')", "model(): the hint of 'X', 'Flot32', cannot be evaluated"),
        ("(X: NDArray[np.complex64])", "model(): the hint of 'X' says complex64, which no"),
        ("(*X)", "model(): 'X' cannot be given by name"),
        ("(X, /)", "model(): 'X' cannot be given by name"),
        ("() -> Outputs(Y=3)", "model(): the hint of output 'Y' is 3"),
    ],
)
def test_a_wrong_hint_is_refused_with_its_place(source: str, text: str) -> None:
    with pytest.raises(BadHint) as caught:
        signature_of(made(source))

    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("dims", [1.5, -2, (4, Batch), True])
def test_a_wrong_dimension_is_refused(dims: Any) -> None:
    with pytest.raises(BadTensor, match="Float32"):
        Float32[dims]


def test_a_type_makes_arrays_and_shows_itself() -> None:
    assert Float32([1, 2]).dtype == np.float32
    assert Bytes(["a"]).dtype == np.object_
    assert repr(Float32[Batch, 4]) == "Float32[Batch, 4]"


def test_the_names_can_be_had_from_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import moonpool

    monkeypatch.setattr(moonpool, "Float32", "its own", raising=False)
    hints.publish()

    assert moonpool.__dict__["Float32"] == "its own"
    assert hasattr(moonpool, "Outputs")


def test_a_decorator_of_another_module_hides_no_hint() -> None:
    names: dict[str, Any] = {"functools": functools}
    exec(
        "def decorated(function):\n"
        "    @functools.wraps(function)\n"
        "    def call(*arguments, **named): return function(*arguments, **named)\n"
        "    return call",
        names,
    )

    class Decorated:
        __call__ = names["decorated"](AddSub.__call__)

    assert signature_of(Decorated).inputs.keys() == {"A", "B"}
