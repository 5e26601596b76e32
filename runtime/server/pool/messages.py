"""The messages between the main process and a front end. They travel on the directory, one SEQPACKET socket for each front end.

Any message may follow any other one from its one allowed sender. The main process numbers models and stubs.
"""

from __future__ import annotations

from enum import IntEnum

from moonpool.ipc.codec import Codec
from moonpool.ipc.messages import Flag, Int, ListOf, Message, Row, Text
from moonpool.runtime.observe.metrics_options import MOST_BUCKETS


class End(IntEnum):
    """The sender of a message."""

    MAIN = 1
    FRONT = 2


class Word(IntEnum):
    """The kind of a message."""

    # From the main process.
    SETTINGS = 1
    MODEL = 2
    SERVE = 3
    STUB = 4
    STUB_GONE = 5
    REFUSE = 6
    DRAIN = 7
    MODEL_GONE = 8
    COUNT = 9
    STOP = 10
    PASS_ON = 11
    LEAVE = 12
    WELCOME = 13
    PING = 14
    SET_ASIDE = 15
    # From a front end.
    LISTENING = 20
    DRAINED = 21
    COUNTS = 22
    COUNTED = 23
    LOST = 24
    OVERDUE = 25
    FAILED = 26
    TRAFFIC = 27
    LEFT = 28
    SERVED = 29
    PONG = 30
    MEMORY = 31
    RETURNED = 32


MAX_VERSIONS = 4096
MAX_TEXT = 8192
# The batch sizes in one message. The others follow in the next ones.
MAX_BATCH_SIZES = 256
_ID = Int()
_TEXT = Text(MAX_TEXT)
_MAIN, _FRONT = End.MAIN, End.FRONT

DIRECTORY: dict[IntEnum, Message] = {
    # Comes with a file of JSON: the front end's options, and the sockets at which the main process listens.
    Word.SETTINGS: Message(_MAIN, {}),
    # Comes with a file of JSON: the configuration. `sandbox` is the level of the model in this server, `kind` that of its source.
    Word.MODEL: Message(
        _MAIN, {"model": _ID, "version": _ID, "sandbox": Text(64), "kind": Text(16)}
    ),
    # Requests for a name go to these models, the latest version last. Without models they go to the main process.
    Word.SERVE: Message(_MAIN, {"name": Text(1024), "models": ListOf(_ID, MAX_VERSIONS)}),
    # Comes with the descriptors of a work channel and a control channel.
    Word.STUB: Message(_MAIN, {"model": _ID, "stub": _ID, "name": Text(1024)}),
    # `error` is the class of the reason, for the requests that the stub had. `public_message` is the part of
    # the reason that clients may read, "" for all of it.
    Word.STUB_GONE: Message(
        _MAIN, {"stub": _ID, "error": Text(64), "reason": _TEXT, "public_message": _TEXT}
    ),
    # Send the stub nothing more, wait for the batches that it has, and answer with LEFT.
    Word.LEAVE: Message(_MAIN, {"stub": _ID}),
    # Refuse requests, as the model has no stub. WELCOME follows when it has one again.
    Word.REFUSE: Message(_MAIN, {"model": _ID, "reason": _TEXT}),
    Word.WELCOME: Message(_MAIN, {"model": _ID}),
    # Refuse new requests, finish the others, and answer with DRAINED.
    Word.DRAIN: Message(_MAIN, {"model": _ID, "reason": _TEXT, "timeout_ms": _ID}),
    Word.MODEL_GONE: Message(_MAIN, {"model": _ID}),
    # Answer with COUNTS of the models that have new counts, and then with COUNTED.
    Word.COUNT: Message(_MAIN, {"question": _ID}),
    # Take no more connections, finish the requests in flight, and end.
    Word.STOP: Message(_MAIN, {"timeout_ms": _ID}),
    # The answer to MEMORY. Comes with the descriptor of a region of that size, which is sealed and has all its pages; or with
    # the reason for giving none.
    Word.SET_ASIDE: Message(_MAIN, {"question": _ID, "size": _ID, "why": _TEXT}),
    # Asks for another region of at least `needed` bytes for a stub, or, if `stub` is 0, for callers that write in place for
    # the model. `present` bytes are in use in regions with that writer, a `Side` of `ipc.messages`.
    Word.MEMORY: Message(
        _FRONT,
        {
            "question": _ID,
            "model": _ID,
            "stub": _ID,
            "writer": Int(1, 2),
            "region": _ID,
            "present": _ID,
            "needed": _ID,
        },
    ),
    # Gives back a region in which nothing lies any more.
    Word.RETURNED: Message(_FRONT, {"model": _ID, "stub": _ID, "writer": Int(1, 2), "region": _ID}),
    # Answer with PONG after every thread that serves has had its turn.
    Word.PING: Message(_MAIN, {}),
    # Pass every request on to the main process, or answer again.
    Word.PASS_ON: Message(_MAIN, {"everything": Flag()}),
    Word.PONG: Message(_FRONT, {}),
    # Clients can connect now.
    Word.LISTENING: Message(_FRONT, {}),
    Word.DRAINED: Message(_FRONT, {"model": _ID}),
    # The counts since the last message, in the form of `counts.take_counts`. Also sent without COUNT, soon after a request.
    Word.COUNTS: Message(
        _FRONT,
        {
            "model": _ID,
            # As many as there may be bounds of durations, and those of `Statistics`.
            "figures": ListOf(_ID, MOST_BUCKETS + 64),
            "batches": ListOf(
                Row(rows=_ID, count=_ID, input_ns=_ID, infer_ns=_ID, output_ns=_ID), MAX_BATCH_SIZES
            ),
        },
    ),
    # Connections, answers and requests for inference since the last message. No protocol has more statuses than the
    # limit here.
    Word.TRAFFIC: Message(
        _FRONT,
        {
            "protocol": Text(16),
            "opened": _ID,
            "closed": _ID,
            "answers": ListOf(Row(status=Text(64), count=_ID), 256),
            "failures": _ID,
            "success_ns": _ID,
            "by_duration": ListOf(_ID, 64),
        },
    ),
    Word.COUNTED: Message(_FRONT, {"question": _ID}),
    # Sent with COUNTS: requests that ended with an error.
    Word.FAILED: Message(
        _FRONT,
        {
            "model": _ID,
            "error": _TEXT,
            "instance": Text(1024),
            "request": Text(MAX_TEXT),
            "requests": _ID,
        },
    ),
    # A stub has closed its channels to this front end, or broken the protocol there.
    Word.LOST: Message(_FRONT, {"stub": _ID, "why": _TEXT}),
    Word.LEFT: Message(_FRONT, {"stub": _ID}),
    # The number of requests that a stub has executed since the last message, for models that are recycled by number.
    Word.SERVED: Message(_FRONT, {"stub": _ID, "requests": _ID}),
    # A batch has taken longer than the model's limit.
    Word.OVERDUE: Message(_FRONT, {"stub": _ID}),
}


def codec(us: End) -> Codec:
    """Return the codec of one end, which reads what the other end sends."""
    return Codec(DIRECTORY, us)
