"""What a port asks of whoever answers the requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from moonpool.runtime.frontend.http.exchange import Exchange
    from moonpool.runtime.frontend.http.head import BadMessage, Head


class Handler(Protocol):
    """Whom the requests go to. All on the loop's thread; nothing may block."""

    def handle(self, exchange: Exchange) -> None:
        """Answer now or later."""

    def refuse(self, head: Head) -> BadMessage | None:
        """Why the body of such a request need not even be sent."""

    def most_bytes_of(self, head: Head) -> int:
        """The largest body of such a request."""

    def memory_for(self, head: Head, size_bytes: int) -> memoryview | None:
        """Where the body of such a request is best received."""
