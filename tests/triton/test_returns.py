"""`execute` may return and raise many things, with the same result on both sides."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tests.triton.answers import Failure
from tests.triton.both import Both

pytestmark = [
    pytest.mark.triton,
    pytest.mark.promise(
        "Fidelity",
        "Whatever `execute` returns, raises or sends, the outcome is that of a real Triton, "
        "coroutines and streams included.",
    ),
]

RETURNS: list[Any] = [
    "[response()]",
    "[response(y(), y([b'a', b''], 'T', object))]",
    "[response(y([b'a', b''], 'T', object))]",
    "[pb_utils.InferenceResponse([])]",
    "[response(y([], 'Y'))]",
    "[response(y([[1, 2]]))]",
    "[response(y(dtype=np.int64))]",
    "[response(y(name='Z'))]",
    "[response(error=pb_utils.TritonError('on purpose'))]",
    "[response(error=pb_utils.TritonError(''))]",
    "[response(error=pb_utils.TritonError('ä \\n two lines'))]",
    "[response(error=pb_utils.TritonError('x' * 3000))]",
    *(
        f"[response(error=pb_utils.TritonError('on purpose', pb_utils.TritonError.{code}))]"
        for code in [
            "UNKNOWN",
            "INTERNAL",
            "NOT_FOUND",
            "INVALID_ARG",
            "UNAVAILABLE",
            "UNSUPPORTED",
            "ALREADY_EXISTS",
            "CANCELLED",
        ]
    ),
    # No list
    "response()",
    "(response(),)",
    "{}",
    "'text'",
    "b''",
    "5",
    "0.5",
    "False",
    "np.zeros(1)",
    "pb_utils",
    "type",
    "pb_utils.TritonError('x')",
    # Another length
    "[]",
    "[response(), response()]",
    "[None, None]",
    # Something else in it
    "[5]",
    "[y()]",
    "['text']",
    "[[response()]]",
    "[np.zeros(1)]",
    "[pb_utils.TritonError('x')]",
    "[requests[0]]",
    # Exceptions
    "raises(ValueError('on purpose'))",
    "raises(ValueError())",
    "raises(ValueError('two\\nlines'))",
    "raises(ValueError('ä'))",
    "raises(KeyError('x'))",
    "raises(Mine('mine'))",
    "raises(pb_utils.TritonModelException('a text'))",
    "raises(OSError(2, 'text', 'file'))",
    "raises(StopIteration)",
    "raises(StopIteration(5))",
    "raises(GeneratorExit('x'))",
    pytest.param("raises(MemoryError('x'))", marks=pytest.mark.needs("a limit that is not named")),
    "raises(KeyboardInterrupt)",
    "raises(SystemExit(3))",
    "sys.exit('text')",
    "1 / 0",
    "undefined_name",
    "[].nothing",
    "open('/nothing of that name')",
    "np.zeros(2) + np.zeros(3)",
    "pb_utils.Tensor('', np.zeros(1))",
    "pb_utils.InferenceResponse([None])",
    "eval('(')",
    "raises('text')",
    "raises(pb_utils.TritonError('x'))",
]


@pytest.mark.promise("Models", "A wrong return value of `execute` is refused with Triton's texts.")
@pytest.mark.parametrize("code", RETURNS)
def test_a_return_has_the_same_outcome(both: Both, code: str) -> None:
    both.infer("returns", {"CODE": np.array([code.encode()], object)})


def test_the_line_of_a_frame_is_where_it_raised_not_where_it_ended(both: Both) -> None:
    inputs = {"CODE": np.array([b"json.loads('{')"], object)}
    theirs = both.triton.infer("returns", inputs)
    ours = both.moonpool.infer("returns", inputs)

    assert isinstance(theirs, Failure)
    assert isinstance(ours, Failure)
    there, here = (re.sub(r"\(\d+\): raw_decode", "", each.text) for each in (theirs, ours))
    assert theirs.text != ours.text
    assert there == here
