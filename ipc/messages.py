"""Every message between runtime and stub: its fields, who may send it, on which channel, what may follow.

Theory of operation. Three channels join a runtime and a stub. The *work* channel is lockstep: after a message from
one side only the other side may speak, and `followers` says with what. The *control* channel is asynchronous:
there any message may come after any other, from its one allowed sender. On the *calls* channel the stub asks,
under numbers that it chooses, and the runtime answers each number in its own time. A message is a msgpack array
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

from typing import TYPE_CHECKING

from moonpool.ipc.fields import (
    Flag,
    Int,
    ListOf,
    Maybe,
    OneOf,
    Packed,
    Raw,
    Real,
    Row,
    Table,
    Text,
)
from moonpool.ipc.kinds import Kind as Kind
from moonpool.ipc.kinds import Side as Side

if TYPE_CHECKING:
    from typing import Any

    from moonpool.ipc.fields import Spec

PROTOCOL_VERSION = 4
# The stage of FAILED whose message is the number of an error of exec: the model's interpreter was not started.
EXEC_FAILED = "exec"

MAX_DIMS = 32
# Devices that a region may lie on, and what stands for ordinary memory.
MAX_DEVICES = 4096
NO_DEVICE = -1
# Bytes of a handle of the older kind, of device memory and of events alike.
HANDLE_BYTES = 64


class Message:
    """A row of the table."""

    __slots__ = ("fields", "followers", "sender")

    def __init__(
        self, sender: Any, fields: dict[str, Spec], followers: tuple[Kind, ...] = ()
    ) -> None:
        # A member of the table's own enumeration of sides; None: either.
        self.sender = sender
        self.fields = fields
        self.followers = frozenset(followers)


MAX_BATCH = 65536
# Blocks that go back with one message; what is left over goes with the next. A packet of the control
# channel has room for the smaller number; messages of the work channel may lie in memory.
MAX_PLACES = 1 << 20
MAX_PLACES_IN_PACKET = 1024
# Changes of metrics in a packet, and as many metrics that nobody refers to any more.
MAX_METRIC_CHANGES = 256
# What a message has room for of one metric: labels, buckets, characters. The runtime takes fewer.
MAX_METRIC_PARTS = 65_536
# Bytes of a text: what a model or a client may choose, and what has a reason to be short.
LONG = 1 << 20
SHORT = 4096
MAX_PARAMETERS = 4096
# Of a request: inputs, and as many outputs.
MAX_TENSORS = 65536
# Of a model that a model loads.
MAX_FILES = 65536
MAX_FILE_BYTES = 1 << 31
# Of a configuration that comes from a model: JSON takes twenty times its size once it is read.
LARGEST_CONFIG = 1 << 22
# The most bytes of a stub's message that lies in memory, without its tensors: of any message, and of one on the calls channel.
# Only LOAD_MODEL may be larger.
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
# Where outputs are wanted: wherever the model leaves them, in ordinary memory, on the device that is named beside it.
ANY_MEMORY, ORDINARY_MEMORY, DEVICE_MEMORY = 0, 1, 2
_WANTED = Int(0, 2)
_DEVICE = Int(0, MAX_DEVICES - 1)
_DEVICE_IF_ANY = Int(NO_DEVICE, MAX_DEVICES - 1)

# What most requests leave at its default travels only where something of it was set.
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
_ERROR = Row(code=Int(0, 7), message=Text(LONG))
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
    # What the stub has put on itself, before it knows who it is to be: names of layers, and a sentence for each
    # one that was left out.
    Kind.CONFINED: Message(
        _STUB,
        {"version": Int(), "layers": ListOf(Text(256), 64), "left_out": ListOf(Text(SHORT), 64)},
        (Kind.START,),
    ),
    # Who the stub is to be: see `moonpool.stub.handshake` for what the JSON text holds.
    Kind.START: Message(
        _RUNTIME,
        {"start": Text(1 << 28)},
        (Kind.COMPLETED, Kind.LOADED, Kind.FAILED),
    ),
    # The configuration after auto_complete_config, as JSON. This stub has done its work.
    Kind.COMPLETED: Message(_STUB, {"config": Text(LARGEST_CONFIG)}, (Kind.FINALIZE,)),
    Kind.LOADED: Message(_STUB, {"facts": Table(64)}, (Kind.EXECUTE, Kind.FINALIZE)),
    # Stage, the error as the client gets it, and the traceback for the log.
    Kind.FAILED: Message(
        _STUB,
        {"stage": Text(64), "message": Text(LONG), "traceback": Text(LONG)},
        (Kind.FINALIZE,),
    ),
    # `released`: blocks of earlier answers that nobody needs any more. `details`: of each request, where
    # there are some. `targets`: where outputs go that are to be written to the memory of clients.
    Kind.EXECUTE: Message(
        _RUNTIME,
        {
            "batch": _ID,
            "released": _PLACES,
            "blocks": _BLOCKS,
            "layout": LAYOUT,
            "details": Maybe(ListOf(Maybe(_DETAILS), MAX_BATCH)),
            "targets": Maybe(ListOf(_TARGET, MAX_BATCH)),
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
    Kind.FINALIZED: Message(_STUB, {"message": Text(LONG), "traceback": Text(LONG)}),
    Kind.INDIRECT: Message(None, {"region": _ID, "offset": _ID, "size": _ID}),
}

CONTROL: dict[Kind, Message] = {
    # The first message: what to give up before anything foreign is imported.
    # See `moonpool.ipc.policy` for what the JSON text holds.
    Kind.SANDBOX: Message(_RUNTIME, {"policy": Text(1 << 16)}),
    # Comes with the region's descriptor. `writer` says who allocates in it. `handle` stands for the descriptor
    # of device memory that can only be shared in the older way; else it is empty.
    Kind.REGION: Message(
        _RUNTIME,
        {
            "region": _ID,
            "size": _ID,
            "writer": Int(1, 2),
            "device": _DEVICE_IF_ANY,
            "handle": Raw(HANDLE_BYTES),
        },
    ),
    # Memory of a client, with its descriptor: inputs lie in it, or outputs go there.
    Kind.LENT_REGION: Message(_RUNTIME, {"region": _ID, "size": _ID}),
    # The stub needs a region of at least that size for its answers, on that device.
    Kind.GROW: Message(_STUB, {"size": _ID, "device": _DEVICE_IF_ANY}),
    # The event by which the peer waits for the sender's work on a device; first the runtime's, then the stub's, each
    # before the sender names the first block there. An empty handle of either: each waits for its own
    # work before it sends.
    Kind.EVENT: Message(None, {"device": _DEVICE, "handle": Raw(HANDLE_BYTES)}),
    Kind.REFUSED: Message(_RUNTIME, {"reason": Text(SHORT)}),
    # Blocks that nobody needs any more, when no EXECUTE or ANSWER comes by for them to ride on: of
    # answers, from the runtime; of requests that the stub kept, from the stub.
    Kind.RELEASE: Message(None, {"places": ListOf(_PLACE, MAX_PLACES_IN_PACKET)}),
    # The writer of the region does not use it any more.
    Kind.RETIRE: Message(None, {"region": _ID}),
    Kind.LOG: Message(
        _STUB,
        {"level": Int(0, 3), "message": Text(LONG), "file": Text(SHORT), "line": Int(0, 2**31)},
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
    Kind.READINESS: Message(_STUB, {"question": _ID, "reason": Maybe(Text(SHORT))}),
    # Another process of the runtime sends batches from now on. Comes with the descriptors of its work channel
    # and its control channel, on which it speaks as the runtime after LOADED.
    Kind.PEER: Message(_RUNTIME, {}),
    # The stub has come to this batch, after those of other peers. Only where the time that it takes is limited.
    Kind.BEGUN: Message(_STUB, {"batch": _ID}),
    # For a template alone: be another stub in a new process. Comes with the descriptors of its work, control and
    # calls channels, of its output, and of the socket on which it says that it is there.
    Kind.FORK: Message(_RUNTIME, {"name": Text(SHORT)}),
    # A process that it forked has ended: how?
    Kind.REAP: Message(_RUNTIME, {"pid": _ID}),
    Kind.EXITED: Message(_STUB, {"pid": _ID, "code": Int(-255, 255)}),
}

# Calls that one stub may have open at a time.
MAX_CALLS = 4096

CALLS: dict[Kind, Message] = {
    # A request to another model. A version of -1 is the latest; a timeout of 0 microseconds is none.
    # `released`: blocks of earlier replies that the model let go of. `blocks` are the stub's own, or any that
    # are lent to it at this moment.
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
    # One response. `final`: it is the last. `released`: blocks of the stub's that nobody needs any more.
    # `blocks` are lent to the stub until it lets go of them.
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
    # The other model may stop. If it goes on, its responses are still wanted, up to its own end.
    Kind.CANCEL_CALL: Message(_STUB, {"call": _ID}),
    # The responses to this call are not wanted any more; the last of them comes all the same.
    Kind.WITHDRAW: Message(_STUB, {"call": _ID}),
    # Blocks of replies that the model let go of, when no INFER comes by for them to ride on.
    Kind.LET_GO: Message(_STUB, {"places": ListOf(_PLACE, MAX_PLACES_IN_PACKET)}),
    # The runtime decides by the first fields whether the model may be loaded, before it reads the rest.
    # An empty config is the one of the repository. `files`: what the model's directory is to hold.
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
    # An empty version is the latest.
    Kind.IS_MODEL_READY: Message(
        _STUB, {"call": _ID, "model": Text(SHORT), "version": Text(SHORT)}
    ),
    # A metric, or the family alone where there are no labels; DONE has its number as `metric`.
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
    # With all that METRICS said before; DONE has it as `value`.
    Kind.METRIC_VALUE: Message(_STUB, {"call": _ID, "metric": _ID}),
    # The answer to anything but INFER: an error, or what was asked for by its name.
    Kind.DONE: Message(_RUNTIME, {"call": _ID, "error": Maybe(_ERROR), "values": Table(64)}),
    Kind.INDIRECT: Message(None, {"region": _ID, "offset": _ID, "size": _ID}),
}
