"""The responses to one request that do not go with the answer to its batch."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from moonpool.ipc.messages import AGAIN, FINAL
from moonpool.stub.errors import TritonError, TritonModelException
from moonpool.stub.response import InferenceResponse

if TYPE_CHECKING:
    from collections.abc import Collection

    from moonpool.stub.preferred_memory import PreferredMemory

DROPPED = (
    "the model ended without a last response to this request: its response sender was dropped, or never "
    "asked for, before a response with TRITONSERVER_RESPONSE_COMPLETE_FINAL was sent"
)


class Port:
    """Where the responses of open requests go: to the runtime, or to a test."""

    is_decoupled = False

    def reply(self, batch: int, index: int, wanted: Collection[str]) -> Reply:
        """The state of the responses to one request, which is made once."""
        return Reply(self, batch, index, wanted)

    def respond(self, reply: Reply, response: InferenceResponse | None, flags: int) -> None:
        """Deliver a response, the word that there are no more (`FINAL`), or both; or `AGAIN`."""
        raise NotImplementedError

    def forget(self, reply: Reply) -> None:
        """Nothing was sent, and nothing will be."""

    def abandon(self, reply: Reply) -> None:
        """The model dropped everything that it could have answered with. May come from a destructor."""
        self.respond(reply, InferenceResponse(error=TritonError(DROPPED)), FINAL)


class Reply:
    """What was sent so far, and whether more may come. Any thread; senders and requests share it."""

    __slots__ = (
        "__weakref__",
        "_count",
        "_is_closed",
        "_is_open",
        "_is_used",
        "_lock",
        "_port",
        "batch",
        "index",
        "is_cancelled",
        "preferred_memory",
        "wanted",
    )

    def __init__(self, port: Port, batch: int, index: int, wanted: Collection[str]) -> None:
        self._port = port
        self.batch = batch
        self.index = index
        # The names of the outputs that the client asked for.
        self.wanted = wanted
        self.preferred_memory: PreferredMemory | None = None
        self.is_cancelled = False
        # Whether anything was sent.
        self._is_used = False
        self._count = 0
        self._is_open = False
        self._is_closed = False
        # A destructor may send in the middle of another send of the same thread.
        self._lock = threading.RLock()

    def send(self, response: InferenceResponse | None, *, final: bool) -> None:
        """Send by the rules of Triton's response senders. Raises `TritonModelException`."""
        with self._lock:
            if not self._port.is_decoupled:
                self._check_count(response, final=final)
            if self._is_closed:
                raise TritonModelException(
                    "Unable to send response. Response sender has been closed."
                )
            if response is not None:
                self._count += 1
            self._is_closed = final
            self._is_used = True
            self._port.respond(self, response, FINAL if final else 0)

    def _check_count(self, response: InferenceResponse | None, *, final: bool) -> None:
        if response is not None and self._count:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if response is None and final and not self._count and not self._is_closed:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before "
                "sending a response."
            )

    def finish(self, response: InferenceResponse) -> None:
        """Send the last response, unless the request has had it.

        If a model that is not decoupled has sent its response without the flag, that one is the answer, whatever the
        model returned or raised afterwards.
        """
        with self._lock:
            if not self._is_closed:
                self._is_closed = self._is_used = True
                self._port.respond(self, None if self.is_answered else response, FINAL)

    def fail(self, message: str) -> None:
        """End the request with an error, unless it has ended."""
        self.finish(InferenceResponse(error=TritonError(message)))

    def reschedule(self) -> None:
        """The request comes again; what is sent to it then has a reply of its own."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._port.respond(self, None, AGAIN)

    def leave_open(self) -> None:
        """`execute` gave no response: whoever drops this without a last response has to be told of."""
        self._is_open = True

    def close(self, responses: int) -> bool:
        """The answer to its batch deals with the request, by that many responses.

        False, and nothing is done, where something was sent: what follows has to go the same way.
        """
        with self._lock:
            if self._is_used:
                return False
            self._count += responses
            self._is_closed = True
        self._port.forget(self)
        return True

    @property
    def is_answered(self) -> bool:
        """True if the only response was sent."""
        return self._count > 0 and not self._port.is_decoupled

    @property
    def is_closed(self) -> bool:
        """Whether the request has had its last response."""
        return self._is_closed

    @property
    def count(self) -> int:
        """How many responses were sent."""
        return self._count

    def __del__(self) -> None:
        # Nobody else refers to it any more, so there is no lock to take.
        if getattr(self, "_is_open", False) and not self._is_closed:
            self._is_closed = True
            self._port.abandon(self)
