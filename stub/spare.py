"""Waits as a spare: a process that has everything of a stub but a model, and becomes the stub of one model.

    runtime                                    spare
                                    ◀──   ["", file of numpy, bytes of addresses], or [why it is no good, "", 0]
    name, variables, 4 descriptors  ──▶   become the stub
                                    ◀──   a byte, and the end of this channel
    SANDBOX, REGION, REGION, START  ◀──▶  the handshake of any stub, which puts the sandbox on

Theory of operation. Spares are for models that may be hostile, so no two of these may have one in common. A spare is
started like any process and not forked, so its layout of memory, its hash seed and its random state are its own. It
serves one model, or ends. Until its sandbox is on it has run moonpool's code and what the runtime's own interpreter
imports for numpy, which the runtime has imported, too, and not one byte of a model. The sandbox is put on in the same
order and by the same code as in a stub that was just started.

While it waits, no process of the same user may look inside, and so write code into it: it is not dumpable. A user
without rights needs that back for the namespaces, as the files of a process that is not dumpable belong to root, the
maps of its own users among them. `confine` gives it back for the milliseconds of the layers, of which the last but two
takes it away for good. The end of the runtime ends a spare, by the kernel and by the end of this channel. The kernel
also ends spares before all other processes when the machine's memory is full.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from typing import Any

import numpy as np

from moonpool.ipc.channel import Channel
from moonpool.ipc.errors import PeerGone
from moonpool.ipc.policy import OOM_SCORE, Policy
from moonpool.stub.blank import CannotFork, quieten, rename
from moonpool.stub.sandbox import contained as contained  # imported here, so that it need not be later
from moonpool.stub.sandbox import identity, layers
from moonpool.stub.sandbox.outcome import Applied
from moonpool.stub.template import take_over


def wait_for_model(channel_fd: int) -> tuple[str, list[int]]:
    """Wait until the runtime has a model, or closes the channel, which ends the process.

    Returns the name, and the descriptors of the work, control and calls channels.
    """
    channel = Channel.of_descriptor(channel_fd)
    try:
        quieten()
        channel.send_waiting(json.dumps(["", np.__file__, _addresses()]).encode())
        packet, fds = channel.receive_with_fds()
    except CannotFork as error:
        channel.send_waiting(json.dumps([str(error), "", 0]).encode())
        os._exit(0)
    except PeerGone:
        os._exit(0)
    order = json.loads(packet)
    *fds, output_fd = fds
    _become(order["name"], order["variables"], output_fd)
    channel.send_waiting(b"\1")
    channel.close()
    return order["name"], fds


def _addresses() -> int:
    """Return the bytes of addresses that this process has, of which a limit of memory has to leave some."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _become(name: str, variables: dict[str, str | None], output_fd: int) -> None:
    """Take over what belongs to the stub. Anything that raises ends the process before it has answered."""
    take_over(output_fd, variables)
    site: Any = sys.modules.get("site")
    if site is not None and site.USER_SITE is not None:
        # It depends on HOME. Nothing can be there: that folder is new.
        site.USER_BASE = site.USER_SITE = None
        site.getusersitepackages()
    if "random" in sys.modules:
        sys.modules["random"].seed()
    with contextlib.suppress(OSError, ValueError, IndexError):
        rename(name)


def confine(policy: Policy, *, launches: bool = False) -> Applied:
    """Put the layers on with `layers.apply`, as in any stub. Raises `SandboxRefused`."""
    if os.geteuid() != 0:
        identity.allow_looking_inside()
    identity.score_for_ending(OOM_SCORE)
    return layers.apply(policy, launches=launches)
