"""Tests that the compiled classes of attributes are to Python's code what the classes in Python are."""

from __future__ import annotations

import copy
import copyreg
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from moonpool.stub import attributes
from moonpool.stub.pb_utils import InferenceRequest, InferenceResponse, Tensor


class Mine(Tensor):
    """A tensor of a model's own class, which may have any attribute."""


class Slotted(Tensor):
    __slots__ = ("unit",)


@pytest.mark.skipif(attributes.compiled is None, reason="nothing is compiled here")
def test_both_forms_have_the_same_attributes() -> None:
    for form in attributes.PYTHON_FORMS:
        compiled = getattr(attributes.compiled, form.__name__)
        assert getattr(attributes, form.__name__) is compiled
        assert compiled.__slots__ == form.__slots__
        assert compiled.__basicsize__ == form.__basicsize__


@pytest.mark.parametrize("form", ["TensorBase", "InferenceRequestBase", "BatchBase"])
def test_attributes_can_be_set_and_deleted(form: str) -> None:
    kind = getattr(attributes, form)
    found = kind()
    for name in kind.__slots__:
        setattr(found, name, name)
    assert [getattr(found, name) for name in kind.__slots__] == list(kind.__slots__)
    for name in kind.__slots__:
        delattr(found, name)
        with pytest.raises(AttributeError, match=name):
            getattr(found, name)
    with pytest.raises(AttributeError):
        found.other = 1


def test_models_derive_from_tensors() -> None:
    mine, slotted = Mine("X", np.ones(2)), Slotted("X", np.ones(2))
    mine.unit, slotted.unit = "m", "s"  # type: ignore[attr-defined]
    assert (vars(mine), slotted.unit) == ({"unit": "m"}, "s")  # type: ignore[attr-defined]
    for tensor in (mine, slotted, Tensor("X", np.ones(2))):
        assert (tensor.name(), tensor.shape()) == ("X", [2])
        assert weakref.ref(tensor)() is tensor
    with pytest.raises(AttributeError):
        Tensor("X", np.ones(2)).unit = "m"  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        type("Both", (Tensor, InferenceResponse), {})


def test_tensors_are_copied_as_objects_with_slots() -> None:
    tensor = Mine("X", np.ones(2))
    tensor.unit = "m"  # type: ignore[attr-defined]
    reduced: Any = tensor.__reduce_ex__(2)
    made, arguments, (fields, slots), *_ = reduced
    assert (made, arguments, fields) == (copyreg.__newobj__, (Mine,), {"unit": "m"})  # type: ignore[attr-defined]
    assert slots["_name"] == "X"
    twin = copy.copy(tensor)
    assert twin.as_numpy() is tensor.as_numpy()
    assert (twin.name(), twin.unit) == ("X", "m")  # type: ignore[attr-defined]


def test_requests_cannot_be_copied() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.copy(InferenceRequest(inputs=[], requested_output_names=[], model_name="m"))


def test_cycles_through_attributes_are_collected() -> None:
    tensor: Any = Tensor("X", np.ones(2))
    response: Any = InferenceResponse([tensor])
    tensor._strings = response
    seen = weakref.ref(tensor), weakref.ref(response)
    del tensor, response
    gc.collect()
    assert [each() for each in seen] == [None, None]


@pytest.mark.parametrize("kind", [Tensor, InferenceRequest, InferenceResponse, Mine])
def test_an_object_whose_constructor_did_not_run_has_no_attributes(kind: Any) -> None:
    found = kind.__new__(kind)
    for base in kind.__mro__:
        for name in getattr(base, "__slots__", ()):
            if not name.startswith("__"):
                assert not hasattr(found, name)
