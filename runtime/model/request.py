"""A request on its way through the runtime, the caller who waits for it, and the response."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterator, KeysView, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.memory import Lease
from moonpool.ipc.messages import ORDINARY_MEMORY
from moonpool.ipc.messages import Details as Details
from moonpool.ipc.port import RequestBase, RequestTensor, compiled
from moonpool.ipc.tensors import BF16, BYTES, DTYPES, NAMES, code_of, encode_bytes
from moonpool.runtime.model.config.model import ModelConfig

if TYPE_CHECKING:
    from typing_extensions import Buffer


Parameter = bool | int | float | str


class WireTensor(NamedTuple):
    """A tensor as the bytes of the wire. `datatype` is a code of `ipc.tensors`.

    `raw` is a contiguous array of any dtype that has these bytes.
    """

    datatype: int
    shape: tuple[int, ...]
    raw: NDArray[Any]

    @classmethod
    def of(cls, output: WireTensor | NDArray[Any]) -> WireTensor:
        """Make one of an array. Strings are encoded, other arrays are not copied."""
        if isinstance(output, WireTensor):
            return output
        datatype = code_of(output.dtype)
        raw = output
        if datatype == BYTES:
            raw = np.frombuffer(encode_bytes(raw), np.uint8)
        elif datatype == BF16:
            raw = raw.view(np.uint16)
        return cls(datatype, output.shape, raw)

    @property
    def base(self) -> object:
        """The object that owns the memory, as of an array."""
        return self.raw.base

    @property
    def dtype(self) -> str:
        """The name of the datatype."""
        return NAMES[self.datatype]


class Placement(NamedTuple):
    """One input for a backend. `number` is its place in the configuration."""

    number: int
    datatype: int
    # A typed array, for BYTES the bytes of the wire as uint8.
    data: NDArray[Any]


class Response:
    """The answer of a model to a request: `response["Y"]` is an output.

    `outputs` maps names to arrays. They are zero-copy views of shared memory, which is reused once you drop them, so
    copy what you keep for long. BYTES outputs are object arrays of `bytes`.
    """

    __slots__ = ("outputs", "parameters", "request_id")

    def __init__(
        self, outputs: dict[str, NDArray[Any]], parameters: Mapping[str, Parameter] | None = None, request_id: str = ""
    ) -> None:
        self.outputs = outputs
        self.parameters = parameters or {}
        self.request_id = request_id

    def __getitem__(self, name: str) -> NDArray[Any]:
        outputs = self.outputs
        if name not in outputs:
            raise KeyError(f"the response has no output {name!r}; it has {list(outputs)}")
        return outputs[name]

    def keys(self) -> KeysView[str]:
        """Return the names of the outputs. With these, `dict(response)` is a dictionary of arrays."""
        return self.outputs.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in self.outputs.items())
        return f"<Response {shown}>"


Outcome = Response | BaseException


class Deferral:
    """An answer of a backend in place of an outcome."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


LATER = Deferral("LATER")
"""The responses come through `ModelInstance.respond`, before this answer or after it."""
AGAIN = Deferral("AGAIN")
"""The model wants the request to be scheduled once more."""

Answer = Outcome | Deferral


class ModelVersion(Protocol):
    """A version of a model, as the trace of a request shows it."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def config(self) -> ModelConfig: ...


class RequestTrace(Protocol):
    """Records what happens to a request. Times are of `time.monotonic_ns`. Any thread may call any method."""

    context: str
    """The model may hand it on with requests of its own."""

    def executed(
        self, answer: Answer, queued_ns: int, started_ns: int, sent_ns: int, answered_ns: int, ended_ns: int
    ) -> None:
        """Record that the request was in a batch that is answered now. Does not block. `answered` follows."""

    def answered(self) -> None:
        """Record the answer, which nobody else has yet. This may take long, so no lock may be held."""

    def settled(self) -> None:
        """Note that the model adds nothing more. This may write a file, so no lock may be held."""

    def responded(self, answer: object) -> None:
        """Record a response apart from the answer to the batch."""

    def child(self, model: ModelVersion, request_id: str) -> RequestTrace:
        """Return the trace of a request that the model makes for this one, to `model`."""

    def follow(self, request: InferenceRequest) -> None:
        """Trace this request from now on."""

    def end(self) -> None:
        """Note that the caller has all that it will get."""


class StatesOfRequest(Protocol):
    """The states of its sequence that a request has as inputs, and the next ones that its response brought."""

    before: Any
    new: Any
    hidden: frozenset[str]
    """Outputs with states, which its caller does not get."""


class Waiter(Protocol):
    """A caller who waits for the outcome of a request, as the scheduler sees it."""

    __slots__ = ()
    # True if a backend that blocks may execute on the thread that submits the request.
    may_block: bool = False
    # True if signal handlers run on the thread of this caller. They may raise anywhere in the code that it runs here.
    interruptible: bool = False
    # True if it does no harm to call `resolve` again, with the same outcome, wherever a signal handler raised in it.
    may_be_told_again: bool = False
    # True if this caller takes more than one response, which decoupled models may give.
    takes_many: bool = False

    def gather(self, scheduler: Any, request: InferenceRequest) -> bool:  # noqa: ARG002 - as `appoint`
        """Return True if this caller submits a request that follows from its own to `scheduler` later, with others.
        From any thread.
        """
        return False

    def respond(self, outcome: Outcome) -> None:  # noqa: ARG002 - as `appoint`
        """Take a response that is not the last. Called on the reactor's thread; must not block.

        Nobody calls it for a caller who takes one response only.
        """
        raise TypeError(f"{type(self).__name__} takes one response only")

    def resolve(self, outcome: Outcome | None) -> None:  # noqa: ARG002 - as `appoint`
        """Take the outcome. A caller who takes many gets None after the last one.

        Called once, from any thread.
        """
        raise TypeError(f"{type(self).__name__} waits for no outcome")

    def appoint(self, execution: Any) -> bool:  # noqa: ARG002 - what the others use
        """Return True if this caller will drive the execution, an `Execution` of the scheduler. Called from any
        thread.
        """
        return False


class InferenceRequest(RequestBase):
    """One request. The scheduler's queue, the backend and the caller's waiter share it."""

    __slots__ = ()
    waiter: Waiter
    allocator: ResponseAllocator | None
    details: Details | None
    trace: RequestTrace | None
    states: StatesOfRequest | None
    response: Outcome | None

    @property
    def request_id(self) -> str:
        """The id that its caller gave it, "" for none."""
        return "" if self.details is None else self.details.request_id

    @property
    def is_for_host(self) -> bool:
        """True if outputs are wanted in ordinary memory, wherever the model leaves them."""
        if self.details is not None and self.details.memory == ORDINARY_MEMORY:
            return True
        return self.allocator is not None or (self.wants_wire and not self.takes_devices)

    @property
    def correlation_id(self) -> int | str:
        """The id of its sequence, 0 or "" for none."""
        return 0 if self.details is None else self.details.correlation_id

    @property
    def flags(self) -> int:
        """1 starts a sequence, 2 ends one."""
        return 0 if self.details is None else self.details.flags

    def tell_apart(self, states: Hashable) -> None:
        """Let it share a batch only with requests whose states have the same key."""
        self.signature = (self.shapes.signature, states)

    def identify(self, correlation_id: int | str, flags: int) -> None:
        """Set its correlation id and its flags."""
        details = self.details or Details()
        self.details = details._replace(correlation_id=correlation_id, flags=flags)

    @property
    def inputs(self) -> list[Placement]:
        """The inputs with what describes them, for backends."""
        return [
            Placement(tensor.number, tensor.datatype, array)
            for tensor, array in zip(self.shapes.tensors, self.arrays, strict=True)
        ]


class ResponseAllocator:
    """Allocates the caller's memory for the outputs of a response. Subclasses override at least `alloc`.

    Without an allocator, outputs are views of shared memory. With one, the calls for each response come in the order
    that Triton's clients know: `start`, then `alloc` once for each output, then, when the caller no longer holds an
    output, `release` for its buffer.

    One allocator may serve many requests; calls for different requests come from different threads at the
    same time. `userp` is the object given with the request. An exception from `start` or `alloc`
    becomes the outcome of the request.
    """

    def start(self, userp: object) -> None:
        """Begin a response."""

    def alloc(self, name: str, datatype: str, shape: tuple[int, ...], size_bytes: int, userp: object) -> Buffer:
        """Return a writable contiguous buffer of at least `size_bytes` for one output.

        BYTES outputs come in their wire form: each string after its length in four bytes.
        """
        raise NotImplementedError

    def release(self, buffer: Buffer, userp: object) -> None:
        """Take back a buffer, of which the caller has dropped the last view. May be called from any thread."""


def allocate(
    request: InferenceRequest, name: str, datatype: int, shape: tuple[int, ...], raw: NDArray[Any]
) -> NDArray[Any]:
    """Copy one output into memory of the request's allocator. Raises what `alloc` raises, or ValueError for a bad
    buffer.

    Returns an array in that memory, of the output's dtype and shape, or for BYTES of `uint8`.
    """
    allocator, userp = request.allocator, request.userp
    if allocator is None:
        raise ValueError("the request has no allocator")
    buffer = allocator.alloc(name, NAMES[datatype], shape, raw.nbytes, userp)
    try:
        # ctypes' arrays are no ndarrays, so the lease stays in the chain of bases; see `Lease`.
        memory = (ctypes.c_ubyte * raw.nbytes).from_buffer(buffer)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the allocator's buffer for output {name!r} must be writable and hold {raw.nbytes} bytes: {error}"
        ) from error
    lease = Lease((raw.nbytes,), "u1", memory)  # type: ignore[arg-type]
    lease.give_back = lambda token: allocator.release(token, userp)  # type: ignore[arg-type]
    lease.token = buffer
    lease.region = None
    lease[...] = raw
    if datatype == BYTES:
        return np.ndarray(lease.shape, np.uint8, lease)
    return np.ndarray(shape, DTYPES[datatype], lease)


if compiled is not None:
    compiled.use(Response, WireTensor, RequestTensor)
