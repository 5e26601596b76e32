"""Where the responses of a model in this process go: to the test."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

from moonpool.ipc.messages import AGAIN, FINAL
from moonpool.runtime.reshaping import of_outputs
from moonpool.stub.errors import ErrorCode, TritonError
from moonpool.stub.placement import Placer
from moonpool.stub.reply import Port, Reply
from moonpool.testing.outputs import copied
from moonpool.testing.response import Response

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Any

    import numpy as np

    from moonpool.runtime.config import ModelConfig
    from moonpool.stub.request import InferenceRequest
    from moonpool.stub.response import InferenceResponse
    from moonpool.testing.request import Request


class Exchange:
    """One request of a batch, and what the model has sent in answer to it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.responses: list[Response] = []
        self.is_final = False
        # The word that there are no more came without a response.
        self.ended_alone = False
        # The model wants to have the request once more.
        self.is_again = False
        # What the model raised, if that is why it ended.
        self.cause: BaseException | None = None
        self.is_cancelled = request.cancel_after == 0
        # Weak, as a model that drops both of these without a last response has to be told of.
        self._request: weakref.ref[InferenceRequest] | None = None
        self._reply: weakref.ref[Reply] | None = None
        request.executions.add(self)

    @property
    def is_over(self) -> bool:
        return self.is_final or self.is_again

    def hand_over(self, request: InferenceRequest) -> None:
        """This is what the model gets now."""
        self.is_again = False
        self._request, self._reply = weakref.ref(request), None
        request._cancelled = self.is_cancelled

    def made(self, reply: Reply) -> None:
        self._reply = weakref.ref(reply)

    def cancel(self) -> None:
        self.is_cancelled = True
        request = None if self._request is None else self._request()
        reply = None if self._reply is None else self._reply()
        if request is not None:
            request._cancelled = True
        if reply is not None:
            reply.is_cancelled = True


class Collector(Port):
    """Keeps what is sent. Any thread may call any method."""

    def __init__(self, start: dict[str, Any], config: ModelConfig) -> None:
        self._reshaped = of_outputs(config)
        self.is_decoupled = bool(start["decoupled"])
        self._names: list[str] = start["outputs"]
        self._placer = Placer(_Nowhere(), start)  # type: ignore[arg-type]
        self._changed = threading.Condition(threading.RLock())
        self._open: dict[tuple[int, int], Exchange] = {}

    def expect(self, batch: int, exchanges: Sequence[Exchange]) -> None:
        """These are the requests of a batch, by their places."""
        with self._changed:
            for index, exchange in enumerate(exchanges):
                self._open[batch, index] = exchange

    def reply(self, batch: int, index: int, wanted: Collection[str]) -> Reply:
        reply = Reply(self, batch, index, wanted)
        self._open[batch, index].made(reply)
        return reply

    def respond(self, reply: Reply, response: InferenceResponse | None, flags: int) -> None:
        """As a stub does: a response that cannot be sent reaches the client as an error."""
        with self._changed:
            exchange = self._open[reply.batch, reply.index]
            if response is not None:
                if exchange.responses and not self.is_decoupled:
                    exchange.responses.clear()  # it is the error of a sender that was dropped
                exchange.responses.append(self._received(response, reply, exchange.cause))
            if len(exchange.responses) == exchange.request.cancel_after:
                exchange.cancel()
            if flags == FINAL:
                exchange.ended_alone = response is None and self.is_decoupled
                exchange.request.executions.discard(exchange)
            if flags:
                exchange.is_final, exchange.is_again = flags == FINAL, flags == AGAIN
                del self._open[reply.batch, reply.index]
            self._changed.notify_all()

    def _received(
        self, response: InferenceResponse, reply: Reply, cause: BaseException | None
    ) -> Response:
        _, remark = self._placer.answer(response, reply.wanted, [])
        parameters, error = remark or (None, None)
        if error is not None:
            code, message = error
            return Response({}, error=TritonError(message, ErrorCode(code)), cause=cause)
        outputs = {
            tensor._name: copied(tensor)
            for tensor in self._placer.wanted(response._outputs, reply.wanted)
        }
        for name, reshaping in self._reshaped.items():
            if name in outputs:
                outputs[name] = outputs[name].reshape(reshaping.of(outputs[name].shape))
        unknown = [t._name for t in response._outputs if t._name not in self._names]
        return Response(outputs, parameters, unknown=unknown)

    def wait(self, exchange: Exchange, seen: int, deadline: float | None) -> bool:
        """Whether there are more responses than those `seen`, or will be no more, before the deadline."""
        with self._changed:
            return self._changed.wait_for(
                lambda: exchange.is_over or len(exchange.responses) > seen,
                None if deadline is None else max(0.0, deadline - time.monotonic()),
            )


class _Nowhere:
    """Memory for outputs that are only checked for whether they could be placed."""

    id = offset = 0

    def __init__(self) -> None:
        self.region = self

    def allocate(self, size_bytes: int) -> _Nowhere:  # noqa: ARG002 - as Regions has it
        return self

    def hold(self, blocks: Sequence[object]) -> None:
        """Nothing lies in a region here."""

    def write(self, offset: int, data: np.ndarray) -> None:
        """The test's copy is made elsewhere."""
