"""Parameters of a request or a response: what may be in them, and their JSON text."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Union

from moonpool.stub.errors import TritonModelException

if TYPE_CHECKING:
    from collections.abc import Mapping

Parameter = Union[bool, int, float, str]


def checked(parameters: object) -> dict[str, Parameter] | None:
    """A copy of the parameters that a model gave, or None where there are none.

    Raises TritonModelException unless it is a dict, for keys and values of other types, and for NaN and infinities.
    """
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect N8pybind114dictE, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(key)}"
            )
        # Triton has no floats here; its text for what is refused stays as it is.
        if not isinstance(value, (bool, int, float, str)):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            # They travel in JSON, which has neither.
            raise TritonModelException(
                f"Expect parameters values to be finite, found {key!r:.80}: {value}"
            )
    return dict(parameters)


def as_json(parameters: Mapping[str, object] | None) -> str:
    """The text that `parameters()` gives of what a model made, and which it has to parse."""
    return json.dumps(parameters) if parameters else "{}"


def as_compact_json(parameters: Mapping[str, object] | None) -> str:
    """The same of what came from the runtime: Triton writes that itself, in another form."""
    if not parameters:
        return "{}"
    return json.dumps(parameters, separators=(",", ":"), ensure_ascii=False)
