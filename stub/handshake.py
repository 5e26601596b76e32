"""From a bare process to a loaded model: the order in which a stub becomes one.

    runtime                         stub
    SANDBOX, REGION, REGION  ──▶    read, put the sandbox on
                             ◀──    CONFINED, or FAILED
    look whether it is true
    START                    ──▶    read; only then import numpy and the model
                             ◀──    LOADED, COMPLETED or FAILED

`START` holds a JSON object: `mode` (`serve`, `complete` for auto_complete_config in a process of its own, or
`template` for one from which others are forked, with `initializes`: whether it calls `initialize` before),
`instance`, `device` (that of the instance, or NO_DEVICE), `args` (what `initialize` gets), `kind` (`triton` or `native`), `file`,
`class_name`, `version_dir`, `model_dir`, `inputs` and `outputs` (names in the order of the
configuration, which is how tensors are numbered on the wire), `shared` (whether peers may come),
`tells_begin` (whether BEGUN is wanted then), `copies_gpu_to_numpy`, `config` and `log` (which levels of LOG are wanted).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from typing import TYPE_CHECKING

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import control_codec
from moonpool.ipc.conversation import Conversation, Overflow
from moonpool.ipc.errors import LocalProtocolError, PeerGone, RemoteProtocolError
from moonpool.ipc.messages import PROTOCOL_VERSION, Kind, Side
from moonpool.ipc.policy import Policy
from moonpool.ipc.texts import end
from moonpool.stub import report
from moonpool.stub.sandbox import layers
from moonpool.stub.sandbox.refused import SandboxRefused

if TYPE_CHECKING:
    from typing import Any, Callable

    from moonpool.stub.inherited import Inherited
    from moonpool.stub.sandbox.applied import Applied

# The most bytes of the error, and of the traceback: in memory, and in a packet.
_FAILED_BYTES, _FAILED_IN_PACKET_BYTES = 65_536, 12_288


class Announced(Overflow):
    """The regions that were announced before numpy is there to map them."""

    def __init__(self, control: Channel) -> None:
        self._control = control
        self._codec = control_codec(Side.STUB)
        self.fds: dict[int, tuple[int, int, int]] = {}
        # Which levels of LOG are wanted, if that was said.
        self.log: list[bool] = []

    def read(self) -> str | None:
        """Take in one control message; the text of SANDBOX, None for others. Blocks."""
        packet, fds = self._control.receive_with_fds()
        kind, *fields = self._codec.decode(packet)
        if kind == Kind.SANDBOX:
            return str(fields[0])
        if kind == Kind.REGION:
            self.fds[fields[0]] = (fds[0], fields[1], fields[2])
        elif kind == Kind.LOGGING:
            self.log = fields
        else:
            raise RemoteProtocolError(f"{Kind(kind).name} came before START")
        return None

    def store(self, packet: bytes) -> tuple[int, int, int]:
        raise LocalProtocolError(f"there is no memory yet for a message of {len(packet)} bytes")

    def load(self, region: int, offset: int, size_bytes: int) -> bytes:
        while region not in self.fds:  # what START needs more memory for
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
    """Read the first control messages, put the sandbox on, and read what this stub is to be.

    `is_confined`: this process became the one it is inside the sandbox, and the runtime knows. `apply` is what
    puts the sandbox on where it is not.
    """
    control = Channel(socket.socket(fileno=control_fd))
    announced = Announced(control)
    after = Kind.CONFINED if is_confined else None
    work = Channel(socket.socket(fileno=work_fd))
    conversation = Conversation(work, Side.STUB, announced, after)
    policy = Policy()
    while len(announced.fds) < 2:
        text = announced.read()
        if text is not None:
            policy = Policy.from_json(text)
    calls = Channel(socket.socket(fileno=calls_fd))
    handshake = Handshake(name, conversation, control, calls, announced)
    report.limits.update(policy.limits)
    try:
        if not is_confined:
            applied = apply(policy)
            conversation.send(Kind.CONFINED, PROTOCOL_VERSION, applied.on, applied.left_out)
        _, start = conversation.receive()
        if is_confined:
            layers.tighten(policy)
    except SandboxRefused as refused:
        handshake.fail("sandbox", str(refused))
    handshake.start = json.loads(start)
    if announced.log:
        handshake.start["log"] = announced.log
    return handshake


def _advice() -> str:
    if os.environ.get("PYTHONPATH"):
        return "install it there, and look whether PYTHONPATH leads to packages of another Python"
    return "install it there"


class Handshake:
    """What the runtime said, and the channels to it."""

    def __init__(
        self,
        name: str,
        conversation: Conversation,
        control: Channel,
        calls: Channel,
        announced: Announced,
    ) -> None:
        self.name = name
        self.conversation = conversation
        self.control = control
        self.calls = calls
        self.announced = announced
        self.start: dict[str, Any] = {}
        # From the template that this process was forked from.
        self.inherited: Inherited | None = None

    def serve(self) -> None:
        """Import what the model needs, load it, serve until the end."""
        try:
            import numpy  # noqa: F401
        except ImportError as error:
            self.fail(
                "environment",
                f"numpy cannot be imported by {sys.executable}: {str(error).strip()}"
                f"{report.limit_hint(error) or '; ' + _advice()}",
            )
        # Before a template forks, so that no fork has to import it.
        from moonpool.stub.loop import Stub

        handshake = self
        if self.start["mode"] == "template":
            from moonpool.stub.template import Template

            handshake = Template(self).run()
        Stub(handshake).run()

    def fail(self, stage: str, message: str, traceback: str = "") -> None:
        """Tell the runtime why this stub cannot serve, and end the process."""
        with contextlib.suppress(PeerGone):
            try:
                self._tell_failure(stage, message, traceback, _FAILED_BYTES)
            except LocalProtocolError:
                # There is no memory yet for what is larger than a packet.
                self._tell_failure(stage, message, traceback, _FAILED_IN_PACKET_BYTES)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _tell_failure(self, stage: str, message: str, traceback: str, most_bytes: int) -> None:
        texts = end(message, most_bytes), end(traceback, most_bytes)
        self.conversation.send(Kind.FAILED, stage, *texts)
