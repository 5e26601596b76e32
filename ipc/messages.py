"""Tables of all messages between runtime and stub: fields, sender, channel, and the messages that may follow.

Theory of operation. Three channels join a runtime and a stub. The *work* channel is lockstep: after a message from
one side only the other side may send, and `followers` says what. The *control* channel is asynchronous:
any message may come after any other, from its one allowed sender. On the *calls* channel the stub asks,
under numbers that it chooses, and the runtime answers each number in its own time. A message is a msgpack array
whose first element is its kind; the rest are the fields below in their order. Both ends use these tables: the
codec builds its checks from them, and `Conversation` its order. Any other message is refused, and nothing more is read
from a peer that sent one.

The first part of the module has the kinds and the types of fields, the second part the tables, and the third part the
details of a request as Python sees them, and functions that cut texts to the limits of fields.

Tensors are described by rows, so that the description of a batch is small:

- a *block* is `[region, offset, size]`: one lease for the reader;
- a *tensor* is `[index, datatype, shape, block, offset, size]`: the index of the input or output in the model's
  configuration, the datatype's code, the index of its block in the same message, the offset in that
  block and the size, both in bytes;
- a *layout* is the tensors of each request, or of each response, of a batch. It names no region, so it is the
  same for every batch of the same shapes, and each end works out only once what a layout asks of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple, Union

from moonpool.ipc import denials


class Side(IntEnum):
    """The two sides of a channel."""

    RUNTIME = 1
    STUB = 2


class Kind(IntEnum):
    """The kinds of messages. A number is never used again for another kind."""

    # Work channel.
    START = 1
    COMPLETED = 2
    LOADED = 3
    FAILED = 4
    EXECUTE = 5
    ANSWER = 6
    FINALIZE = 7
    FINALIZED = 8
    CONFINED = 10
    SLEEP = 50
    SLEPT = 51
    WAKE = 52
    WOKEN = 53
    # Any channel: points to a message in memory that is too large for a packet.
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
    LENT_REGION = 40
    EVENT = 48
    DENIALS = 49
    SLOTS = 54
    # Calls channel.
    INFER = 30
    REPLY = 31
    WITHDRAW = 32
    LET_GO = 33
    LOAD_MODEL = 34
    UNLOAD_MODEL = 35
    IS_MODEL_READY = 36
    DONE = 37
    NEW_METRIC = 38
    METRIC_VALUE = 39
    CANCEL_CALL = 43
    # Control channel of a template.
    FORK = 45
    REAP = 46
    EXITED = 47


Spec = Union["Int", "Real", "Text", "Raw", "Flag", "Table", "ListOf", "Row", "Maybe", "OneOf", "Packed"]


_MAX_INT = 2**63 - 1


class Int:
    """An integer within bounds. Neither a bool nor a float."""

    __slots__ = ("high", "low")

    def __init__(self, low: int = 0, high: int = _MAX_INT) -> None:
        self.low = low
        self.high = high


class Real:
    """Any float, infinities and NaN included."""

    __slots__ = ()


class Text:
    """A string of at most so many bytes in UTF-8."""

    __slots__ = ("length",)

    def __init__(self, length: int) -> None:
        self.length = length


class Raw:
    """At most so many bytes."""

    __slots__ = ("length",)

    def __init__(self, length: int) -> None:
        self.length = length


class Flag:
    """True or false."""

    __slots__ = ()


class Table:
    """A dictionary with string keys and scalar values, such as parameters of a request."""

    __slots__ = ("length",)

    def __init__(self, length: int) -> None:
        self.length = length


class ListOf:
    """A list of at most so many items of one type."""

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
    """An item or nil."""

    __slots__ = ("item",)

    def __init__(self, item: Spec) -> None:
        self.item = item


class OneOf:
    """One of several scalars, recognized by its type."""

    __slots__ = ("items",)

    def __init__(self, *items: Spec) -> None:
        self.items = items


class Packed:
    """Bytes that are the packed form of an item, read with `codec.unpack_layout`.

    For items that are the same in message after message: a reader that knows the bytes need not unpack them.
    """

    __slots__ = ("item", "length")

    def __init__(self, item: Spec, length: int) -> None:
        self.item = item
        self.length = length


# The kinds of custom metrics, and the operations on them.
COUNTER = 0
GAUGE = 1
HISTOGRAM = 2

INCREMENT = 0
SET = 1
OBSERVE = 2


PROTOCOL_VERSION = 9
# The stage of FAILED whose message is the number of an error of exec: the model's interpreter was not started.
EXEC_FAILED = "exec"

MAX_DIMS = 32
# The most devices, and the number that stands for ordinary memory.
MAX_DEVICES = 4096
NO_DEVICE = -1
# Bytes of CUDA's handles of the older kind, for device memory and for events.
HANDLE_BYTES = 64


class Message:
    """A row of a table: the sender of a kind of message, its fields, and the kinds that may follow."""

    __slots__ = ("fields", "followers", "sender")

    def __init__(self, sender: Any, fields: dict[str, Spec], followers: tuple[Kind, ...] = ()) -> None:
        # A member of the table's own enumeration of sides; None for either side.
        self.sender = sender
        self.fields = fields
        self.followers = frozenset(followers)


MAX_BATCH = 65536
# The most blocks that one message releases. Others go with the next message. A packet of the control
# channel has room for the smaller number; messages of the work channel may lie in memory.
MAX_PLACES = 1 << 20
MAX_PLACES_IN_PACKET = 1024
# Changes of metrics in a packet, and as many metrics that the model has dropped.
MAX_METRIC_CHANGES = 256
# The most observations in one METRICS. In a tritonserver each is a call of the server, and the stub's next message
# waits for all.
MAX_OBSERVATIONS = 1 << 20
# The most labels, buckets or characters of one metric in a message. The runtime accepts fewer.
MAX_METRIC_PARTS = 65_536
# The most bytes of a text: of one that a model or a client chooses, and of one that should be short.
LONG = 1 << 20
SHORT = 4096
MAX_PARAMETERS = 4096
# Of one request: inputs, and as many outputs.
MAX_TENSORS = 65536
# The files of a model that another model loads.
MAX_FILES = 65536
MAX_FILE_BYTES = 1 << 31
# The most bytes of a configuration that comes from a model. JSON takes twenty times its size once it is read.
LARGEST_CONFIG = 1 << 22
# The most bytes of a stub's message in memory, without its tensors: on any channel, and on the calls channel. Only
# LOAD_MODEL may be larger.
MAX_STORED_BYTES = 1 << 26
MAX_CALL_BYTES = 1 << 24

_ID = Int()
_PLACE = Row(region=_ID, offset=_ID)
_BLOCK = Row(region=_ID, offset=_ID, size=_ID)
_LYING: dict[str, Spec] = {
    "datatype": Int(1, 14),
    "shape": ListOf(Int(), MAX_DIMS),
    "block": Int(0, 2 * MAX_BATCH),
    "offset": _ID,
    "size": _ID,
}
_TENSOR = Row(index=Int(0, 65535), **_LYING)
# A tensor between models, which know each other's tensors by name.
_NAMED_TENSOR = Row(name=Text(LONG), **_LYING)
_TENSORS = ListOf(_TENSOR, MAX_TENSORS)
LAYOUT = Packed(ListOf(_TENSORS, MAX_BATCH), 1 << 28)
_TARGET = Row(request=Int(0, MAX_BATCH - 1), output=Int(0, 65535), region=_ID, offset=_ID, size=_ID)
_BLOCKS = ListOf(_BLOCK, 2 * MAX_BATCH)
_PLACES = ListOf(_PLACE, MAX_PLACES)
_PARAMETERS = Maybe(Table(MAX_PARAMETERS))
# Places for outputs: wherever the model leaves them, ordinary memory, the device in the next field.
ANY_MEMORY, ORDINARY_MEMORY, DEVICE_MEMORY = 0, 1, 2
_WANTED = Int(0, 2)
_DEVICE = Int(0, MAX_DEVICES - 1)
_DEVICE_IF_ANY = Int(NO_DEVICE, MAX_DEVICES - 1)

# Most requests leave all of these fields at their defaults. A row is sent only for a request that sets one.
_DETAILS = Row(
    request_id=Text(LONG),
    correlation_id=OneOf(Int(0, 2**64 - 1), Text(SHORT)),
    flags=Int(0, 2**32 - 1),
    timeout_us=Int(0, 2**64 - 1),
    priority=Int(0, 2**64 - 1),
    parameters=_PARAMETERS,
    outputs=Maybe(ListOf(Int(0, 65535), MAX_TENSORS)),
    trace=Maybe(Text(SHORT)),
    memory=_WANTED,
    device=_DEVICE,
)
# The core on which the sender of a batch or an answer ran, modulo NO_CORE; or NO_CORE, if the sender cannot or will not
# tell. It always takes one byte, so that the rest of a packet can be compared without it. It is a hint: a peer on
# another core may come at once.
NO_CORE = 127
_CORE = Int(0, NO_CORE)
_ERROR = Row(code=Int(0, 7), message=Text(LONG))
_REMARKS = Row(parameters=_PARAMETERS, error=Maybe(_ERROR))

# The state of one request after an answer.
ANSWERED, OPEN, RESCHEDULED = 0, 1, 2

# One response to a request that its answer left open. FINAL says that it is the last one, AGAIN that the request has to
# be scheduled again. Both may come without a response, and then there is no layout.
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
    # The layers that the stub has put on, before it knows its model: their names, and a sentence for each one that was
    # left out.
    Kind.CONFINED: Message(
        _STUB, {"version": Int(), "layers": ListOf(Text(256), 64), "left_out": ListOf(Text(SHORT), 64)}, (Kind.START,)
    ),
    # The model and its configuration, as JSON. `moonpool.stub.handshake` reads it.
    Kind.START: Message(_RUNTIME, {"start": Text(1 << 28)}, (Kind.COMPLETED, Kind.LOADED, Kind.FAILED)),
    # The configuration after auto_complete_config, as JSON. `is_fresh`: none of the model's code has run but the import
    # of its file, so the process may become an instance with another START. Any other has nothing more to do.
    Kind.COMPLETED: Message(_STUB, {"config": Text(LARGEST_CONFIG), "is_fresh": Flag()}, (Kind.START, Kind.FINALIZE)),
    Kind.LOADED: Message(_STUB, {"facts": Table(64)}, (Kind.EXECUTE, Kind.SLEEP, Kind.FINALIZE)),
    # The stage, the error as the client gets it, and the traceback for the log.
    Kind.FAILED: Message(_STUB, {"stage": Text(64), "message": Text(LONG), "traceback": Text(LONG)}, (Kind.FINALIZE,)),
    # `released`: blocks of earlier answers that are no longer in use. `details`: of each request, if any request has
    # some. `targets`: the places of outputs that the stub writes to the memory of clients.
    Kind.EXECUTE: Message(
        _RUNTIME,
        {
            "batch": _ID,
            "core": _CORE,
            "released": _PLACES,
            "blocks": _BLOCKS,
            "layout": LAYOUT,
            "details": Maybe(ListOf(Maybe(_DETAILS), MAX_BATCH)),
            "targets": Maybe(ListOf(_TARGET, MAX_BATCH)),
        },
        (Kind.ANSWER,),
    ),
    # `held`: blocks of this batch that the model keeps. `released`: blocks of earlier batches that it kept until now.
    # `remarks`: on each response, if any response has some; a response with an error has no outputs.
    # `states`: of each request, unless all are answered here. The responses to an open request
    # come in RESPONSES, perhaps before this; a rescheduled request comes again in a later EXECUTE.
    Kind.ANSWER: Message(
        _STUB,
        {
            "batch": _ID,
            "core": _CORE,
            "held": _PLACES,
            "released": _PLACES,
            "blocks": _BLOCKS,
            "layout": LAYOUT,
            "remarks": Maybe(ListOf(Maybe(_REMARKS), MAX_BATCH)),
            "states": Maybe(ListOf(Int(0, 2), MAX_BATCH)),
        },
        (Kind.EXECUTE, Kind.SLEEP, Kind.FINALIZE),
    ),
    # Calls of the model's `sleep` and `wake`, which LOADED says that it has (`can_sleep`). Nothing is inside: no batch
    # and no open request. An answer has the error that the function raised, and its traceback; both are empty if there
    # is none.
    Kind.SLEEP: Message(_RUNTIME, {}, (Kind.SLEPT,)),
    Kind.SLEPT: Message(_STUB, {"message": Text(LONG), "traceback": Text(LONG)}, (Kind.WAKE, Kind.FINALIZE)),
    Kind.WAKE: Message(_RUNTIME, {}, (Kind.WOKEN,)),
    Kind.WOKEN: Message(
        _STUB, {"message": Text(LONG), "traceback": Text(LONG)}, (Kind.EXECUTE, Kind.SLEEP, Kind.FINALIZE)
    ),
    Kind.FINALIZE: Message(_RUNTIME, {}, (Kind.FINALIZED,)),
    # The error that finalize raised; empty if none.
    Kind.FINALIZED: Message(_STUB, {"message": Text(LONG), "traceback": Text(LONG)}),
    Kind.INDIRECT: Message(None, {"region": _ID, "offset": _ID, "size": _ID}),
}

CONTROL: dict[Kind, Message] = {
    # The first message: the sandbox that the stub puts on before it imports foreign code, as `moonpool.ipc.policy`
    # writes it.
    Kind.SANDBOX: Message(_RUNTIME, {"policy": Text(1 << 16)}),
    # Comes with the region's descriptor. `writer` is the side that allocates in it. `handle` replaces the descriptor
    # of device memory that can only be shared in the older way; otherwise it is empty.
    Kind.REGION: Message(
        _RUNTIME,
        {"region": _ID, "size": _ID, "writer": Int(1, 2), "device": _DEVICE_IF_ANY, "handle": Raw(HANDLE_BYTES)},
    ),
    # Offers a work channel in memory, before the first region. Comes with four descriptors: the memory that the
    # runtime writes, the memory that the stub writes, the bell that the stub reads, and the bell that it rings.
    Kind.SLOTS: Message(_RUNTIME, {}),
    # Memory of a client, with its descriptor, for inputs or outputs.
    Kind.LENT_REGION: Message(_RUNTIME, {"region": _ID, "size": _ID}),
    # A request of the stub for a region of at least that size for its answers, on that device.
    Kind.GROW: Message(_STUB, {"size": _ID, "device": _DEVICE_IF_ANY}),
    # The event with which the peer waits for the sender's work on a device. The runtime sends its own first, then the
    # stub, each before it names the first block there. If one handle is empty, each side waits for its own work before
    # it sends.
    Kind.EVENT: Message(None, {"device": _DEVICE, "handle": Raw(HANDLE_BYTES)}),
    Kind.REFUSED: Message(_RUNTIME, {"reason": Text(SHORT)}),
    # Blocks that are no longer in use, if no EXECUTE or ANSWER is due that could carry them: blocks of
    # answers, from the runtime; blocks of requests that the model kept, from the stub.
    Kind.RELEASE: Message(None, {"places": ListOf(_PLACE, MAX_PLACES_IN_PACKET)}),
    # The writer of the region does not use it any more.
    Kind.RETIRE: Message(None, {"region": _ID}),
    Kind.LOG: Message(_STUB, {"level": Int(0, 3), "message": Text(LONG), "file": Text(SHORT), "line": Int(0, 2**31)}),
    # Responses of requests that are executing or were left open; those of one request are in order.
    Kind.RESPONSES: Message(_STUB, {"responses": ListOf(_RESPONSE, MAX_RESPONSES_IN_PACKET)}),
    # No caller waits any more for the responses to this request, which is executing or open.
    Kind.CANCEL: Message(_RUNTIME, {"batch": _ID, "index": Int(0, MAX_BATCH - 1)}),
    Kind.INDIRECT: Message(None, {"region": _ID, "offset": _ID, "size": _ID}),
    # Operations on metrics, in any order with the same effect; then the metrics and families that the model has
    # dropped.
    Kind.METRICS: Message(
        _STUB,
        {
            "changes": ListOf(
                Row(metric=_ID, operation=Int(0, 2), value=Real(), count=Int(1, MAX_OBSERVATIONS)), MAX_METRIC_CHANGES
            ),
            "dropped": ListOf(_ID, MAX_METRIC_CHANGES),
        },
    ),
    # Denials since the last message, by the kinds of `ipc.denials`: a count, and a text or "". A stub sends this
    # seldom.
    Kind.DENIALS: Message(
        _STUB,
        {
            "denials": ListOf(
                Row(what=Int(0, len(denials.KINDS) - 1), count=Int(1, denials.MAX_COUNT), text=Text(denials.MAX_BYTES)),
                denials.MAX_ROWS,
            )
        },
    ),
    # The levels of LOG that the stub sends from now on.
    Kind.LOGGING: Message(_RUNTIME, {"info": Flag(), "warning": Flag(), "error": Flag(), "verbose": Flag()}),
    # Asks the model whether it is ready. One question at a time; the reason is nil if it is.
    Kind.READY: Message(_RUNTIME, {"question": _ID}),
    Kind.READINESS: Message(_STUB, {"question": _ID, "reason": Maybe(Text(SHORT))}),
    # For a template: fork another stub. Comes with the descriptors of its work, control and
    # calls channels, of its output, and of the socket on which the fork reports that it has started.
    Kind.FORK: Message(_RUNTIME, {"name": Text(SHORT)}),
    # Asks for the exit code of a process that the template forked and that has ended.
    Kind.REAP: Message(_RUNTIME, {"pid": _ID}),
    Kind.EXITED: Message(_STUB, {"pid": _ID, "code": Int(-255, 255)}),
}

# The most calls that one stub may have open at a time.
MAX_CALLS = 4096

CALLS: dict[Kind, Message] = {
    # A request to another model. A version of -1 is the latest; a timeout of 0 microseconds is none.
    # `released`: blocks of earlier replies that the model has released. `blocks` are the stub's own, or any that
    # it has borrowed at this moment.
    Kind.INFER: Message(
        _STUB,
        {
            "call": _ID,
            "model": Text(LONG),
            "version": Int(-1),
            "decoupled": Flag(),
            "timeout_us": Int(0, 2**64 - 1),
            "released": _PLACES,
            "blocks": _BLOCKS,
            "inputs": ListOf(_NAMED_TENSOR, MAX_TENSORS),
            "outputs": ListOf(Text(LONG), MAX_TENSORS),
            "details": Maybe(
                Row(
                    request_id=Text(LONG),
                    correlation_id=OneOf(Int(0, 2**64 - 1), Text(SHORT)),
                    flags=Int(0, 2**32 - 1),
                    parameters=_PARAMETERS,
                    trace=Maybe(Text(SHORT)),
                    memory=_WANTED,
                    device=_DEVICE,
                )
            ),
        },
    ),
    # One response. `final`: it is the last. `released`: blocks of the stub that are no longer in use.
    # The stub borrows `blocks` until it releases them.
    Kind.REPLY: Message(
        _RUNTIME,
        {
            "call": _ID,
            "final": Flag(),
            "released": _PLACES,
            "blocks": _BLOCKS,
            "outputs": ListOf(_NAMED_TENSOR, MAX_TENSORS),
            "parameters": _PARAMETERS,
            "error": Maybe(_ERROR),
        },
    ),
    # Asks the other model to stop. If it goes on, the stub still wants its responses.
    Kind.CANCEL_CALL: Message(_STUB, {"call": _ID}),
    # The stub wants no more responses to this call. The last response comes all the same.
    Kind.WITHDRAW: Message(_STUB, {"call": _ID}),
    # Blocks of replies that the model has released, if no INFER is due that could carry them.
    Kind.LET_GO: Message(_STUB, {"places": ListOf(_PLACE, MAX_PLACES_IN_PACKET)}),
    # The runtime decides by the first fields if the model may be loaded, before it reads the rest.
    # An empty config stands for the one in the repository. `files`: the contents of the model's directory.
    Kind.LOAD_MODEL: Message(
        _STUB,
        {
            "call": _ID,
            "model": Text(SHORT),
            "config": Text(LARGEST_CONFIG),
            "files": Maybe(ListOf(Row(path=Text(LONG), contents=Raw(MAX_FILE_BYTES)), MAX_FILES)),
        },
    ),
    Kind.UNLOAD_MODEL: Message(_STUB, {"call": _ID, "model": Text(SHORT), "dependents": Flag()}),
    # An empty version stands for the latest.
    Kind.IS_MODEL_READY: Message(_STUB, {"call": _ID, "model": Text(SHORT), "version": Text(SHORT)}),
    # Makes a metric, or only its family if there are no labels; DONE has its number as `metric`.
    Kind.NEW_METRIC: Message(
        _STUB,
        {
            "call": _ID,
            "name": Text(LONG),
            "description": Text(LONG),
            "metric_kind": Int(0, 2),
            "labels": Maybe(ListOf(Row(name=Text(LONG), value=Text(LONG)), MAX_METRIC_PARTS)),
            "buckets": Maybe(ListOf(Real(), MAX_METRIC_PARTS)),
        },
    ),
    # Asks for a metric's value after all METRICS that were sent before; DONE has it as `value`.
    Kind.METRIC_VALUE: Message(_STUB, {"call": _ID, "metric": _ID}),
    # The answer to any call but INFER: an error, or values by name.
    Kind.DONE: Message(_RUNTIME, {"call": _ID, "error": Maybe(_ERROR), "values": Table(64)}),
    Kind.INDIRECT: Message(None, {"region": _ID, "offset": _ID, "size": _ID}),
}


Parameter = Union[bool, int, float, str]


class Details(NamedTuple):
    """Facts of a request beside its inputs, in the order of the wire (`_DETAILS`). Most requests use the defaults."""

    request_id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    priority: int = 0
    parameters: Mapping[str, Parameter] | None = None
    # The numbers of the outputs that are wanted; None for all.
    outputs: list[int] | None = None
    trace: str | None = None
    # The place for outputs: ANY_MEMORY, ORDINARY_MEMORY or DEVICE_MEMORY with the number of the device.
    memory: int = 0
    device: int = 0


NO_DETAILS = Details()


def size_of(text: str) -> int:
    """Return the size of a text in bytes of UTF-8. A character that is no Unicode counts as the `?` that replaces
    it.
    """
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def beginning(text: str, most_bytes: int) -> str:
    """Return the beginning of a text, at most `most_bytes`, with `?` for characters that are no Unicode."""
    # A character takes at least a byte, so the slice bounds the work of encoding.
    taken = text[:most_bytes].encode("utf-8", "replace")[:most_bytes]
    return taken.decode("utf-8", "ignore")


def end(text: str, most_bytes: int) -> str:
    """Return the end of a text, at most `most_bytes`, with `?` for characters that are no Unicode."""
    if most_bytes <= 0:
        return ""
    taken = text[-most_bytes:].encode("utf-8", "replace")[-most_bytes:]
    return taken.decode("utf-8", "ignore")
