"""The parameters of requests, inputs and outputs as gRPC has them: with types, and with Triton's words for wrong ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from moonpool.ipc.messages import MAX_PARAMETERS
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.frontend.parameters import END, MAX_SEQUENCE_ID_BYTES, START, LongSequenceId

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moonpool.runtime.request import Parameter

_UINT64 = 2**64 - 1
EMPTY_FINAL = "triton_enable_empty_final_response"
_RESERVED = "triton_"
_FLAGS = {"sequence_start": START, "sequence_end": END}


class Place(NamedTuple):
    """Where a tensor lies in memory that a client shares."""

    region: str
    offset: int
    size_bytes: int


class Parameters(NamedTuple):
    """Of a request; `custom` are those for the model."""

    sequence_id: int | str = 0
    flags: int = 0
    priority: int = 0
    timeout_us: int = 0
    wants_empty_final: bool = False
    custom: dict[str, Parameter] = {}  # noqa: RUF012 - nobody changes it


_NONE = Parameters()


def parameters_of(given: Mapping[str, Any]) -> Parameters:
    """What a request says beside its tensors. Raises `InvalidRequest`."""
    if not given:
        return _NONE
    if len(given) > MAX_PARAMETERS:
        raise InvalidRequest(f"a request has at most {MAX_PARAMETERS} parameters")
    found = Parameters()._asdict()
    custom: dict[str, Parameter] = {}
    for name, parameter in given.items():
        kind = parameter.WhichOneof("parameter_choice")
        value = None if kind is None else getattr(parameter, kind)
        if name == "sequence_id":
            _check(name, kind, "int64_param", "string_param")
            if kind == "string_param" and len(value.encode()) > MAX_SEQUENCE_ID_BYTES:  # type: ignore[union-attr]
                raise LongSequenceId
            found["sequence_id"] = value & _UINT64 if kind == "int64_param" else value  # type: ignore[operator]
        elif name in _FLAGS:
            _check(name, kind, "bool_param")
            found["flags"] |= _FLAGS[name] if value else 0
        elif name == "priority":
            _check(name, kind, "int64_param", "uint64_param")
            if value < 0:  # type: ignore[operator]
                raise InvalidRequest("invalid value for 'priority', expected value >= 0.")
            found["priority"] = value
        elif name == "timeout":
            _check(name, kind, "int64_param")
            found["timeout_us"] = value & _UINT64  # type: ignore[operator]
        elif name == EMPTY_FINAL:
            _check(name, kind, "bool_param")
            found["wants_empty_final"] = value
        elif name.startswith(_RESERVED):
            raise InvalidRequest(
                f"parameter keys starting with '{_RESERVED}' are reserved for Triton usage. Only the "
                f"following keys starting with '{_RESERVED}' are allowed: {EMPTY_FINAL}"
            )
        elif value is None:
            raise InvalidRequest(
                f"invalid value type for '{name}' parameter, expected int64_param, bool_param, or string_param."
            )
        else:
            custom[name] = value
    return Parameters(**{**found, "custom": custom})


def _check(name: str, kind: str | None, *wanted: str) -> None:
    if kind not in wanted:
        raise InvalidRequest(
            f"invalid value type for '{name}' parameter, expected {' or '.join(wanted)}."
        )


def place_of(tensor: str, parameters: Mapping[str, Any]) -> Place | None:
    """Where a tensor lies, None where it is in the message. Raises `InvalidRequest`."""
    if not parameters:
        return None
    region = _value(tensor, parameters, "shared_memory_region", "string_param")
    size_bytes = _value(tensor, parameters, "shared_memory_byte_size", "int64_param")
    offset = _value(tensor, parameters, "shared_memory_offset", "int64_param")
    for name, value in (("byte_size", size_bytes), ("offset", offset)):
        if region is None and value is not None:
            raise InvalidRequest(
                f"'shared_memory_{name}' can not be specified without 'shared_memory_region' "
                f"parameter for tensor '{tensor}'"
            )
    if region is None:
        return None
    if size_bytes is None:
        raise InvalidRequest(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' "
            f"parameter for tensor '{tensor}'"
        )
    return Place(region, offset or 0, size_bytes)


def _value(tensor: str, parameters: Mapping[str, Any], name: str, kind: str) -> Any:
    if name not in parameters:
        return None
    if parameters[name].WhichOneof("parameter_choice") != kind:
        raise InvalidRequest(
            f"invalid value type for '{name}' parameter for tensor '{tensor}', expected {kind}."
        )
    return getattr(parameters[name], kind)
