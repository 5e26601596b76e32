"""Tests the texts of an exception for clients and for the log."""

from __future__ import annotations

from types import CodeType
from typing import Any

import numpy as np
import pytest

from moonpool.stub.pb_utils.errors import InvalidReturn
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.stub.report import MAX_TEXT, describe, traceback_of

PATH = "/models/m/1/model.py"


def raised_by(source: str) -> BaseException:
    """Return the exception of a model whose `execute` calls `inner`, a function with the body `source`."""
    code: CodeType = compile(f"def inner():\n    {source}\n\ndef execute():\n    inner()\n", PATH, "exec")
    space: dict[str, Any] = {"Tensor": Tensor, "np": np}
    exec(code, space)
    try:
        space["execute"]()
    except BaseException as error:
        # The frames of this test file are not the model's.
        traceback = error.__traceback__
        return error.with_traceback(traceback.tb_next if traceback else None)
    raise AssertionError("nothing was raised")


def test_the_client_is_told_type_message_and_place_innermost_first() -> None:
    assert describe(raised_by("undefined_name")) == (
        f"NameError: name 'undefined_name' is not defined\n\nAt:\n  {PATH}(2): inner\n  {PATH}(5): execute\n"
    )


def test_frames_of_moonpool_are_left_out() -> None:
    text = describe(raised_by("Tensor('', np.zeros(1))"))

    assert text == (
        "TritonModelException: Tensor name cannot be an empty string.\n\n"
        f"At:\n  {PATH}(2): inner\n  {PATH}(5): execute\n"
    )


def test_an_exception_without_a_place_is_told_without_one() -> None:
    assert describe(SystemExit(3)) == "SystemExit: 3"


def test_moonpools_own_errors_are_told_as_they_are() -> None:
    assert describe(InvalidReturn("a sentence")) == "a sentence"


def test_an_empty_message_is_named() -> None:
    assert describe(ValueError()) == "ValueError: <EMPTY MESSAGE>"


def test_a_message_that_cannot_be_had_is_named() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("never mind")

    error = BrokenError()

    assert describe(error).startswith("BrokenError: <MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>")
    assert "BrokenError" in traceback_of(error)


def test_an_endless_message_is_cut() -> None:
    error = ValueError("x" * 10_000_000)

    assert len(describe(error)) < MAX_TEXT + 100
    assert len(traceback_of(error)) < MAX_TEXT + 100


def test_a_message_without_utf_8_form_gets_one() -> None:
    describe(ValueError("\ud800")).encode()


def test_the_traceback_starts_in_the_model_and_has_the_cause() -> None:
    error = raised_by("raise RuntimeError('outer') from ValueError('cause')")
    text = traceback_of(error)

    assert text.index("ValueError: cause") < text.index("RuntimeError: outer")
    assert f'File "{PATH}", line 5, in execute' in text


@pytest.mark.skipif(not hasattr(ValueError, "add_note"), reason="notes came with Python 3.11")
def test_notes_are_told() -> None:
    error = ValueError("text")
    error.add_note("a note")

    assert describe(error) == "ValueError: text\n__notes__ (len=1):\na note"
