"""Puts the sandbox on this process, then executes the interpreter of the model's own environment.

    python -I -S .../stub/confine.py PYTHON .../stub/boot.py triton_python_backend_stub NAME WORK_FD CONTROL_FD
        CALLS_FD PARENT_PID MSGPACK

The author of an environment also chose its interpreter and libraries. So none of them may run before the sandbox is on.
This program runs under the runtime's interpreter. It has none of the variables of the environment, which come as JSON
in one variable. It reads SANDBOX without removing it from the channel and sends CONFINED or FAILED. Then it hands
everything on unchanged, with one more argument that tells `boot.py`.

An exec removes some layers, and `boot.py` puts them on again with `layers.tighten`, as far as the foreign interpreter
does what it should. The other layers survive the exec and do not depend on that interpreter: the namespaces, the user,
the rules of Landlock and the filter. The filter allows no more than in any stub, and in addition the exec of programs
that the process may read.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import types

CONFINED = "confined"
# Holds the variables for the interpreter of the environment.
_HANDED_ON = "MOONPOOL_HANDED_ON"


def main() -> None:
    """Confine this process, then execute the interpreter that the arguments name."""
    _, python, boot, title, name, work_fd, control_fd, calls_fd, parent_pid, msgpack = sys.argv
    variables = json.loads(os.environ[_HANDED_ON])
    here = os.path.dirname(os.path.realpath(__file__))
    package = types.ModuleType("moonpool")
    package.__path__ = [os.path.dirname(here)]
    sys.modules["moonpool"] = package
    from moonpool.stub.boot import load_msgpack
    from moonpool.stub.sandbox.identity import die_with

    die_with(int(parent_pid))
    load_msgpack(msgpack)
    from moonpool.ipc.channel import MAX_PACKET_BYTES, Channel
    from moonpool.ipc.codec import control_codec, encode
    from moonpool.ipc.messages import EXEC_FAILED, PROTOCOL_VERSION, Kind, Side
    from moonpool.ipc.policy import Policy
    from moonpool.stub.sandbox import layers
    from moonpool.stub.sandbox.outcome import SandboxRefused

    work = Channel.of_descriptor(int(work_fd))
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
        work.receive()  # START: the runtime reads no answer before it has sent this
        # The runtime writes the error text, from this number.
        work.send_waiting(encode(Kind.FAILED, EXEC_FAILED, str(error.errno), ""))
        os._exit(1)


if __name__ == "__main__":
    main()
