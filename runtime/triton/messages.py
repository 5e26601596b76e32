"""What the library inside tritonserver (the *shim*) and its launcher tell each other, on one SEQPACKET socket.

Theory of operation. There is one launcher for each backend of a server. It says HELLO, the shim BACKEND; from then on
any message may come after any other from its one allowed sender. The shim numbers models, instances and what else it asks, and
never uses a number again; all that concerns one instance is in order. Every question has one answer, in its own time:

    MODEL     →  MODEL_READY or REFUSED
    INSTANCE  →  BORN, then STARTED; or REFUSED, perhaps after BORN
    LOST      →  DIED; then, in its time, BORN and STARTED, or DIED, perhaps after BORN
    RENEW     →  BORN and STARTED; or DIED, as after LOST
    END, END_MODEL  →  ENDED
    MEMORY    →  SET_ASIDE or REFUSED
    SCRUB     →  SCRUBBED

A *generation* is one process of an instance, counted from 1; also a start that fails uses one up. With BORN the shim becomes the
runtime of that stub on the control and calls channels: a model logs, makes metrics and asks for other models
while it initializes. With STARTED, when the model is initialized, it becomes so on the work channel, in the state after
LOADED, until it says RENEW or END: to finalize the model is for the launcher. From STARTED on it allocates in the request
region. When one of the channels or the process ends after
STARTED, or the stub breaks the protocol at any time after BORN, the shim says LOST, once for each generation; the launcher
ends what is left of the process and finds out why. What the shim says of a generation that is over already is
passed by.

A message that is longer than a packet lies in a file: the packet is LONG, and the file's descriptor is the first that
comes with it, before those of the message. Whoever gets a descriptor owns it.

The launcher ends at the end of file, and so do its stubs.
"""

from __future__ import annotations

from enum import IntEnum

from moonpool.ipc.codec import Codec
from moonpool.ipc.fields import Flag, Int, ListOf, Maybe, Text
from moonpool.ipc.messages import Message

# Raised by one with every change of what follows: both ends must come from one moonpool.
LAUNCHER_VERSION = 5


class End(IntEnum):
    """Who sends."""

    SHIM = 1
    LAUNCHER = 2


class Word(IntEnum):
    """What a message is for."""

    # From either.
    LONG = 60
    # From the shim.
    BACKEND = 61
    LOGGING = 62
    MODEL = 63
    INSTANCE = 64
    LOST = 65
    OVERDUE = 66
    END = 67
    END_MODEL = 68
    RENEW = 69
    MEMORY = 70
    SCRUB = 71
    RETURNED = 72
    # From the launcher.
    HELLO = 80
    MODEL_READY = 81
    REFUSED = 82
    STARTED = 83
    DIED = 85
    ENDED = 86
    NOTE = 88
    BORN = 89
    GROWN = 90
    SET_ASIDE = 91
    SCRUBBED = 92


# Of a message that lies in a file.
MAX_MESSAGE_BYTES = 1 << 26
# The launcher may send the stub more memory while it starts, with smaller numbers.
FIRST_REGION = 1 << 32
_MAX_TENSORS = 65_536
_MAX_PATTERNS = 4096
_ID = Int()
_NAME = Text(4096)
_TEXT = Text(1 << 20)
_CONFIG = Text(1 << 24)
# As in `_ERROR` of `ipc.messages`: the number of TRITONSERVER_Error_Code.
_CODE = Int(0, 7)
_MILLISECONDS = Int()
_SHIM, _LAUNCHER = End.SHIM, End.LAUNCHER

LAUNCHER: dict[IntEnum, Message] = {
    # A message of so many bytes lies in the file that comes first with this packet, from its beginning.
    Word.LONG: Message(None, {"size": Int(1, MAX_MESSAGE_BYTES)}),
    # The name that the server has for the backend and the directory that it has found it in, as
    # TRITONBACKEND_BackendArtifacts says; `config`: the JSON text of TRITONBACKEND_BackendConfig.
    Word.BACKEND: Message(
        _SHIM, {"name": _NAME, "directory": _NAME, "config": _CONFIG, "server": _NAME}
    ),
    # Which levels of the log are wanted from now on, as in LOGGING of the control channel. Stubs that run
    # are for the shim to tell.
    Word.LOGGING: Message(
        _SHIM, {"info": Flag(), "warning": Flag(), "error": Flag(), "verbose": Flag()}
    ),
    # A version of a model. `directory` is the model's own, with its versions in it; `config` is the JSON text of
    # TRITONBACKEND_ModelConfig; `completes`: whether the model is to be asked to complete it.
    Word.MODEL: Message(
        _SHIM,
        {
            "model": _ID,
            "name": _NAME,
            "version": Int(1),
            "directory": _NAME,
            "config": _CONFIG,
            "completes": Flag(),
        },
    ),
    # `config`: what is to be given to TRITONBACKEND_ModelSetConfig; nil where nothing has changed.
    # `inputs` and `outputs`: names in the order of their numbers on the work channel; those of a sequence's controls come
    # last. `reschedules`: its requests may be answered with RESCHEDULED. Of the limits nil is none.
    Word.MODEL_READY: Message(
        _LAUNCHER,
        {
            "model": _ID,
            "config": Maybe(_CONFIG),
            "reschedules": Flag(),
            "max_batch_size": Int(0, 2**31 - 1),
            "inputs": ListOf(_NAME, _MAX_TENSORS),
            "outputs": ListOf(_NAME, _MAX_TENSORS),
            "execute_timeout_ms": Maybe(_MILLISECONDS),
            # Whether what its model says of errors is to be scrubbed, and its memory is not for other stubs.
            "is_private": Flag(),
            # Of what its instances log, in each of them; the rest is counted and left out.
            "log_lines_per_s": _ID,
            # After so many requests an instance is to be renewed.
            "recycle_requests": Maybe(Int(1)),
            # Which other models it may ask for, load and unload: patterns as of fnmatch(3); nil: all.
            "may_ask": Maybe(ListOf(_NAME, _MAX_PATTERNS)),
        },
    ),
    # What was asked for under this number is not to be had. Of a model, or an instance whose first start failed, nothing
    # is left.
    Word.REFUSED: Message(_LAUNCHER, {"number": _ID, "code": _CODE, "message": _TEXT}),
    # `kind` is CPU, GPU, MODEL or AUTO, `device` the GPU's number or 0.
    Word.INSTANCE: Message(
        _SHIM,
        {"instance": _ID, "model": _ID, "name": _NAME, "kind": Text(16), "device": Int(0, 65_535)},
    ),
    # Comes with five descriptors: the control and calls channels, a pidfd, and the files of the first request region and the
    # first response region. The stub knows both already; regions that the shim makes have numbers from
    # FIRST_REGION on.
    Word.BORN: Message(
        _LAUNCHER,
        {
            "instance": _ID,
            "generation": Int(1),
            "pid": Int(1),
            "request_region": _ID,
            "request_size": _ID,
            "response_region": _ID,
            "response_size": _ID,
        },
    ),
    # Comes with one descriptor, the work channel. `has_is_ready`: whether READY is to be asked. `sandbox`: how the
    # process is confined, for people.
    Word.STARTED: Message(
        _LAUNCHER,
        {"instance": _ID, "generation": Int(1), "has_is_ready": Flag(), "sandbox": _TEXT},
    ),
    # Another region for this process, of at least `needed` bytes. `present` bytes are in use in regions with the same
    # writer, a `Side` of `ipc.messages`.
    Word.MEMORY: Message(
        _SHIM,
        {
            "question": _ID,
            "instance": _ID,
            "generation": Int(1),
            "writer": Int(1, 2),
            "region": _ID,
            "present": _ID,
            "needed": _ID,
        },
    ),
    # Nothing lies in a region any more that MEMORY asked for. A contained process may have kept it: then it goes on
    # counting, and the next MEMORY may get it again.
    Word.RETURNED: Message(
        _SHIM, {"instance": _ID, "generation": Int(1), "writer": Int(1, 2), "region": _ID}
    ),
    # Comes with one descriptor, of a sealed memfd of this size with all its pages.
    Word.SET_ASIDE: Message(_LAUNCHER, {"question": _ID, "size": Int(1)}),
    # What a model that is private says of an error: it comes back as it may be told, and what that leaves out is logged.
    Word.SCRUB: Message(_SHIM, {"question": _ID, "model": _ID, "text": _TEXT}),
    Word.SCRUBBED: Message(_LAUNCHER, {"question": _ID, "text": _TEXT}),
    # `is_executing`: it had requests. `why`: how it broke the protocol, "" where it just ended. `is_shortage`: the server
    # has no descriptor, memory or thread for it, as `why` says, which is no fault of the model's.
    Word.LOST: Message(
        _SHIM,
        {
            "instance": _ID,
            "generation": Int(1),
            "is_executing": Flag(),
            "is_shortage": Flag(),
            "why": _TEXT,
        },
    ),
    # It takes longer than `execute_timeout_ms` for a batch: end it. LOST is still to be said when it ends.
    Word.OVERDUE: Message(_SHIM, {"instance": _ID, "generation": Int(1)}),
    # Its process has more memory than it may keep: the instance is to be renewed.
    Word.GROWN: Message(_LAUNCHER, {"instance": _ID, "generation": Int(1)}),
    # It has executed so many requests, which is enough, and has none now. LOST is not said of it.
    Word.RENEW: Message(_SHIM, {"instance": _ID, "generation": Int(1), "served": _ID}),
    # Why the process ended, or could not be started again: the error of the requests that it had. It is started again
    # after so many milliseconds; nil: it was given up and is started again after a rest, and until the next message about
    # it `message` is that of later requests, too.
    Word.DIED: Message(
        _LAUNCHER,
        {
            "instance": _ID,
            "generation": Int(1),
            "code": _CODE,
            "message": _TEXT,
            "restarts_in_ms": Maybe(_MILLISECONDS),
        },
    ),
    # Nobody needs the instance any more.
    Word.END: Message(_SHIM, {"instance": _ID}),
    # Its instances have ended.
    Word.END_MODEL: Message(_SHIM, {"model": _ID}),
    # The instance's process is gone, or nothing is left of the model.
    Word.ENDED: Message(_LAUNCHER, {"number": _ID}),
    # The launcher can start stubs. `version` is LAUNCHER_VERSION, `protocol` PROTOCOL_VERSION.
    Word.HELLO: Message(
        _LAUNCHER, {"version": _ID, "protocol": _ID, "moonpool": Text(64), "pid": Int(1)}
    ),
    # For the server's log: level as in LOG of the control channel.
    Word.NOTE: Message(
        _LAUNCHER, {"level": Int(0, 3), "message": _TEXT, "file": _NAME, "line": Int(0, 2**31)}
    ),
}


def codec(us: End) -> Codec:
    """The messages as `us` receives them."""
    return Codec(LAUNCHER, us)
