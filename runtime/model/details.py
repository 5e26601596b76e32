"""Checks the details of a request, which a caller gives beside its inputs, and the parameters among them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite

from moonpool.ipc.messages import (
    ANY_MEMORY,
    DEVICE_MEMORY,
    LONG,
    MAX_DEVICES,
    MAX_PARAMETERS,
    ORDINARY_MEMORY,
    SHORT,
    size_of,
)
from moonpool.runtime.arguments import OF_REQUEST
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.model.request import Details, Parameter

_UINT32 = 2**32 - 1
_UINT64 = 2**64 - 1
_NONE = Details()


def details_of(
    request_id: str,
    correlation_id: int | str,
    flags: int,
    timeout_us: int,
    priority: int,
    parameters: Mapping[str, Parameter] | None,
    trace_context: str | None = None,
    outputs_in: str | None = None,
) -> Details | None:
    """Make the details of a request, None if all have their defaults.

    Raises `InvalidRequest` for values that no message to a stub can carry.
    """
    given = request_id or correlation_id or flags or timeout_us or priority or parameters
    if not given and trace_context is None and outputs_in is None:
        return None
    memory, device = (ANY_MEMORY, 0) if outputs_in is None else _memory(outputs_in)
    if isinstance(correlation_id, str):
        correlation: int | str = _text("correlation_id", correlation_id, SHORT)
    else:
        correlation = _whole("correlation_id", correlation_id, _UINT64, ", or a text")
    # The class' own way would be interpreted.
    return tuple.__new__(
        Details,
        (
            _text("request_id", request_id, LONG),
            correlation,
            _whole("flags", flags, _UINT32),
            _whole("queue_timeout_us", timeout_us, _UINT64),
            _whole("priority", priority, _UINT64),
            (_parameters(parameters) or None) if parameters else None,
            None,
            None if trace_context is None else _text("trace_context", trace_context, SHORT),
            memory,
            device,
        ),
    )


def _memory(outputs_in: str) -> tuple[int, int]:
    """Read `outputs_in`: the kind of memory that outputs are wanted in, and the device."""
    if outputs_in == "cpu":
        return ORDINARY_MEMORY, 0
    found = re.fullmatch(r"gpu(?::([0-9]{1,4}))?", str(outputs_in), re.ASCII)
    device = int(found[1] or 0) if found is not None else MAX_DEVICES
    if device >= MAX_DEVICES:
        raise InvalidRequest(f"outputs_in must be 'cpu', 'gpu' or 'gpu:1', not {outputs_in!r:.60}")
    return DEVICE_MEMORY, device


def with_parameters(details: Details | None, further: Mapping[str, Parameter]) -> Details | None:
    """Return the details with more parameters, which replace others of the same names. Raises `InvalidRequest`."""
    if not further:
        return details
    details = details or Details()
    return details._replace(parameters=_parameters({**(details.parameters or {}), **further}))


def _whole(name: str, value: object, high: int, also: str = "") -> int:
    # Most are, and need no further look.
    if type(value) is int and 0 <= value <= high:
        return value
    return OF_REQUEST.whole(name, value, 0, high, also)


def with_id(details: Details | None, request_id: str) -> Details:
    """Return the details with this id, which the caller has checked."""
    return tuple.__new__(Details, (request_id, *(details or _NONE)[1:]))


def _text(name: str, value: object, length: int) -> str:
    # Most are, and need no further look.
    if type(value) is str and len(value) <= length and value.isascii():
        return value
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, not {type(value).__name__}")
    if size_of(value) > length:
        raise InvalidRequest(f"{name} has {size_of(value)} bytes, and {length} is the most")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} is not Unicode text: {error}") from error
    return str(value)


def check_finite(parameters: Mapping[str, Parameter]) -> None:
    """Raise `InvalidRequest` for NaN and infinities: parameters travel as JSON, which has neither."""
    for key, value in parameters.items():
        if type(value) is float and not isfinite(value):
            raise InvalidRequest(f"parameter {key!r:.80} must be a finite number, not {value}")


def _parameters(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    if type(parameters) is not dict and not isinstance(parameters, Mapping):
        OF_REQUEST.refuse("parameters", "a map of names to values", parameters)
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidRequest(f"there are {len(parameters)} parameters, and {MAX_PARAMETERS} is the most")
    checked: dict[str, Parameter] = {}
    for key, value in parameters.items():
        if type(key) is not str or type(value) not in (bool, int, float, str):
            raise InvalidRequest(
                f"parameter {key!r} must be a string with a bool, int, float or str, not {type(value).__name__}"
            )
        if type(value) is str:
            _text(f"parameter {key!r}", value, LONG)
        elif type(value) is int and not -(2**63) <= value <= _UINT64:
            raise InvalidRequest(f"parameter {key!r} has more than 64 bits")
        checked[_text("the name of a parameter", key, LONG)] = value
    check_finite(checked)
    return checked
