"""What the generator asks of a protocol: bytes to send, and what came back of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from moonpool.ipc.errors import MoonpoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

# The outcome of a request that was answered as it should be; any other is the text of an error.
ANSWERED = ""


class WireError(MoonpoolError):
    """What came over a connection is not the protocol, so that nothing more can be read from it."""

    code = "UNAVAILABLE"


class Wire(Protocol):
    """One connection's protocol without its socket, one request after the other."""

    # Bytes that come next and that nobody looks at: the generator may drop them, and counts down.
    skip: int
    # Whether the peer closes the connection after this answer.
    closes: bool
    # Responses since the connection began; a stream has more of them than requests.
    responses: int

    def opening(self) -> Sequence[bytes | memoryview]:
        """What to send when the connection is there."""

    def begin(self) -> Sequence[bytes | memoryview]:
        """What to send for the next request."""

    def feed(self, data: bytes) -> str | None:
        """Take what has come; returns the outcome of the request if that was its end.

        Empty data after `skip` has been counted down to 0. Raises `WireError`.
        """

    def outgoing(self) -> Sequence[bytes | memoryview]:
        """What the protocol itself has to send after a `feed`."""
