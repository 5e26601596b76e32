"""Puts the sandbox on, and then becomes the interpreter of a model's own environment.

    python -I -S .../stub/confine.py PYTHON .../stub/boot.py triton_python_backend_stub NAME WORK_FD CONTROL_FD
        CALLS_FD PARENT_PID MSGPACK

Whoever made an environment made its interpreter and libraries too, so they run nothing before they are confined.
This runs under the runtime's own, with none of the environment's variables: those come in one, as JSON. It looks
at SANDBOX without taking it off the channel, says CONFINED or FAILED, and hands everything on as it is, with one more
argument by which `boot.py` knows.

What an exec takes off, `layers.tighten` puts on again, as far as that interpreter can be relied on. What it may not
be relied on for is on for good: it stays in the namespaces, with the user, the rules of Landlock and the filter,
in which nothing is allowed beyond what a stub may do but to become another one of the programs it may read.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import types

CONFINED = "confined"
# The variables for the interpreter that this becomes.
_HANDED_ON = "MOONPOOL_HANDED_ON"


def main() -> None:
    """Confine this process, and become the interpreter that the arguments name."""
    _, python, boot, title, name, work_fd, control_fd, calls_fd, parent_pid, msgpack = sys.argv
    variables = json.loads(os.environ[_HANDED_ON])
    here = os.path.dirname(os.path.realpath(__file__))
    package = types.ModuleType("moonpool")
    package.__path__ = [os.path.dirname(here)]
    sys.modules["moonpool"] = package
    from moonpool.stub.boot import die_with_parent, load_msgpack

    die_with_parent(int(parent_pid))
    load_msgpack(msgpack)
    from moonpool.ipc.channel import MAX_PACKET_BYTES, Channel
    from moonpool.ipc.codec import control_codec, encode
    from moonpool.ipc.messages import EXEC_FAILED, PROTOCOL_VERSION, Kind, Side
    from moonpool.ipc.policy import Policy
    from moonpool.stub.sandbox import layers
    from moonpool.stub.sandbox.refused import SandboxRefused

    work = Channel(socket.socket(fileno=int(work_fd)))
    control = socket.socket(fileno=int(control_fd))
    packet = control.recv(MAX_PACKET_BYTES, socket.MSG_PEEK)
    control.detach()
    if not packet:
        os._exit(1)  # the runtime is gone
    policy = Policy.from_json(control_codec(Side.STUB).decode(packet)[1])
    try:
        applied = layers.apply(policy, launches=True)
    except SandboxRefused as refused:
        work.send_waiting(encode(Kind.FAILED, "sandbox", str(refused), ""))
        os._exit(1)
    work.send_waiting(encode(Kind.CONFINED, PROTOCOL_VERSION, applied.on, applied.left_out))
    arguments = (title, name, work_fd, control_fd, calls_fd, parent_pid, msgpack, CONFINED)
    try:
        os.execve(python, [python, boot, *arguments], variables)
    except OSError as error:
        work.receive()  # START: until it has been sent, nobody listens
        # The runtime has the words for that.
        work.send_waiting(encode(Kind.FAILED, EXEC_FAILED, str(error.errno), ""))
        os._exit(1)


if __name__ == "__main__":
    main()
