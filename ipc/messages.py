"""Every message between runtime and stub: its fields, who may send it, on which channel, what may follow.

Theory of operation. Two channels join a runtime and a stub. The *work* channel is lockstep: after a message from
one side only the other side may speak, and `followers` says with what. The *control* channel is asynchronous:
there any message may come after any other, from its one allowed sender. A message is a msgpack array
whose first element is its kind; the rest are the fields below in their order. Both ends use this one table: the
codec builds its checks from it, and `Conversation` its order. What it does not describe is refused, and
a peer that sent such a thing is not listened to any more.

Tensors are described by rows, so that the description of a batch is small:

- a *block* is `[region, offset, size]`: one lease for the reader;
- a *tensor* is `[index, datatype, shape, block, offset, size]`: the index of the input or output in the model's
  configuration, the datatype's code, the index of its block in the same message, the offset in that
  block and the size, both in bytes;
- a *layout* is the tensors of each request, or of each response, of a batch. It names no region, so it is the
  same for every batch of the same shapes, and each end works out only once what a layout asks of it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Union

    Spec = Union[
        "Int", "Real", "Text", "Raw", "Flag", "Table", "ListOf", "Row", "Maybe", "OneOf", "Packed"
    ]

PROTOCOL_VERSION = 1

MAX_DIMS = 32
_MAX_INT = 2**63 - 1


class Side(IntEnum):
    """Who sends."""

    RUNTIME = 1
    STUB = 2


class Kind(IntEnum):
    """What a message is for. The numbers are the wire's; they are never used again for another kind."""

    # Work channel.
    START = 1
    COMPLETED = 2
    LOADED = 3
    FAILED = 4
    EXECUTE = 5
    ANSWER = 6
    FINALIZE = 7
    FINALIZED = 8
    # Any channel: stands for a message that is too large for a packet and lies in memory.
    INDIRECT = 9
    # Control channel.
    SANDBOX = 15
    REGION = 16
    GROW = 17
    REFUSED = 18
    RELEASE = 19
    RETIRE = 20
    LOG = 21
    RESPONSES = 22
    CANCEL = 23
    METRICS = 24
    LOGGING = 25
    READY = 26
    READINESS = 27


class Int:
    """A whole number within bounds. Not a bool, not a float."""

    __slots__ = ("high", "low")

    def __init__(self, low: int = 0, high: int = _MAX_INT) -> None:
        self.low = low
        self.high = high


class Real:
    """A float: any, also infinite ones and those that are no numbers."""

    __slots__ = ()


class Text:
    """A string of at most so many characters."""

    __slots__ = ("length",)

    def __init__(self, length: int) -> None:
        self.length = length


class Raw:
    """Bytes, at most so many."""

    __slots__ = ("length",)

    def __init__(self, length: int) -> None:
        self.length = length


class Flag:
    """True or false."""

    __slots__ = ()


class Table:
    """A dictionary with string keys and scalar values: parameters of a request or a response."""

    __slots__ = ("length",)

    def __init__(self, length: int) -> None:
        self.length = length


class ListOf:
    """At most so many of one thing."""

    __slots__ = ("item", "length")

    def __init__(self, item: Spec, length: int) -> None:
        self.item = item
        self.length = length


class Row:
    """A list with a fixed number of fields."""

    __slots__ = ("fields",)

    def __init__(self, **fields: Spec) -> None:
        self.fields = fields


class Maybe:
    """The thing or nil."""

    __slots__ = ("item",)

    def __init__(self, item: Spec) -> None:
        self.item = item


class OneOf:
    """The one or the other, told apart by type."""

    __slots__ = ("items",)

    def __init__(self, *items: Spec) -> None:
        self.items = items


class Packed:
    """Bytes that are the packed form of a thing of its own, read with `codec.Inner`.

    For what is the same in message after message: whoever meets bytes again knows what they say.
    """

    __slots__ = ("item", "length")

    def __init__(self, item: Spec, length: int) -> None:
        self.item = item
        self.length = length


class Message:
    """A row of the table."""

    __slots__ = ("fields", "followers", "sender")

    def __init__(
        self, sender: Side | None, fields: dict[str, Spec], followers: tuple[Kind, ...] = ()
    ) -> None:
        self.sender = sender  # None: either side
        self.fields = fields
        self.followers = frozenset(followers)


MAX_BATCH = 65536
# Blocks that go back with one message; what is left over goes with the next. A packet of the control
# channel has room for the smaller number; messages of the work channel may lie in memory.
MAX_PLACES = 1 << 20
MAX_PLACES_IN_PACKET = 1024
# Changes of metrics that fit a packet, and as many metrics that nobody refers to any more.
MAX_METRIC_CHANGES = 800
_LONG = 1 << 20
_SHORT = 4096
MAX_PARAMETERS = 4096

_ID = Int()
_PLACE = Row(region=_ID, offset=_ID)
_BLOCK = Row(region=_ID, offset=_ID, size=_ID)
_TENSOR = Row(
    index=Int(0, 65535),
    datatype=Int(1, 14),
    shape=ListOf(Int(), MAX_DIMS),
    block=Int(0, 2 * MAX_BATCH),
    offset=_ID,
    size=_ID,
)
_TENSORS = ListOf(_TENSOR, 65536)
LAYOUT = Packed(ListOf(_TENSORS, MAX_BATCH), 1 << 28)
_BLOCKS = ListOf(_BLOCK, 2 * MAX_BATCH)
_PLACES = ListOf(_PLACE, MAX_PLACES)
_PARAMETERS = Maybe(Table(MAX_PARAMETERS))

# What most requests leave at its default travels only where something of it was set.
_DETAILS = Row(
    request_id=Text(_LONG),
    correlation_id=OneOf(Int(0, 2**64 - 1), Text(_SHORT)),
    flags=Int(0, 2**32 - 1),
    timeout_us=Int(0, 2**64 - 1),
    priority=Int(0, 2**64 - 1),
    parameters=_PARAMETERS,
    outputs=Maybe(ListOf(Int(0, 65535), 65536)),
    trace=Maybe(Text(_SHORT)),
)
_ERROR = Row(code=Int(0, 7), message=Text(_LONG))
_REMARKS = Row(parameters=_PARAMETERS, error=Maybe(_ERROR))

# What an answer says of one request.
ANSWERED, OPEN, RESCHEDULED = 0, 1, 2

# One response of a request that its answer left open. FINAL says that there are no more, AGAIN that the
# request is to be scheduled once more; both may come without a response, and then there is no layout.
FINAL, AGAIN = 1, 2
MAX_RESPONSES_IN_PACKET = 64
_RESPONSE = Row(
    batch=_ID,
    index=Int(0, MAX_BATCH - 1),
    flags=Int(0, 2),
    blocks=_BLOCKS,
    layout=Maybe(LAYOUT),
    remarks=Maybe(_REMARKS),
)

_RUNTIME, _STUB = Side.RUNTIME, Side.STUB

WORK: dict[Kind, Message] = {
    # Who the stub is to be: see `moonpool.stub.handshake` for what the JSON text holds.
    Kind.START: Message(
        _RUNTIME,
        {"version": Int(), "start": Text(1 << 28)},
        (Kind.COMPLETED, Kind.LOADED, Kind.FAILED),
    ),
    # The configuration after auto_complete_config, as JSON. This stub has done its work.
    Kind.COMPLETED: Message(_STUB, {"config": Text(1 << 28)}, (Kind.FINALIZE,)),
    Kind.LOADED: Message(_STUB, {"facts": Table(64)}, (Kind.EXECUTE, Kind.FINALIZE)),
    # Stage, the error as the client gets it, and the traceback for the log.
    Kind.FAILED: Message(
        _STUB,
        {"stage": Text(64), "message": Text(_LONG), "traceback": Text(_LONG)},
        (Kind.FINALIZE,),
    ),
    # `released`: blocks of earlier answers that nobody needs any more. `details`: of each request, where
    # there are some.
    Kind.EXECUTE: Message(
        _RUNTIME,
        {
            "batch": _ID,
            "released": _PLACES,
            "blocks": _BLOCKS,
            "layout": LAYOUT,
            "details": Maybe(ListOf(Maybe(_DETAILS), MAX_BATCH)),
        },
        (Kind.ANSWER,),
    ),
    # `held`: blocks of this batch that the model keeps. `released`: blocks it kept of earlier ones.
    # `remarks`: on each response, where there are some; one that has an error has no outputs.
    # `states`: of each request, where not all are answered here. The responses to one that is left open
    # come in RESPONSES, perhaps before this; one that is rescheduled comes again in a later EXECUTE.
    Kind.ANSWER: Message(
        _STUB,
        {
            "batch": _ID,
            "held": _PLACES,
            "released": _PLACES,
            "blocks": _BLOCKS,
            "layout": LAYOUT,
            "remarks": Maybe(ListOf(Maybe(_REMARKS), MAX_BATCH)),
            "states": Maybe(ListOf(Int(0, 2), MAX_BATCH)),
        },
        (Kind.EXECUTE, Kind.FINALIZE),
    ),
    Kind.FINALIZE: Message(_RUNTIME, {}, (Kind.FINALIZED,)),
    # What finalize raised, empty if nothing.
    Kind.FINALIZED: Message(_STUB, {"message": Text(_LONG), "traceback": Text(_LONG)}),
    Kind.INDIRECT: Message(None, {"region": _ID, "offset": _ID, "size": _ID}),
}

CONTROL: dict[Kind, Message] = {
    # The first message: what to give up before anything foreign is imported.
    Kind.SANDBOX: Message(_RUNTIME, {"level": Text(16), "limits": Table(64)}),
    # Comes with the region's descriptor. `writer` says who allocates in it.
    Kind.REGION: Message(_RUNTIME, {"region": _ID, "size": _ID, "writer": Int(1, 2)}),
    # The stub needs a region of at least that size for its answers.
    Kind.GROW: Message(_STUB, {"size": _ID}),
    Kind.REFUSED: Message(_RUNTIME, {"reason": Text(_SHORT)}),
    # Blocks that nobody needs any more, when no EXECUTE or ANSWER comes by for them to ride on: of
    # answers, from the runtime; of requests that the stub kept, from the stub.
    Kind.RELEASE: Message(None, {"places": ListOf(_PLACE, MAX_PLACES_IN_PACKET)}),
    # The writer of the region does not use it any more.
    Kind.RETIRE: Message(None, {"region": _ID}),
    Kind.LOG: Message(
        _STUB,
        {"level": Int(0, 3), "message": Text(_LONG), "file": Text(_SHORT), "line": Int(0, 2**31)},
    ),
    # Responses of requests that are executing or were left open; those of one request are in order.
    Kind.RESPONSES: Message(_STUB, {"responses": ListOf(_RESPONSE, MAX_RESPONSES_IN_PACKET)}),
    # Nobody waits any more for the responses to this request, which is executing or open.
    Kind.CANCEL: Message(_RUNTIME, {"batch": _ID, "index": Int(0, MAX_BATCH - 1)}),
    Kind.INDIRECT: Message(None, {"region": _ID, "offset": _ID, "size": _ID}),
    # What the model did to metrics, in any order that has the same effect, as numbered in `ipc.metric_kinds`;
    # then the metrics and families that nobody refers to any more.
    Kind.METRICS: Message(
        _STUB,
        {
            "changes": ListOf(
                Row(metric=_ID, operation=Int(0, 2), value=Real(), count=Int(1)), MAX_METRIC_CHANGES
            ),
            "dropped": ListOf(_ID, MAX_METRIC_CHANGES),
        },
    ),
    # Which levels of LOG are wanted from now on.
    Kind.LOGGING: Message(
        _RUNTIME, {"info": Flag(), "warning": Flag(), "error": Flag(), "verbose": Flag()}
    ),
    # Is the model ready, as it says itself? One question at a time; the reason is nil if it is.
    Kind.READY: Message(_RUNTIME, {"question": _ID}),
    Kind.READINESS: Message(_STUB, {"question": _ID, "reason": Maybe(Text(_SHORT))}),
}
