"""Defines responses: the answer of a model, the iterator over several, and the sender that sends them at any time.

Theory of operation. A `Reply` is the state of the responses to one request: how many were sent, and whether more may
come. The request and its sender share it, and any thread may use it. Its lock makes checking and sending one step, so
that responses go out in the order of their flags. It is an RLock: while a thread sends, a garbage collection may run a
destructor of the model's that sends, too, and a signal may run a handler that does.

A signal handler may also raise anywhere in a send. So the state changes at once with the response's coming into the
queue (`ipc/signals.py`), after which nothing can be lost, and not before. If another send of the same thread has come
between by then, the state is another one (`replacing`), and the send begins anew with the checks.

If the request, its sender and everything else that could answer are dropped without a last response, nobody could ever
answer, and the client would wait for ever. So the destructor of a reply that was left open ends the request with an
error. It takes no lock: nothing refers to the reply any more. What a signal handler raises in a destructor is lost,
and the destructor with it: then the port, which remembers the reply, ends the request.

A `ResponseIterator` holds its lock while it waits for the next response. So threads that share a loop take turns, and
each response goes to one of them. `cancel` takes no lock and can interrupt that wait from another thread. `abandon`
comes from the destructor.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import index
from typing import Any, Union

# `error` may return None, but models ask `has_error` before they call it.
from typing import Any as MaybeNone

from moonpool.ipc.messages import AGAIN, FINAL
from moonpool.ipc.signals import at_once, replacing
from moonpool.stub import threads
from moonpool.stub.attributes import InferenceResponseBase
from moonpool.stub.pb_utils.errors import TritonError, TritonModelException, bad_arguments, shown
from moonpool.stub.pb_utils.tensor import PreferredMemory, Tensor

_new: Any = InferenceResponseBase.__new__
# The default flags of a response: it is not the last one.
_MORE = 0
Parameter = Union[bool, int, float, str]


def checked(parameters: object) -> dict[str, Parameter] | None:
    """Return a copy of the parameters that a model gave, or None if there are none.

    Raises TritonModelException unless it is a dict, for keys and values of other types, and for NaN and infinities.
    """
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect N8pybind114dictE, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        # Triton takes no floats here. Its text stays as it is.
        if not isinstance(value, (bool, int, float, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            # Parameters travel in JSON, which has neither.
            raise TritonModelException(f"Expect parameters values to be finite, found {key!r:.80}: {value}")
    return dict(parameters)


def as_json(parameters: Mapping[str, object] | None) -> str:
    """Return parameters that a model made as `parameters()` gives them: as JSON text."""
    return json.dumps(parameters) if parameters else "{}"


def as_compact_json(parameters: Mapping[str, object] | None) -> str:
    """Return parameters from the runtime as JSON text. Triton writes these in another form."""
    if not parameters:
        return "{}"
    return json.dumps(parameters, separators=(",", ":"), ensure_ascii=False)


_SIGNATURE = "output_tensors: list[Tensor] = [], error: TritonError = None, parameters: object = None"


class InferenceResponse(InferenceResponseBase):
    """Holds output tensors and parameters for the client, or an error.

    With an error, outputs and parameters are not sent.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("__weakref__",)

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

    @classmethod
    def from_wire(
        cls, outputs: list[Tensor], error: TritonError | None, parameters: dict[str, Parameter] | None
    ) -> InferenceResponse:
        """Make a response that came from the runtime. Nothing is checked or copied."""
        response: InferenceResponse = _new(cls)
        response._outputs = outputs
        response._error = error
        response._parameters = parameters
        return response

    def output_tensors(self) -> list[Tensor]:
        return list(self._outputs)

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | MaybeNone:
        return self._error

    def parameters(self) -> str:
        """Return the parameters as a JSON text."""
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


_END = "Iteration is done for the responses."


class ResponseIterator:
    """Yields the responses to one request in the order in which they were sent, each as soon as it is there.

    After a loop was left early, the next one goes on at that place, also in later passes. A loop begins anew only after
    the last one has reached the end. The last response may be empty: it then stands for an end without a response.
    Thread-safe: each response goes to one of the threads that share a loop.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_abandon", "_cancel", "_index", "_is_begun", "_is_over", "_lock", "_missed", "_receive", "_seen")

    def __init__(self) -> None:
        raise TypeError("a ResponseIterator is made by exec(decoupled=True)")

    @classmethod
    def over(
        cls,
        receive: Callable[[list[InferenceResponse]], object],
        cancel: Callable[[], None],
        abandon: Callable[[], None] | None = None,
    ) -> ResponseIterator:
        """Make an iterator. `receive` waits for the next response and adds it to the list, nothing after the last; the
        others do not wait.

        If a signal handler raises in it, the next call adds that response. Responses still come after `cancel`.
        `abandon` is called when the iterator is destroyed.
        """
        iterator = object.__new__(cls)
        iterator._receive = receive
        iterator._cancel = cancel
        iterator._abandon = abandon
        iterator._seen = []
        iterator._missed = []
        iterator._index = 0
        iterator._is_over = iterator._is_begun = False
        iterator._lock = threads.Lock()
        return iterator

    _receive: Callable[[list[InferenceResponse]], object]
    _cancel: Callable[[], None]
    _abandon: Callable[[], None] | None
    _seen: list[InferenceResponse]
    # The numbers of responses that were taken for a loop which a signal handler ended before it had them.
    _missed: list[int]
    _index: int
    _is_over: bool
    # True once the current loop has yielded a response.
    _is_begun: bool
    _lock: threading.Lock

    def __iter__(self) -> ResponseIterator:
        with self._lock:
            self._is_begun = False
        return self

    def __next__(self) -> InferenceResponse:
        """Wait for the next response and return it. Raises StopIteration after the last."""
        taken = -1
        try:
            with self._lock:
                if not self._missed:
                    self._find()
                # Signal handlers run after calls, and there is none until the number is in `taken` and nowhere else.
                if self._missed:
                    taken = self._missed[-1]
                    del self._missed[-1]
                else:
                    following = self._index + 1
                    taken = self._index
                    self._index = following
                self._is_begun = True
            return self._seen[taken]
        except BaseException:
            if taken >= 0:
                self._missed.append(taken)
            raise

    def _find(self) -> None:
        """Wait until the response of the current number is there, and begin anew at the end. Raises StopIteration."""
        seen = self._seen
        if self._index == len(seen):
            self._fill()
        if self._index == len(seen):
            # A loop that has yielded a response ends here. A loop that starts at the end begins anew.
            if self._is_begun or not seen:
                self._is_begun = True
                raise StopIteration(_END)
            self._index = 0

    def _fill(self) -> None:
        """Wait for another response, or the end."""
        count = len(self._seen)
        if not self._is_over:
            self._receive(self._seen)
            self._is_over = len(self._seen) == count

    def _wait(self) -> ResponseIterator:
        """Wait for the first response or the end; return the iterator."""
        with self._lock:
            if not self._seen:
                self._fill()
        return self

    def cancel(self) -> None:
        """Cancel the request. The model sees that by `is_cancelled()`.

        Responses that it still sends arrive, until it ends. Nothing happens if the model is done already.
        """
        self._cancel()

    def __del__(self) -> None:
        try:
            abandon = self._abandon
        except AttributeError:  # the constructor refused
            return
        if abandon is not None:
            abandon()


# The result of a request to another model.
Answer = Union[InferenceResponse, ResponseIterator]


class InferenceResponseSender:
    """Sends responses to one request: during `execute`, after it, and from any thread or coroutine.

    Models get it from `InferenceRequest.get_response_sender`. If the sender and everything else that could answer the
    request is dropped before the flag COMPLETE_FINAL was sent, the request ends with an error.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("__weakref__", "_reply")

    _reply: Reply | None

    def __init__(self) -> None:
        raise TypeError("c_python_backend_utils.InferenceResponseSender: No constructor defined!")

    @classmethod
    def over(cls, reply: Reply | None) -> InferenceResponseSender:
        """Return a sender of responses to one request. Without `reply`, for a request that the model made, it refuses
        to send.
        """
        sender = object.__new__(cls)
        sender._reply = reply
        return sender

    def send(self, response: InferenceResponse | None = None, flags: int = _MORE) -> None:
        """Send a response, the flag that it was the last, or both.

        `flags` is 0 or TRITONSERVER_RESPONSE_COMPLETE_FINAL. Does not wait for the client. Raises
        `TritonModelException` if the request can have no such response any more.
        """
        reply = self._reply
        if type(response) is InferenceResponse and flags is _MORE and reply is not None:
            reply.send(response, final=False)
            return
        # A model may pass anything.
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
        if reply is None:
            raise TritonModelException(
                "Unable to send response. Response sender has no reference to the decoupled state of the model."
            )
        reply.send(response, final=flags == FINAL)

    def is_cancelled(self) -> bool:
        """Return whether the client has given up the request. This is cheap: the runtime sends cancellations."""
        return self._reply is not None and self._reply.is_cancelled

    def __repr__(self) -> str:
        return "<InferenceResponseSender>"


def _is_number(flags: object) -> bool:
    return hasattr(flags, "__index__") and 0 <= index(flags) < 1 << 32


DROPPED = (
    "the model ended without a last response to this request: its response sender was dropped, or never "
    "asked for, before a response with TRITONSERVER_RESPONSE_COMPLETE_FINAL was sent"
)


class ReplyPort:
    """Delivers the responses of open requests, to the runtime or to a test.

    Each method takes `steps`, functions of C, at once with what it does itself (`signals.at_once`): all of it happens,
    or nothing.
    """

    is_decoupled = False

    def reply(self, batch: int, index: int, wanted: Collection[str]) -> Reply:
        """Make the reply of one request, which has only one."""
        return Reply(self, batch, index, wanted)

    def remember(self, reply: Reply, *steps: Callable[[], object]) -> None:  # noqa: ARG002
        """Remember a reply that may be sent with from now on."""
        at_once(*steps)

    def respond(
        self, reply: Reply, response: InferenceResponse | None, flags: int, *steps: Callable[[], object]
    ) -> None:
        """Deliver a response, the flag that it was the last (`FINAL`), or both; or `AGAIN`, which schedules the request
        again.
        """
        raise NotImplementedError

    def forget(self, reply: Reply, *steps: Callable[[], object]) -> None:  # noqa: ARG002
        """Forget a reply with which nothing was sent or will be."""
        at_once(*steps)

    def abandon(self, reply: Reply, *steps: Callable[[], object]) -> None:
        """End a request that the model can no longer answer. Destructors call this."""
        self.respond(reply, InferenceResponse(error=TritonError(DROPPED)), FINAL, *steps)


# What was sent with a reply: the number of responses, whether it was anything at all, and whether it was the last or
# ANSWER carries the outcome.
_State = tuple[int, bool, bool]


class Reply:
    """Keeps the state of the responses to one request. The request and its sender share it; any thread may use it."""

    __slots__ = (
        "__weakref__",
        "_is_open",
        "_lock",
        "_port",
        "_state",
        "_tell",
        "batch",
        "index",
        "is_cancelled",
        "preferred_memory",
        "wanted",
    )

    def __init__(self, port: ReplyPort, batch: int, index: int, wanted: Collection[str]) -> None:
        self._port = port
        self.batch = batch
        self.index = index
        # The names of the requested outputs.
        self.wanted = wanted
        self.preferred_memory: PreferredMemory | None = None
        self.is_cancelled = False
        self._tell: Callable[[], object] | None = None
        # Another object after each change.
        self._state: _State = (0, False, False)
        self._is_open = False
        # A destructor may send in the middle of a send of the same thread.
        self._lock = threads.RLock()

    def cancel(self) -> None:
        """Mark the request as cancelled. From any thread."""
        self.is_cancelled = True
        if self._tell is not None:
            self._tell()

    def when_cancelled(self, tell: Callable[[], object]) -> None:
        """Have a function called when the request is cancelled, on any thread; at once if it is already.

        It may be called twice, and must not raise or block.
        """
        self._tell = tell
        # In this order, so that a cancellation which comes meanwhile is not missed.
        if self.is_cancelled:
            tell()

    def send(self, response: InferenceResponse | None, *, final: bool) -> None:
        """Send by the rules of Triton's response senders. Raises `TritonModelException`.

        If a signal handler raises meanwhile, this raises that, and the response was sent or it was not: the state says
        which.
        """
        with self._lock:
            is_sent = False
            while not is_sent:
                count, _, is_closed = state = self._state
                if not self._port.is_decoupled:
                    _check_count(state, response, final=final)
                if is_closed:
                    raise TritonModelException("Unable to send response. Response sender has been closed.")
                is_sent = self._respond(state, count + (response is not None), response, FINAL if final else 0)

    def finish(self, response: InferenceResponse) -> None:
        """Send the last response, unless it was sent already.

        If a model that is not decoupled has sent its response without the flag, that response is the answer, whatever
        the model returned or raised afterwards.
        """
        with self._lock:
            while not self.is_closed:
                count, *_ = state = self._state
                last = None if count and not self._port.is_decoupled else response
                self._respond(state, count, last, FINAL)

    def fail(self, message: str) -> None:
        """End the request with an error, unless it has ended."""
        self.finish(InferenceResponse(error=TritonError(message)))

    def reschedule(self) -> None:
        """Schedule the request again. It comes with a new reply then."""
        with self._lock:
            while not self.is_closed:
                count, *_ = state = self._state
                self._respond(state, count, None, AGAIN)

    def leave_open(self) -> None:
        """Note that `execute` gave no response. From now on, dropping the reply without a last response is an error."""
        self._is_open = True

    def close(self, responses: int) -> bool:
        """Close the reply, as ANSWER carries the outcome, with that many responses.

        Returns False and does nothing if something was sent already: the rest must go the same way.
        """
        with self._lock:
            is_closed = False
            while not is_closed:
                count, is_used, _ = state = self._state
                if is_used:
                    return False
                after = count + responses, False, True
                is_closed = self._change(state, after, partial(self._port.forget, self))
        return True

    def _respond(self, state: _State, count: int, response: InferenceResponse | None, flags: int) -> bool:
        respond = partial(self._port.respond, self, response, flags)
        return self._change(state, (count, True, bool(flags)), respond)

    def _change(self, before: _State, after: _State, act: Callable[..., None]) -> bool:
        """Act, and change the state at once with that.

        Returns False if the state was another one by then, and nothing was done.
        """
        done: list[bool] = []
        act(*replacing(self, "_state", before, after), partial(done.append, True))
        return bool(done)

    @property
    def is_answered(self) -> bool:
        """True if the only response was sent."""
        return self.count > 0 and not self._port.is_decoupled

    @property
    def is_closed(self) -> bool:
        """Return whether the last response was sent."""
        return self._state[2]

    @property
    def count(self) -> int:
        """Return the number of responses that were sent."""
        return self._state[0]

    def __del__(self) -> None:
        # Nothing refers to the reply any more, so there is no lock to take.
        if getattr(self, "_is_open", False) and not self.is_closed:
            after = self.count, True, True
            self._port.abandon(self, partial(setattr, self, "_state", after))


def _check_count(state: _State, response: InferenceResponse | None, *, final: bool) -> None:
    count, _, is_closed = state
    if response is not None and count:
        raise TritonModelException("Unable to send response. Non-decoupled model cannot send more than one response.")
    if response is None and final and not count and not is_closed:
        raise TritonModelException(
            "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
        )
