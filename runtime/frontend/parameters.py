"""The parameters of a request, as KServe's protocol and Triton's extensions name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.runtime.details import details_of
from moonpool.runtime.errors import InvalidRequest

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
        "triton_enable_empty_final_response",
    }
)
_RESERVED = "triton_"


def request_details(
    request_id: str, parameters: Mapping[str, object], trace_context: str | None = None
) -> Details | None:
    """What a request says beside its tensors. Raises `InvalidRequest`.

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
    sequence = parameters.get("sequence_id", 0)
    if type(sequence) not in (int, str):
        raise _wrong("sequence_id", "a whole number or a string", sequence)
    return details_of(
        request_id,
        sequence,  # type: ignore[arg-type]
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
                f"parameter keys starting with '{_RESERVED}' are reserved for Triton usage."
            )
        if type(value) not in (bool, int, float, str):
            raise _wrong(name, "a boolean, a number or a string", value)
        custom[name] = value
    return custom  # type: ignore[return-value]


def _flag(parameters: Mapping[str, object], name: str) -> bool:
    value = parameters.get(name, False)
    if type(value) is not bool:
        raise _wrong(name, "true or false", value)
    return value


def _number(parameters: Mapping[str, object], name: str) -> int:
    value = parameters.get(name, 0)
    if type(value) is not int:
        raise _wrong(name, "a whole number", value)
    return value


def _wrong(name: str, wanted: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"parameter '{name}' must be {wanted}, not {value!r:.60}")
