"""The usual way of requests over a work channel: what is placed in memory, sent, waited for and read. In Python and
compiled.

Theory of operation. `_port.pyx` is the compiled form. It lays out any mix of shapes, rows and datatypes by arithmetic,
and keeps no layout from batch to batch. It does what most batches are: arrays that are copied, with ids, parameters
and all other details, and answers with nothing but outputs in the stub's own regions. It looks if everything is so
before it changes anything. If not, `put` returns False and `take` returns None, and the `Link` does all of it in
Python.

Here are the forms for interpreters without the compiled one. `Shapes` and `RequestBase` are complete. The port of this
file does nothing, so that the link does everything.

What belongs to the driver of a link is the port's, too: one thread at a time has it. Other threads meet the driver in
`replies`, `released`, and in the blocks' `spares`, each step of which is one instruction.
"""

from __future__ import annotations

import struct
from _thread import allocate_lock
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from moonpool.ipc.extension import is_wanted, load_if_there
from moonpool.ipc.messages import NO_CORE

_NOWHERE: Mapping[int, Any] = {}


class RequestTensor(NamedTuple):
    """The description of one input for the stub. `number` is its place in the configuration."""

    number: int
    datatype: int
    shape: list[int]
    size_bytes: int


def key_of(shapes: Sequence[tuple[int, Sequence[int] | None]]) -> bytes:
    """Return what requests have in common that may share a batch.

    Each row is an input and its dimensions without rows, None if it is ragged.
    """
    numbers: list[int] = []
    for index, dims in shapes:
        numbers += (index, -1) if dims is None else (index, len(dims), *dims)
    return struct.pack(f"{len(numbers)}q", *numbers)


class Shapes:
    """The shapes of the inputs of a request, and what follows from them.

    `signature` is equal for requests that may share a batch; None for a model that does not batch. `is_shared` is
    False if there are BYTES, whose size differs from request to request.
    """

    __slots__ = ("batch_size", "is_shared", "signature", "tensors")

    def __init__(
        self, tensors: list[RequestTensor], batch_size: int, signature: bytes | None, *, is_shared: bool
    ) -> None:
        self.tensors = tensors
        self.batch_size = batch_size
        self.signature = signature
        self.is_shared = is_shared


class RequestBase:
    """A request on its way to a stub and back."""

    __slots__ = (
        "allocator",
        "arrays",
        "attempts",
        "batch_size",
        "details",
        "durations_ns",
        "fills_place",
        "has_views",
        "is_cancelled",
        "left",
        "priority",
        "queued_ns",
        "responded_ns",
        "response",
        "responses",
        "shapes",
        "signature",
        "states",
        "takes_devices",
        "targets",
        "timeout_us",
        "trace",
        "userp",
        "waiter",
        "wants_wire",
    )

    def __init__(self, arrays: list[Any], shapes: Shapes, details: Any = None, *, has_views: bool = True) -> None:
        # In the order of `shapes.tensors`: typed arrays, and for BYTES the bytes of the wire.
        self.arrays = arrays
        self.shapes = shapes
        self.batch_size: int = shapes.batch_size
        self.signature: Any = shapes.signature
        self.details: Any = None
        self.priority: int = 0
        self.timeout_us: int = 0
        if details is not None:
            self.detail(details)
        # True if any array is a view of memory that stubs may see where it lies.
        self.has_views = has_views
        # The memory that the stub writes outputs to, by their numbers. Only used if `has_views`.
        self.targets: Mapping[int, Any] = _NOWHERE
        self.allocator: Any = None
        self.userp: object = None
        # True if outputs are wanted as `WireTensor`, by a caller that only passes them on.
        self.wants_wire = False
        # True if they may then be arrays on devices.
        self.takes_devices = False
        # The states of its sequence, if the runtime keeps some and the request is in a batch.
        self.states: Any = None
        # None for most requests.
        self.trace: Any = None
        # Of a step of an ensemble: the sums of compute input, infer and output of all steps, to which its batch adds
        # its own.
        self.durations_ns: list[int] | None = None
        self.waiter: Any = None
        self.queued_ns = 0
        self.attempts = 0
        # The caller went away: nobody wants the outcome.
        self.left = False
        # The model may stop, but its responses are still wanted.
        self.is_cancelled = False
        # It fills an empty place in the batch of a sequence batcher. No caller sent it.
        self.fills_place = False
        # The number of responses so far, apart from the outcome. `response` is the only one of a model that gives one.
        self.responses = 0
        # If the model is decoupled: the time of the last response, or of the start of its batch.
        self.responded_ns = 0
        self.response: Any = None

    def detail(self, details: Any) -> None:
        """Set what its caller says beside its inputs."""
        self.details = details
        self.priority, self.timeout_us = details.priority, details.timeout_us


class LentBlocks:
    """Blocks that a stub has, as far as a port changes them. `BorrowedBlocks` says what each is for."""

    def __init__(self, first: Any) -> None:
        self.first = first
        self.lock = allocate_lock()
        # Lent for the present batch, by their places.
        self.lent: list[Any] = []
        # Memory of clients that outputs of this batch may go to.
        self.targets: list[Any] = []
        # Blocks of earlier batches that nobody looks at, by their sizes.
        self.spares: dict[int, Any] = {}


class ExecutingBatch:
    """The batch that a stub has, as far as a port changes it. `Replies` says more."""

    def __init__(self) -> None:
        self.lock = allocate_lock()
        # Its number and its requests, 0 for none.
        self.executing: tuple[int, Sequence[Any]] = (0, ())
        # The requests in it which already had their last response, by index.
        self.ended: set[int] = set()


class Spec:
    """The inputs of a model, by which usual requests are checked. In Python, no request is usual here."""

    def __init__(
        self, kind: type[RequestBase], inputs: list[tuple[str, int, tuple[int, ...], bool, bool]], max_batch_size: int
    ) -> None:
        """`kind` is the class of the requests.

        Each input has name, datatype, dimensions, and if it is ragged and if it is reshaped.
        """

    def request(self, inputs: object) -> Any:  # noqa: ARG002
        """Return the request with these inputs, None if they are not exactly the arrays of the model."""
        return None

    def request_in(
        self,
        described: object,  # noqa: ARG002
        data: object,  # noqa: ARG002
        offset: int,  # noqa: ARG002
        sent: list[tuple[int, int]] | None,  # noqa: ARG002
        has_views: bool,  # noqa: ARG002
        lend: object = None,  # noqa: ARG002
    ) -> Any:
        """Return the request whose inputs lie in a message, None if they are not exactly the model's, or not all there.

        `described` is a list of `InputPlan`. `sent` has the place of each of them in `data` from `offset` on, as
        (offset, size in bytes); None if they fill the rest of it one behind another. `has_views` says that stubs see
        `data`. Inputs in memory of clients are not in the message: `lend` takes a place there and returns a lease, None
        if its bytes must be copied. Nothing is believed of what a client says of names, datatypes, shapes, places and
        sizes, except that `lend` checks places.
        """
        return None


class RuntimePort:
    """The runtime's end of a work channel.

    Its driver calls all methods but those for a response apart, which the reactor calls.
    """

    __slots__ = ("batch", "core", "is_plain", "link", "look_ns", "rests")

    def __init__(self, *_: Any) -> None:
        """The arguments are the conversation, the blocks that are lent, the replies, the places that callers have
        dropped and those that the stub has given back, and the regions for answers by their numbers.
        """
        # The link, which has the answers that the port does not take.
        self.link: Any = None
        # The number of the last batch.
        self.batch = 0
        # The core on which the stub was last.
        self.core = NO_CORE
        # False if all batches go Python's way.
        self.is_plain = False
        # For how long a lone caller looks for an answer, and the number of requests until it looks again.
        self.look_ns = self.rests = 0

    def serve(self, names: Sequence[str], look_ns: int) -> None:
        """Set the names of the model's outputs, and for how long a lone caller looks for an answer."""

    def use(self, slots: Any) -> None:
        """Talk over these slots from now on, in place of the socket."""

    def put(self, requests: Sequence[RequestBase]) -> bool:  # noqa: ARG002
        """Place the inputs of a batch and send it. Returns False, having done nothing, if Python has to do it."""
        return False

    def wait(self) -> bool:
        """Wait for a packet and put it into the channel's inbox.

        Returns False, having done nothing, if Python has to do it.
        """
        return False

    def wait_alone(self) -> bool:
        """Do what `wait` does for a caller who alone waits.

        Looks for the answer for a moment first, where that has helped lately.
        """
        return False

    def wait_until(self, deadline_ns: int, is_alone: bool) -> bool | None:  # noqa: ARG002
        """Do what `wait` does, and `wait_alone` if it `is_alone`, until a time of `time.monotonic_ns`.

        Returns False at that time, and None if Python has to do it.
        """
        return None

    def look(self) -> bool:
        """Look for the answer for a moment, where that has helped lately. Returns True if it is there."""
        return False

    def take(self, requests: Sequence[RequestBase]) -> list[Any] | None:  # noqa: ARG002
        """Read the answer, and return the responses.

        Returns None, and leaves the packet in the inbox, if Python has to do it.
        """
        return None

    def open_apart(self, blocks: list[list[int]], packed: object) -> bool:  # noqa: ARG002
        """Read a response that has nothing but outputs in one block.

        Returns False, having done nothing, if Python has to do it.
        """
        return False

    def apart(self, request: RequestBase) -> Any:
        """Return the response that was opened, to this request."""
        raise NotImplementedError


PythonRequest, PythonPort = RequestBase, RuntimePort

# The compiled forms, None if there are none.
compiled: Any = load_if_there("moonpool.ipc.port._port") if is_wanted() else None
if not TYPE_CHECKING and compiled is not None:
    Shapes, RequestBase, LentBlocks, ExecutingBatch, Spec, RuntimePort = (
        compiled.Shapes,
        compiled.RequestBase,
        compiled.LentBlocks,
        compiled.ExecutingBatch,
        compiled.Spec,
        compiled.RuntimePort,
    )
