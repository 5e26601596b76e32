"""Messages between the library inside tritonserver (the *shim*) and its launcher, on one SEQPACKET socket.

Theory of operation. There is one launcher for each backend of a server. It sends HELLO, the shim sends BACKEND. From
then on any message may follow any other from its one allowed sender. The shim numbers models, instances and its other
questions, and never uses a number again. Messages about one instance are in order. Every question gets one answer,
which may take time:

    MODEL     →  MODEL_READY or REFUSED
    INSTANCE  →  BORN, then STARTED; or REFUSED, perhaps after BORN
    LOST      →  DIED; then, in its time, BORN and STARTED, or DIED, perhaps after BORN
    RENEW     →  BORN and STARTED; or DIED, as after LOST
    END, END_MODEL  →  ENDED
    MEMORY    →  SET_ASIDE or REFUSED
    SCRUB     →  SCRUBBED

A *generation* is one process of an instance, counted from 1. A start that fails uses one up, too. With BORN the shim
takes the place of the stub's runtime on the control and calls channels, because a model logs, makes metrics and asks
for other models while it initializes. With STARTED, when the model is initialized, it does so on the work channel, in
the state after LOADED, until it sends RENEW or END; then the launcher lets the model finalize. From STARTED on the shim
allocates in the request region. If one of the channels or the process ends after STARTED, or if the stub breaks the
protocol at any time after BORN, the shim sends LOST, once for each generation. The launcher then ends the process and
finds out why it died. It ignores messages about a generation that is over.

A message that is longer than a packet lies in a file. The packet is LONG, and the file's descriptor comes with it,
before those of the message. The receiver owns the descriptors.

The launcher ends at the end of file, and so do its stubs.
"""

from __future__ import annotations

from enum import IntEnum

from moonpool.ipc.codec import Codec
from moonpool.ipc.errors import CODES, MoonpoolError
from moonpool.ipc.messages import Flag, Int, ListOf, Maybe, Message, Text

# It grows by one with every change of the messages. Both ends must come from one moonpool.
LAUNCHER_VERSION = 6


class End(IntEnum):
    """The sender of a message."""

    SHIM = 1
    LAUNCHER = 2


class Word(IntEnum):
    """The kind of a message."""

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


# The most bytes of a message in a file.
MAX_MESSAGE_BYTES = 1 << 26
# The first number of a region that the shim makes. The launcher may give a starting stub regions with smaller numbers.
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
    Word.BACKEND: Message(_SHIM, {"name": _NAME, "directory": _NAME, "config": _CONFIG, "server": _NAME}),
    # The wanted levels of the log from now on, as in LOGGING of the control channel. The shim itself sends them to
    # stubs that run.
    Word.LOGGING: Message(_SHIM, {"info": Flag(), "warning": Flag(), "error": Flag(), "verbose": Flag()}),
    # Load a version of a model. `directory` is the model's own, with its versions in it; `config` is the JSON text of
    # TRITONBACKEND_ModelConfig; `completes`: the model shall complete it.
    Word.MODEL: Message(
        _SHIM,
        {"model": _ID, "name": _NAME, "version": Int(1), "directory": _NAME, "config": _CONFIG, "completes": Flag()},
    ),
    # `config`: the argument for TRITONBACKEND_ModelSetConfig; nil if nothing has changed.
    # `inputs` and `outputs`: names in the order of their numbers on the work channel, a sequence's controls
    # last. `reschedules`: its requests may be answered with RESCHEDULED. A limit of nil is no limit.
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
            # True if its errors have to be scrubbed, and if other stubs must not get its memory.
            "is_private": Flag(),
            # The most lines that each instance may log in a second; the rest is counted and left out.
            "log_lines_per_s": _ID,
            # Renew an instance after this many requests.
            "recycle_requests": Maybe(Int(1)),
            # The models that it may ask for, load and unload: patterns, in which * stands for any characters; nil: all.
            "may_ask": Maybe(ListOf(_NAME, _MAX_PATTERNS)),
            # True if a request may have no response, or several.
            "is_decoupled": Flag(),
        },
    ),
    # The question of this number failed. Nothing is left of a model, or of an instance whose first start failed.
    Word.REFUSED: Message(_LAUNCHER, {"number": _ID, "code": _CODE, "message": _TEXT}),
    # `kind` is CPU, GPU, MODEL or AUTO, `device` the GPU's number or 0.
    Word.INSTANCE: Message(
        _SHIM, {"instance": _ID, "model": _ID, "name": _NAME, "kind": Text(16), "device": Int(0, 65_535)}
    ),
    # Comes with five descriptors: the control and calls channels, a pidfd, and the files of the first request region
    # and the first response region. The stub knows both already; regions that the shim makes have numbers from
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
    # Comes with one descriptor, the work channel. `has_is_ready`: the stub answers READY. `sandbox`: a text for people
    # about the confinement of the process.
    Word.STARTED: Message(_LAUNCHER, {"instance": _ID, "generation": Int(1), "has_is_ready": Flag(), "sandbox": _TEXT}),
    # Allocate another region for this process, of at least `needed` bytes. `present` bytes are in use in regions of the
    # same writer, a `Side` of `ipc.messages`.
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
    # A region from MEMORY is empty now. If a contained process may have kept it, it still counts, and the next MEMORY
    # may get it again.
    Word.RETURNED: Message(_SHIM, {"instance": _ID, "generation": Int(1), "writer": Int(1, 2), "region": _ID}),
    # Comes with one descriptor, of a sealed memfd of this size with all its pages.
    Word.SET_ASIDE: Message(_LAUNCHER, {"question": _ID, "size": Int(1)}),
    # Scrub the error text of a private model: SCRUBBED has the text for clients, and the launcher logs the rest.
    Word.SCRUB: Message(_SHIM, {"question": _ID, "model": _ID, "text": _TEXT}),
    Word.SCRUBBED: Message(_LAUNCHER, {"question": _ID, "text": _TEXT}),
    # `is_executing`: it had requests. `why`: how it broke the protocol, "" if it just ended. `is_shortage`: the server
    # has no descriptor, memory or thread for it; `why` says which, and the model is not to blame.
    Word.LOST: Message(
        _SHIM, {"instance": _ID, "generation": Int(1), "is_executing": Flag(), "is_shortage": Flag(), "why": _TEXT}
    ),
    # A batch takes longer than `execute_timeout_ms`: end the process. LOST still follows when it has ended.
    Word.OVERDUE: Message(_SHIM, {"instance": _ID, "generation": Int(1)}),
    # The process has more memory than it may keep: renew the instance.
    Word.GROWN: Message(_LAUNCHER, {"instance": _ID, "generation": Int(1)}),
    # The process has executed enough requests, `served`, and has none now. LOST does not follow.
    Word.RENEW: Message(_SHIM, {"instance": _ID, "generation": Int(1), "served": _ID}),
    # The process has ended, or could not be started again. Its requests fail with this error. It is started again after
    # `restarts_in_ms`. Nil: it was given up and starts again after a rest, and later requests get the same error until
    # the next message about it.
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
    # End the instance.
    Word.END: Message(_SHIM, {"instance": _ID}),
    # Unload the model. Its instances have ended.
    Word.END_MODEL: Message(_SHIM, {"model": _ID}),
    # The instance's process has ended, or the model is unloaded.
    Word.ENDED: Message(_LAUNCHER, {"number": _ID}),
    # The launcher can start stubs. `version` is LAUNCHER_VERSION, `protocol` PROTOCOL_VERSION.
    Word.HELLO: Message(_LAUNCHER, {"version": _ID, "protocol": _ID, "moonpool": Text(64), "pid": Int(1)}),
    # A line for the server's log, with a level as in LOG of the control channel.
    Word.NOTE: Message(_LAUNCHER, {"level": Int(0, 3), "message": _TEXT, "file": _NAME, "line": Int(0, 2**31)}),
}


def code_of(error: BaseException) -> int:
    """Return the TRITONSERVER_Error_Code of an error; INTERNAL for errors that are not moonpool's."""
    return CODES.index(error.code if isinstance(error, MoonpoolError) else MoonpoolError.code)


def codec(us: End) -> Codec:
    """Return the codec of the messages that `us` receives."""
    return Codec(LAUNCHER, us)
