"""Defines requests: those that a model gets, and those that it makes for other models."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from operator import index
from typing import Any, ClassVar, Literal, NoReturn, Protocol, SupportsIndex, TypeVar, Union, overload

from moonpool.ipc.codec import unpacked_details
from moonpool.ipc.messages import NO_DETAILS, Details
from moonpool.ipc.signals import replacing
from moonpool.stub.attributes import InferenceRequestBase
from moonpool.stub.pb_utils.errors import TritonModelException, as_text, shown
from moonpool.stub.pb_utils.response import (
    Answer,
    InferenceResponse,
    InferenceResponseSender,
    Parameter,
    Reply,
    ReplyPort,
    ResponseIterator,
    as_compact_json,
    as_json,
    checked,
)
from moonpool.stub.pb_utils.tensor import MemoryType, PreferredMemory, Tensor

_new: Any = InferenceRequestBase.__new__
CorrelationId = Union[int, str]
# The flag by which a model asks that a request be scheduled again.
RELEASE_RESCHEDULE = 2
_T = TypeVar("_T")
# Defaults of the constructor.
_NO_ID, _ZERO, _LATEST = "", 0, -1
# The least value and the bits of the integers in which the runtime keeps these.
_RANGES = {"model_version": (-(1 << 63), 64), "flags": (0, 32), "timeout": (0, 64), "correlation_id": (0, 64)}


class InferenceTrace:
    """Names the trace of a request. A model hands it on to the requests that it makes on behalf of this one."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("_context",)

    def __init__(self, context: str | None = None) -> None:
        self._context = context

    def get_context(self) -> str | None:
        """Return the OpenTelemetry context, or None if the request is not traced."""
        # A name that begins with "#" has a meaning only for the runtime.
        context = self._context
        return None if context is not None and context.startswith("#") else context


# The default, compared by identity: the model has not named any memory.
_ANYWHERE = PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)
UNTRACED = InferenceTrace()
# None is no valid value for any of these arguments, so it can mean that one is missing.
_MISSING: Any = None


class RequestHost(Protocol):
    """Runs the requests that a model makes. Every `host.Host` does, but that module imports this one."""

    def infer(self, request: InferenceRequest, decoupled: bool) -> Answer: ...
    def ainfer(self, request: InferenceRequest, decoupled: bool) -> Awaitable[Answer]: ...


class InferenceRequest(InferenceRequestBase):
    """Is one request of a batch. The constructor makes requests to other models."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("__weakref__",)

    # The host of this process. `host.use` sets it.
    _host: ClassVar[RequestHost]
    # The details, packed as they came until somebody asks for one of them.
    _row: Details | bytes
    _inputs: Sequence[Tensor]
    _requested_output_names: Sequence[str]
    _model_name: str
    _model_version: int
    _release_flags: int
    # The port for its responses, the number of its batch and its place there; None for a request that a model made.
    _origin: tuple[ReplyPort, int, int] | None
    _reply: Reply | None
    _sender: InferenceResponseSender | None
    _cancelled: bool
    # The memory in which its outputs are wanted; None leaves that to the model that makes them.
    _preferred_memory: PreferredMemory | None
    _trace: InferenceTrace

    def __init__(
        self,
        request_id: str = _NO_ID,
        correlation_id: CorrelationId = _ZERO,
        # Triton's order, in which three required arguments follow two optional ones.
        inputs: Sequence[Tensor] = _MISSING,
        requested_output_names: Sequence[str] = _MISSING,
        model_name: str = _MISSING,
        model_version: int = _LATEST,
        flags: int = _ZERO,
        timeout: int = _ZERO,
        preferred_memory: PreferredMemory = _ANYWHERE,
        trace: InferenceTrace = UNTRACED,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self._model_name = _text("model_name", model_name)
        # By identity, since a value that equals a default may still be of a wrong type.
        self._model_version = -1 if model_version is _LATEST else _integer("model_version", model_version)
        if (
            request_id is _NO_ID
            and correlation_id is _ZERO
            and flags is _ZERO
            and timeout is _ZERO
            and parameters is None
        ):
            self._row = NO_DETAILS
        else:
            self._row = _details_of(request_id, correlation_id, flags, timeout, parameters)
        self._preferred_memory = (
            None if preferred_memory is _ANYWHERE else _instance("preferred_memory", preferred_memory, PreferredMemory)
        )
        self._trace = trace if trace is UNTRACED else _instance("trace", trace, InferenceTrace)
        if type(inputs) is not list:
            _sequence("inputs", inputs)
        if type(requested_output_names) is not list:
            _sequence("requested_output_names", requested_output_names)
        self._requested_output_names = [
            name if type(name) is str and name.isascii() else _text("requested_output_names", name)
            for name in requested_output_names
        ]
        self._inputs = list(inputs)
        self._release_flags = 0
        self._cancelled = False
        self._origin = self._reply = self._sender = None
        for tensor in self._inputs:
            if type(tensor) is not Tensor:
                self._check_input(tensor)
        if "" in self._requested_output_names:
            raise TritonModelException(f"Requested output name {self._whose()} should not be empty.")

    def _check_input(self, tensor: Tensor | None) -> None:
        if tensor is None:
            raise TritonModelException(f"Input tensor {self._whose()} should not be empty.")
        if not isinstance(tensor, Tensor):
            raise _wrong_type("inputs", "a list of Tensor", tensor)

    def _whose(self) -> str:
        return f"for request with id '{self.request_id()}' and model name '{self._model_name}'"

    @classmethod
    def from_wire(
        cls,
        details: Details | bytes,
        requested_output_names: Sequence[str],
        inputs: Sequence[Tensor],
        origin: tuple[ReplyPort, int, int] | None = None,
    ) -> InferenceRequest:
        """Make a request that came from the runtime. Nothing is checked or copied."""
        request: InferenceRequest = _new(cls)
        request._row = details
        request._requested_output_names = requested_output_names
        request._inputs = inputs
        request._release_flags = 0
        request._cancelled = False
        request._preferred_memory = None
        request._trace = UNTRACED
        request._origin = origin
        request._reply = request._sender = None
        return request

    @property
    def _details(self) -> Details:
        row = self._row
        if type(row) is bytes:
            self._row = row = unpacked_details(row)
        return row  # type: ignore[return-value]

    def inputs(self) -> list[Tensor]:
        return list(self._inputs)

    def request_id(self) -> str:
        return self._details.request_id

    def correlation_id(self) -> CorrelationId:
        return self._details.correlation_id

    def flags(self) -> int:
        return self._details.flags

    def set_flags(self, flags: int) -> None:
        self._row = self._details._replace(flags=_integer("flags", flags))

    def timeout(self) -> int:
        """Return the request's timeout in microseconds, 0 if it has none."""
        return self._details.timeout_us

    def parameters(self) -> str:
        """Return the parameters as a JSON text."""
        parameters = self._details.parameters
        return as_json(parameters) if self._origin is None else as_compact_json(parameters)

    def requested_output_names(self) -> set[str]:
        return set(self._requested_output_names)

    def trace(self) -> InferenceTrace:
        return self._trace

    def is_cancelled(self) -> bool:
        """Return whether the client has given up the request. This is cheap: the runtime sends cancellations."""
        return self._cancelled or (self._reply is not None and self._reply.is_cancelled)

    def set_release_flags(self, flags: int) -> None:
        """Choose whether the request is released after `execute`, or scheduled again."""
        self._release_flags = _integer("flags", flags)

    def get_response_sender(self) -> InferenceResponseSender:
        """Return the object that sends responses apart from those that `execute` returns. Each call returns the same
        one.
        """
        if self._sender is None:
            reply = None if self._origin is None else self.reply()
            self._sender = InferenceResponseSender.over(reply)
        return self._sender

    def reply(self) -> Reply:
        """Return the state of the responses to this request, which must be one from the runtime."""
        reply = self._reply
        if reply is None:
            if self._origin is None:
                raise TritonModelException("a request of a model's own making has no responses")
            port, batch, index = self._origin
            reply = port.reply(batch, index, self._requested_output_names)
            reply.preferred_memory = self._preferred_memory
            reply.is_cancelled = self._cancelled
            # A destructor or a signal handler of the model's, or another thread, may have asked for it meanwhile.
            port.remember(reply, *replacing(self, "_reply", None, reply))
            reply = self._reply or reply
            # A cancellation has come meanwhile, or it finds the reply.
            if self._cancelled:
                reply.cancel()
        return reply

    @overload
    def exec(self, decoupled: Literal[False] = ...) -> InferenceResponse: ...
    @overload
    def exec(self, decoupled: Literal[True]) -> ResponseIterator: ...
    @overload
    def exec(self, decoupled: bool) -> Answer: ...
    def exec(self, decoupled: bool = False) -> Answer:
        """Run the request on the model that it names, and wait for the response.

        With `decoupled`, returns a `ResponseIterator` over the responses. If the request fails, the response has the
        error. Raises TritonModelException only if no request can be made here.
        """
        return self._host.infer(self, bool(decoupled))

    @overload
    def async_exec(self, decoupled: Literal[False] = ...) -> Awaitable[InferenceResponse]: ...
    @overload
    def async_exec(self, decoupled: Literal[True]) -> Awaitable[ResponseIterator]: ...
    @overload
    def async_exec(self, decoupled: bool) -> Awaitable[Answer]: ...
    def async_exec(self, decoupled: bool = False) -> Awaitable[Any]:
        """Do the same as `exec` for a coroutine, which awaits the result. The request is sent when this returns."""
        import asyncio

        return asyncio.ensure_future(self._host.ainfer(self, bool(decoupled)))

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        # A copy would have its own state of responses.
        raise TypeError("cannot pickle 'c_python_backend_utils.InferenceRequest' object")

    def __repr__(self) -> str:
        return f"<InferenceRequest {self.request_id()!r}, inputs {list(self._inputs)!r}>"


def _wrong_type(name: str, expected: str, value: object) -> TypeError:
    return TypeError(
        f"__init__(): incompatible constructor arguments. InferenceRequest takes {expected} "
        f"as {name}, not {shown(value)} of {type(value)}"
    )


def _details_of(
    request_id: str, correlation_id: CorrelationId, flags: int, timeout: int, parameters: Mapping[str, Parameter] | None
) -> Details:
    return Details(
        _text("request_id", request_id),
        _id_of_sequence(correlation_id),
        _integer("flags", flags),
        _integer("timeout", timeout),
        0,
        checked(parameters),
    )


def _text(name: str, value: object) -> str:
    if type(value) is str and value.isascii():
        return value
    if not isinstance(value, (str, bytes)):
        raise _wrong_type(name, "str", value)
    return as_text(value)


def _integer(name: str, value: object) -> int:
    if not hasattr(value, "__index__"):
        raise _wrong_type(name, "int", value)
    number = index(value)
    least, bits = _RANGES[name]
    if not least <= number < least + (1 << bits):
        raise _wrong_type(name, f"an int of {bits} bits", number)
    return number


def _sequence(name: str, value: object) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise _wrong_type(name, "a list", value)
    return value


def _instance(name: str, value: object, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise _wrong_type(name, kind.__name__, value)
    return value


def _id_of_sequence(value: object) -> CorrelationId:
    if value is None:
        raise _wrong_type("correlation_id", "int or str", value)
    if isinstance(value, str):
        return as_text(value)
    if isinstance(value, int):
        return _integer("correlation_id", value)
    raise TritonModelException("Correlation ID must be integer or string")
