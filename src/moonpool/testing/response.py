"""A response as a test sees it."""

from __future__ import annotations

from collections.abc import KeysView, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from moonpool.runtime.errors import ModelError
from moonpool.runtime.model.request import Response as Answered
from moonpool.stub.pb_utils.errors import TritonError


class Response(Answered):
    """Either outputs by name, with parameters, or an error.

    `response["Y"]` is an output. If the response is an error, it raises the error that the client would see.
    """

    def __init__(
        self,
        outputs: Mapping[str, NDArray[Any]],
        parameters: Mapping[str, Any] | None = None,
        error: TritonError | None = None,
        cause: BaseException | None = None,
        unknown: Sequence[str] = (),
    ) -> None:
        super().__init__(dict(outputs), dict(parameters or {}))
        self.error = error
        # The exception behind the error, if a model in this process raised one.
        self.cause = cause
        # Outputs that the configuration does not name. Clients never see them.
        self.unknown = list(unknown)

    def check(self) -> Response:
        """Return this response. Raises `ModelError` if it is an error, caused by what the model raised."""
        if self.error is not None:
            error = ModelError(self.error.message(), self.error.code().name)
            if self.cause is not None:
                # So that a debugger starts where the model raised, and not here.
                error = error.with_traceback(self.cause.__traceback__)
            raise error from self.cause
        return self

    def __getitem__(self, name: str) -> NDArray[Any]:
        self.check()
        return super().__getitem__(name)

    def keys(self) -> KeysView[str]:
        return self.check().outputs.keys()

    def __repr__(self) -> str:
        if self.error is not None:
            return f"<Response {self.error!r}>"
        return super().__repr__()
