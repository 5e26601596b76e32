"""The parameters of a request, as KServe's protocol and Triton's extensions name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.details import details_of
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.frontend.tensors import BadJson

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moonpool.runtime.request import Details, Parameter

START, END = 1, 2
# What the protocols themselves have a use for; the model does not see them.
_OWN = frozenset(
    {
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "timeout",
        "binary_data_output",
    }
)
_RESERVED = "triton_"
MAX_SEQUENCE_ID_BYTES = 128


class LongSequenceId(MoonpoolError):
    """The text that names a sequence is longer than Triton takes."""

    code = "UNSUPPORTED"

    def __init__(self) -> None:
        super().__init__(
            f"string correlation ID cannot be longer than {MAX_SEQUENCE_ID_BYTES} characters"
        )


def request_details(
    request_id: str, parameters: Mapping[str, object], trace_context: str | None = None
) -> Details | None:
    """What a request says beside its tensors. Raises `InvalidRequest`, `BadJson`, `LongSequenceId`.

    `sequence_id` (a number or a text), `sequence_start`, `sequence_end`, `priority` and `timeout` (µs in the queue) mean what
    they mean in Triton; the others are for the model.
    """
    if not parameters:
        return details_of(request_id, 0, 0, 0, 0, None, trace_context)
    flags = 0
    if _flag(parameters, "sequence_start"):
        flags |= START
    if _flag(parameters, "sequence_end"):
        flags |= END
    return details_of(
        request_id,
        _sequence(parameters),
        flags,
        _number(parameters, "timeout"),
        _number(parameters, "priority"),
        _custom(parameters),
        trace_context,
    )


def _custom(parameters: Mapping[str, object]) -> dict[str, Parameter]:
    custom = {}
    for name, value in parameters.items():
        if name in _OWN:
            continue
        if name.startswith(_RESERVED):
            raise InvalidRequest(
                f"parameter keys starting with '{_RESERVED}' are reserved for Triton usage and should "
                "not be specified."
            )
        if type(value) not in (bool, int, float, str):
            raise InvalidRequest(
                f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'."
            )
        custom[name] = value
    return custom  # type: ignore[return-value]


def _flag(parameters: Mapping[str, object], name: str) -> bool:
    value = parameters.get(name, False)
    if type(value) is not bool:
        raise BadJson(name, "attempt to access JSON non-boolean as boolean")
    return value


def _number(parameters: Mapping[str, object], name: str) -> int:
    value = parameters.get(name, 0)
    if not _is_uint64(value):
        raise BadJson(name, "attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value  # type: ignore[return-value]


def _sequence(parameters: Mapping[str, object]) -> int | str:
    value = parameters.get("sequence_id", 0)
    if type(value) is str:
        if len(value.encode()) > MAX_SEQUENCE_ID_BYTES:
            raise LongSequenceId
        return value
    if not _is_uint64(value):
        raise BadJson("sequence_id", "attempt to access JSON non-string as string")
    return value  # type: ignore[return-value]


def _is_uint64(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**64
