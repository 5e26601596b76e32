"""How a model answers a request at a time of its own."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING

from moonpool.ipc.messages import FINAL
from moonpool.stub.errors import TritonModelException, shown
from moonpool.stub.response import InferenceResponse

if TYPE_CHECKING:
    from moonpool.stub.reply import Reply
    from moonpool.stub.request import InferenceRequest


class InferenceResponseSender:
    """Sends responses to one request: during `execute`, after it, and from any thread or coroutine.

    Models get it from `InferenceRequest.get_response_sender`. A request whose sender, and whatever else could
    answer it, is dropped before the flag COMPLETE_FINAL was sent ends with an error.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("__weakref__", "_reply")

    _reply: Reply | None

    def __init__(self) -> None:
        raise TypeError("c_python_backend_utils.InferenceResponseSender: No constructor defined!")

    @classmethod
    def of(cls, request: InferenceRequest) -> InferenceResponseSender:
        """The sender of a request; one for a request of the model's own making sends nothing."""
        sender = object.__new__(cls)
        sender._reply = request.reply() if request._origin is not None else None
        return sender

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, the flag that it was the last, or both.

        `flags` is 0 or TRITONSERVER_RESPONSE_COMPLETE_FINAL. Does not wait for the client. Raises
        `TritonModelException` where the request can have no such response any more.
        """
        # Whoever wrote the model may have passed anything.
        given: tuple[object, object] = (response, flags)
        if not isinstance(given[0], (InferenceResponse, type(None))) or not _is_number(given[1]):
            raise TypeError(
                "send(): incompatible function arguments. The following argument types are "
                "supported:\n    1. (self: c_python_backend_utils.InferenceResponseSender, response: "
                "c_python_backend_utils.InferenceResponse = None, flags: int = 0) -> None\n\n"
                f"Invoked with: {shown(self)}, {shown(response)}, {shown(flags)}"
            )
        if flags not in (0, FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and flags == 0:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if self._reply is None:
            raise TritonModelException(
                "Unable to send response. Response sender has no reference to the decoupled state of "
                "the model."
            )
        self._reply.send(response, final=flags == FINAL)

    def is_cancelled(self) -> bool:
        """Whether nobody waits for the responses any more. Costs nothing: the runtime tells."""
        return self._reply is not None and self._reply.is_cancelled

    def __repr__(self) -> str:
        return "<InferenceResponseSender>"


def _is_number(flags: object) -> bool:
    return hasattr(flags, "__index__") and 0 <= index(flags) < 1 << 32
