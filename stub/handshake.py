"""Turns a bare process into a stub, in a fixed order, before it imports anything foreign.

    runtime                         stub
    SANDBOX                  ──▶    read, put the sandbox on
    SLOTS, REGION, REGION    ──▶    (made meanwhile)
                             ◀──    CONFINED, or FAILED
    check that from outside
    START                    ──▶    read; only then import numpy and the model
                             ◀──    LOADED, COMPLETED or FAILED

Theory of operation. Everything here runs on the main thread, and no other thread exists yet. The sandbox comes before
every foreign import, numpy included, because the environment may belong to the author of the model. A layer must also
be on before the first thread: some layers apply to one thread and are inherited by those that it starts. The runtime
sends START, in which the configuration lies, only after it has checked from outside that the sandbox is on. Regions
arrive before numpy is there to map them, so `Announced` keeps their descriptors, and reads an oversized START with
`pread`. If the runtime ends, a receive raises `PeerGone`, and the process ends with that.

After COMPLETED, another START may come, with the mode `serve`: the process becomes an instance.

START holds a JSON object: `mode` (`serve`; `complete` for auto_complete_config in its own process; `template` for a
process that forks others, with `initializes`: whether it calls `initialize` first; or `source` for one that forks runs
of source, with `imports`: the modules that it imports before), `instance`, `device` (of the
instance, or NO_DEVICE), `args` (for `initialize`), `kind` (`triton` or `native`), `file`, `class_name`, `version_dir`,
`model_dir`, `inputs` and `outputs` (names in the order of the configuration, by which the wire numbers tensors),
`keep_ms` (for how long an idle stub keeps the first region by which it grew, and the others), `compiled` (whether
compiled code may serve), `look_us` (for how long such code looks for the next packet before it blocks), `layers` (of
the sandbox that are on), `copies_gpu_to_numpy`, `brief_errors` (whether an exception of the model is logged in one
line), `chat_template` (its text and that of a `tokenizer_config.json`, or null), `config` and `log` (the levels of LOG
that the runtime wants).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any, Callable, NoReturn

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import control_codec
from moonpool.ipc.conversation import Conversation, Overflow
from moonpool.ipc.errors import LocalProtocolError, PeerGone, RemoteProtocolError
from moonpool.ipc.messages import PROTOCOL_VERSION, Kind, Side, end
from moonpool.ipc.policy import Policy
from moonpool.stub import report
from moonpool.stub.sandbox import layers
from moonpool.stub.sandbox.outcome import Applied, SandboxRefused

# The most bytes of an error, and of a traceback, in FAILED: if it may lie in memory, and if it must fit into a packet.
_FAILED_BYTES, _FAILED_IN_PACKET_BYTES = 65_536, 12_288


class Announced(Overflow):
    """Keeps the regions that arrive before numpy is there to map them."""

    def __init__(self, control: Channel) -> None:
        self._control = control
        self._codec = control_codec(Side.STUB)
        self.fds: dict[int, tuple[int, int, int]] = {}
        # What came with SLOTS; nothing if the work channel stays a socket.
        self.slots: list[int] = []
        # The levels of LOG that the runtime wants; empty until it has sent LOGGING.
        self.log: list[bool] = []

    def read(self) -> str | None:
        """Receive one control message; blocks. Returns the text of SANDBOX, None for other messages."""
        packet, fds = self._control.receive_with_fds()
        kind, *fields = self._codec.decode(packet)
        if kind == Kind.SANDBOX:
            return str(fields[0])
        if kind == Kind.REGION:
            self.fds[fields[0]] = (fds[0], fields[1], fields[2])
        elif kind == Kind.SLOTS and not self.slots:
            self.slots = fds
        elif kind == Kind.LOGGING:
            self.log = fields
        else:
            raise RemoteProtocolError(f"{Kind(kind).name} came before START")
        return None

    def store(self, packet: bytes) -> tuple[int, int, int]:
        raise LocalProtocolError(f"there is no memory yet for a message of {len(packet)} bytes")

    def load(self, region: int, offset: int, size_bytes: int) -> bytes:
        while region not in self.fds:  # START may lie in a region that the runtime sends for it
            self.read()
        fd, _, _ = self.fds[region]
        return os.pread(fd, size_bytes, offset)


def shake_hands(
    name: str,
    work_fd: int,
    control_fd: int,
    calls_fd: int,
    *,
    is_confined: bool = False,
    apply: Callable[[Policy], Applied] = layers.apply,
) -> Handshake:
    """Read the first control messages, put the sandbox on with `apply`, and read START.

    `is_confined`: `confine.py` has put the sandbox on before the exec of this process, and has reported to the runtime.
    """
    control = Channel.of_descriptor(control_fd)
    announced = Announced(control)
    after = Kind.CONFINED if is_confined else None
    work = Channel.of_descriptor(work_fd)
    conversation = Conversation(work, Side.STUB, announced, after)
    while (text := announced.read()) is None:
        pass
    policy = Policy.from_json(text)
    calls = Channel.of_descriptor(calls_fd)
    handshake = Handshake(name, conversation, control, calls, announced)
    report.policy = handshake.policy = policy
    try:
        if not is_confined:
            applied = apply(policy)
            conversation.send(Kind.CONFINED, PROTOCOL_VERSION, applied.on, applied.left_out)
        while len(announced.fds) < 2:
            announced.read()
        _, start = conversation.receive()
        if is_confined:
            layers.tighten(policy)
    except SandboxRefused as refused:
        handshake.fail("sandbox", str(refused))
    handshake.start = json.loads(start)
    if announced.log:
        handshake.start["log"] = announced.log
    return handshake


class Handshake:
    """Holds START and the channels to the runtime, once the handshake is over."""

    def __init__(
        self, name: str, conversation: Conversation, control: Channel, calls: Channel, announced: Announced
    ) -> None:
        self.name = name
        self.conversation = conversation
        self.control = control
        self.calls = calls
        self.announced = announced
        self.start: dict[str, Any] = {}
        self.policy = Policy()

    def fail(self, stage: str, message: str, traceback: str = "") -> NoReturn:
        """Send the reason why this stub cannot serve, and end the process."""
        with contextlib.suppress(PeerGone):
            try:
                self._send_failure(stage, message, traceback, _FAILED_BYTES)
            except LocalProtocolError:
                # Without a region, the message must fit into a packet.
                self._send_failure(stage, message, traceback, _FAILED_IN_PACKET_BYTES)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _send_failure(self, stage: str, message: str, traceback: str, most_bytes: int) -> None:
        texts = end(message, most_bytes), end(traceback, most_bytes)
        self.conversation.send(Kind.FAILED, stage, *texts)
