"""Tests the error types that models use."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.stub.pb_utils.errors import TritonError, TritonModelException

CODES = [
    "UNKNOWN",
    "INTERNAL",
    "NOT_FOUND",
    "INVALID_ARG",
    "UNAVAILABLE",
    "UNSUPPORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
]


@pytest.mark.parametrize(("number", "name"), list(enumerate(CODES)))
def test_codes_have_tritons_numbers(number: int, name: str) -> None:
    error = TritonError("text", getattr(TritonError, name))

    assert error.message() == "text"
    assert int(error.code()) == number
    assert error.code().name == name


def test_an_error_is_internal_unless_it_says_otherwise() -> None:
    assert TritonError("text").code() is TritonError.INTERNAL


@pytest.mark.parametrize("arguments", [(None,), ("text", None), ("text", 3), (3,)])
def test_wrong_types_are_type_errors(arguments: Any) -> None:
    with pytest.raises(TypeError):
        TritonError(*arguments)


def test_an_error_is_a_value_and_no_exception() -> None:
    assert not isinstance(TritonError("text"), BaseException)
    assert issubclass(TritonModelException, Exception)
