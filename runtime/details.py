"""What a caller says of a request beside its inputs, checked for what can travel."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.request import Details

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moonpool.runtime.request import Parameter

_UINT32 = 2**32 - 1
_UINT64 = 2**64 - 1
_LONG = 1 << 20
_SHORT = 4096


def details_of(
    request_id: str,
    correlation_id: int | str,
    flags: int,
    timeout_us: int,
    priority: int,
    parameters: Mapping[str, Parameter] | None,
    trace_context: str | None = None,
) -> Details | None:
    """The details of a request, None where all are as usual. Raises `InvalidRequest` for what the table of messages does not describe."""
    given = request_id or correlation_id or flags or timeout_us or priority or parameters
    if not given and trace_context is None:
        return None
    if isinstance(correlation_id, str):
        correlation: int | str = _text("correlation_id", correlation_id, _SHORT)
    else:
        correlation = _number("correlation_id", correlation_id, _UINT64)
    return Details(
        _text("request_id", request_id, _LONG),
        correlation,
        _number("flags", flags, _UINT32),
        _number("queue_timeout_us", timeout_us, _UINT64),
        _number("priority", priority, _UINT64),
        _parameters(parameters or {}) or None,
        None,
        None if trace_context is None else _text("trace_context", trace_context, _SHORT),
    )


def with_parameters(details: Details | None, further: Mapping[str, Parameter]) -> Details | None:
    """The details with more parameters, which go before those that are there. Raises `InvalidRequest`."""
    if not further:
        return details
    details = details or Details()
    return details._replace(parameters=_parameters({**(details.parameters or {}), **further}))


def _number(name: str, value: object, high: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= high:
        raise InvalidRequest(f"{name} must be a whole number from 0 to {high}, not {value!r:.60}")
    return number


def _text(name: str, value: object, length: int) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, not {type(value).__name__}")
    if len(value) > length:
        raise InvalidRequest(f"{name} has {len(value)} characters, and {length} is the most")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} is no Unicode text: {error}") from error
    return str(value)


def _parameters(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    if len(parameters) > _SHORT:
        raise InvalidRequest(f"there are {len(parameters)} parameters, and {_SHORT} is the most")
    checked: dict[str, Parameter] = {}
    for key, value in parameters.items():
        if type(key) is not str or type(value) not in (bool, int, float, str):
            raise InvalidRequest(
                f"parameter {key!r} must be a string with a bool, int, float or str, "
                f"not {type(value).__name__}"
            )
        if type(value) is str:
            _text(f"parameter {key!r}", value, _LONG)
        elif type(value) is int and not -(2**63) <= value <= _UINT64:
            raise InvalidRequest(f"parameter {key!r} has more than 64 bits")
        checked[_text("the name of a parameter", key, _LONG)] = value
    return checked
