"""The usual way of calls between models, on the runtime's side: what an INFER says, and what its REPLY lends. In Python
and compiled.

Theory of operation. `_calls.pyx` is the compiled form. It reads an INFER of any model, names, shapes, datatypes and
details whose inputs lie in the asking stub's own regions, and places the outputs of any response that are copied. It
keeps nothing of a message for the next one. A message is a stranger's: the kernel has copied the packet, all of it is
checked before anything is made of it, and the blocks that it names are compared with the regions in which that stub
answers. The bytes of tensors are never looked at.

It looks if everything is so before it changes anything. If not, `read` and `reply` return None, and the dispatcher does
that part in Python. That is all that the form of this file does.

The reactor's thread alone calls `receive`, `read` and `inputs`; `inputs` belongs to the `read` before it. Any thread
calls `reply` and `send`, and several at a time: Python's code runs inside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moonpool.ipc.channel import Channel
from moonpool.ipc.extension import is_wanted, load_if_there


class CallPort:
    """The runtime's end of a calls channel."""

    __slots__ = ("_channel", "is_plain")

    def __init__(
        self,
        channel: Channel,
        blocks: Any,  # noqa: ARG002
        released: deque[Any],  # noqa: ARG002
        regions: Mapping[int, Any],  # noqa: ARG002
        wire_tensor: type,  # noqa: ARG002
        *,
        is_plain: bool = True,  # noqa: ARG002
    ) -> None:
        """`blocks` are those that are lent to the stub, `regions` those in which it answers, by their numbers, and
        `released` gets the places there that are no longer in use. `wire_tensor` is the class of tensors as bytes.
        Unless `is_plain`, all calls go Python's way.
        """
        self._channel = channel
        self.is_plain = False

    def receive(self) -> bytes | None:
        """Return the next packet, None if there is none yet. Never blocks. Raises `PeerGone`, `RemoteProtocolError`."""
        return self._channel.receive_ready()

    def read(self, packet: bytes) -> list[Any] | None:  # noqa: ARG002
        """Read an INFER, and do nothing. Returns its fields, with None for blocks and inputs, which `inputs` makes.

        Returns None for any other packet, and if Python has to do it.
        """
        return None

    def inputs(self) -> dict[str, Any]:
        """Return the inputs of the INFER that was read, by name: views of its blocks, which the runtime has from now
        on.
        """
        raise NotImplementedError

    def reply(self, number: int, is_last: bool, response: Any) -> bytes | None:  # noqa: ARG002
        """Copy the outputs of a response into a block that the stub borrows. Returns the packet of REPLY.

        Returns None, having done nothing, if Python has to do it.
        """
        return None

    def send(self, packet: bytes) -> bool:  # noqa: ARG002
        """Send a packet. Never blocks. Returns False, having done nothing, if Python has to do it."""
        return False


# The compiled form, None if there is none.
compiled: Any = load_if_there("moonpool.ipc.port._calls") if is_wanted() else None
if not TYPE_CHECKING and compiled is not None:
    CallPort = compiled.CallPort
