"""A request as the model sees it, and as a model builds one for another model."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Union, overload

from moonpool.ipc.details import Details
from moonpool.stub.errors import TritonModelException, as_text, shown
from moonpool.stub.host import current
from moonpool.stub.parameters import as_compact_json, as_json, checked
from moonpool.stub.preferred_memory import MemoryType, PreferredMemory
from moonpool.stub.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence
    from typing import Literal, SupportsIndex

    from moonpool.stub.host import Answer
    from moonpool.stub.parameters import Parameter
    from moonpool.stub.reply import Port, Reply
    from moonpool.stub.response import InferenceResponse
    from moonpool.stub.response_iterator import ResponseIterator
    from moonpool.stub.sender import InferenceResponseSender

_new = object.__new__
CorrelationId = Union[int, str]
_T = TypeVar("_T")
# The least number and the bits of what the runtime keeps whole numbers in.
_RANGES = {
    "model_version": (-(1 << 63), 64),
    "flags": (0, 32),
    "timeout": (0, 64),
    "correlation_id": (0, 64),
}


class InferenceTrace:
    """The trace that a request belongs to, to be handed on to requests made on its behalf."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("_context",)

    def __init__(self, context: str | None = None) -> None:
        self._context = context

    def get_context(self) -> str | None:
        """The OpenTelemetry context, or None where the request is not traced."""
        # One that begins with "#" is a name that only the runtime knows.
        context = self._context
        return None if context is not None and context.startswith("#") else context


# The object and not its value stands for "no wish".
_ANYWHERE = PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)
_UNTRACED = InferenceTrace()
# No argument may be None, so it stands for one that is missing.
_MISSING: Any = None


class InferenceRequest:
    """One request of a batch.

    Models get these; the constructor is for requests to other models.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = (
        "__weakref__",
        "_cancelled",
        "_details",
        "_inputs",
        "_model_name",
        "_model_version",
        "_origin",
        "_preferred_memory",
        "_release_flags",
        "_reply",
        "_requested_output_names",
        "_sender",
        "_trace",
    )

    _details: Details
    _inputs: Sequence[Tensor]
    _requested_output_names: Sequence[str]
    _model_name: str
    _model_version: int
    _release_flags: int
    # Where its responses go, the number of its batch and its place there; None for one of a model's making.
    _origin: tuple[Port, int, int] | None
    _reply: Reply | None
    _sender: InferenceResponseSender | None
    _cancelled: bool
    # Where its outputs are wanted; None: wherever the model that makes them leaves them.
    _preferred_memory: PreferredMemory | None
    _trace: InferenceTrace

    def __init__(
        self,
        request_id: str = "",
        correlation_id: CorrelationId = 0,
        # In Triton's order, in which the three that must be given follow two that need not.
        inputs: Sequence[Tensor] = _MISSING,
        requested_output_names: Sequence[str] = _MISSING,
        model_name: str = _MISSING,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = _ANYWHERE,
        trace: InferenceTrace = _UNTRACED,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        request_id = _text("request_id", request_id)
        self._model_name = _text("model_name", model_name)
        self._model_version = _integer("model_version", model_version)
        flags = _integer("flags", flags)
        timeout_us = _integer("timeout", timeout)
        wish = _instance("preferred_memory", preferred_memory, PreferredMemory)
        self._preferred_memory = None if wish is _ANYWHERE else wish
        self._trace = _instance("trace", trace, InferenceTrace)
        _sequence("inputs", inputs)
        names = [
            _text("requested_output_names", name)
            for name in _sequence("requested_output_names", requested_output_names)
        ]
        correlation_id = _id_of_sequence(correlation_id)
        self._details = Details(
            request_id, correlation_id, flags, timeout_us, 0, checked(parameters)
        )
        self._inputs = list(inputs)
        self._requested_output_names = names
        self._release_flags = 0
        self._cancelled = False
        self._origin = self._reply = self._sender = None
        self._check_contents()

    def _check_contents(self) -> None:
        whose = f"for request with id '{self.request_id()}' and model name '{self._model_name}'"
        for tensor in self._inputs:
            if tensor is None:
                raise TritonModelException(f"Input tensor {whose} should not be empty.")
            if not isinstance(tensor, Tensor):
                raise _wrong_type("inputs", "a list of Tensor", tensor)
        if "" in self._requested_output_names:
            raise TritonModelException(f"Requested output name {whose} should not be empty.")

    @classmethod
    def from_wire(
        cls,
        details: Details,
        requested_output_names: Sequence[str],
        inputs: Sequence[Tensor],
        origin: tuple[Port, int, int] | None = None,
    ) -> InferenceRequest:
        """A request that came from the runtime; nothing is checked or copied."""
        request = _new(cls)
        request._details = details
        request._requested_output_names = requested_output_names
        request._inputs = inputs
        request._release_flags = 0
        request._cancelled = False
        request._preferred_memory = None
        request._trace = _UNTRACED
        request._origin = origin
        request._reply = request._sender = None
        return request

    def inputs(self) -> list[Tensor]:
        return list(self._inputs)

    def request_id(self) -> str:
        return self._details.request_id

    def correlation_id(self) -> CorrelationId:
        return self._details.correlation_id

    def flags(self) -> int:
        return self._details.flags

    def set_flags(self, flags: int) -> None:
        self._details = self._details._replace(flags=_integer("flags", flags))

    def timeout(self) -> int:
        """The request's timeout in microseconds; 0 where it has none."""
        return self._details.timeout_us

    def parameters(self) -> str:
        """The parameters as a JSON text."""
        parameters = self._details.parameters
        return as_json(parameters) if self._origin is None else as_compact_json(parameters)

    def requested_output_names(self) -> set[str]:
        return set(self._requested_output_names)

    def trace(self) -> InferenceTrace:
        return self._trace

    def is_cancelled(self) -> bool:
        """Whether nobody waits for the response any more. Costs nothing: the runtime tells."""
        return self._cancelled or (self._reply is not None and self._reply.is_cancelled)

    def set_release_flags(self, flags: int) -> None:
        """What is to become of the request after execute: released, or scheduled again."""
        self._release_flags = _integer("flags", flags)

    def get_response_sender(self) -> InferenceResponseSender:
        """What sends responses apart from what `execute` returns; the same object at each call."""
        from moonpool.stub.sender import InferenceResponseSender

        if self._sender is None:
            self._sender = InferenceResponseSender.of(self)
        return self._sender

    def reply(self) -> Reply:
        """The state of the responses to this request, which the runtime made."""
        reply = self._reply
        if reply is None:
            if self._origin is None:
                raise TritonModelException("a request of a model's own making has no responses")
            port, batch, index = self._origin
            reply = port.reply(batch, index, self._requested_output_names)
            reply.preferred_memory = self._preferred_memory
            reply.is_cancelled = self._cancelled
            self._reply = reply
        return reply

    @overload
    def exec(self, decoupled: Literal[False] = ...) -> InferenceResponse: ...
    @overload
    def exec(self, decoupled: Literal[True]) -> ResponseIterator: ...
    @overload
    def exec(self, decoupled: bool) -> Answer: ...
    def exec(self, decoupled: bool = False) -> Answer:
        """Run the request on the model that it names, and wait for the response.

        With `decoupled`, returns a `ResponseIterator` over the responses. What goes wrong with the request is
        the response's error; raises TritonModelException only where no request can be made.
        """
        return current().infer(self, bool(decoupled))

    @overload
    def async_exec(self, decoupled: Literal[False] = ...) -> Awaitable[InferenceResponse]: ...
    @overload
    def async_exec(self, decoupled: Literal[True]) -> Awaitable[ResponseIterator]: ...
    @overload
    def async_exec(self, decoupled: bool) -> Awaitable[Answer]: ...
    def async_exec(self, decoupled: bool = False) -> Awaitable[Any]:
        """As `exec`, for a coroutine to await. The request is on its way when this returns."""
        import asyncio

        return asyncio.ensure_future(current().ainfer(self, bool(decoupled)))

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        # A copy would be answered apart from the original.
        raise TypeError("cannot pickle 'c_python_backend_utils.InferenceRequest' object")

    def __repr__(self) -> str:
        return f"<InferenceRequest {self.request_id()!r}, inputs {list(self._inputs)!r}>"


def _wrong_type(name: str, expected: str, value: object) -> TypeError:
    return TypeError(
        f"__init__(): incompatible constructor arguments. InferenceRequest takes {expected} "
        f"as {name}, not {shown(value)} of {type(value)}"
    )


def _text(name: str, value: object) -> str:
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
