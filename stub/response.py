"""A model's answer to one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.stub.errors import TritonError, TritonModelException, bad_arguments
from moonpool.stub.parameters import as_json, checked
from moonpool.stub.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    # None where there is no error, which models have asked `has_error` about.
    from typing import Any as MaybeNone

    from moonpool.stub.parameters import Parameter

_SIGNATURE = (
    "output_tensors: list[Tensor] = [], error: TritonError = None, parameters: object = None"
)


class InferenceResponse:
    """Output tensors, or an error in place of them, and parameters for the client.

    Where an error is given, outputs and parameters are not sent.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("__weakref__", "_error", "_outputs", "_parameters")

    _outputs: list[Tensor]
    _error: TritonError | None
    _parameters: dict[str, Parameter] | None

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        if type(output_tensors) is not list or error is not None:
            _check_types(output_tensors, error, parameters)
        for tensor in output_tensors:
            if type(tensor) is not Tensor:
                _check_tensors(output_tensors, error, parameters)
                break
        self._outputs = list(output_tensors)
        self._error = error
        self._parameters = None if parameters is None else checked(parameters)

    def output_tensors(self) -> list[Tensor]:
        return list(self._outputs)

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | MaybeNone:
        return self._error

    def parameters(self) -> str:
        """The parameters as a JSON text."""
        return as_json(self._parameters)

    def __repr__(self) -> str:
        return f"<InferenceResponse {self._error or self._outputs!r}>"


def _check_types(outputs: object, error: object, parameters: object) -> None:
    if not isinstance(outputs, (list, tuple)) or not isinstance(error, (TritonError, type(None))):
        raise bad_arguments("InferenceResponse", _SIGNATURE, outputs, error, parameters)


def _check_tensors(outputs: Sequence[object], error: object, parameters: object) -> None:
    if any(tensor is not None and not isinstance(tensor, Tensor) for tensor in outputs):
        raise bad_arguments("InferenceResponse", _SIGNATURE, outputs, error, parameters)
    if any(tensor is None for tensor in outputs):
        raise TritonModelException("Output tensor for inference response should not be empty.")
