"""What all connections to one port have in common."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from moonpool.runtime.event_loop import watches_of
from moonpool.runtime.frontend.frontend_metrics import Meter
from moonpool.runtime.frontend.http.connection import Connection
from moonpool.runtime.frontend.http.exchange import Exchange
from moonpool.runtime.frontend.http.head import Head, Heads
from moonpool.runtime.frontend.http.intake import memory_of

if TYPE_CHECKING:
    from moonpool.runtime.frontend.http.handler import Handler
    from moonpool.runtime.frontend.http.head import BadMessage
    from moonpool.runtime.frontend.http.options import HttpLimits

_BUFFER_BYTES = 256 << 10
_LOOK_S = 1.0
# What may wait for all clients together who do not take it.
_UNSENT_BYTES = 4 << 30
# What all clients together have in shared memory of bodies that have not come yet.
_AWAITED_BYTES = 256 << 20
# Beyond the limit, so many for one of those within it wait for the word that they are too many.
_TOLD_PART = 8
_NO_HEAD = Head("GET", b"", "1.1", ())


class Port:
    """Makes connections, and looks after them. For the loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handler: Handler,
        limits: HttpLimits,
        meter: Meter | None = None,
    ) -> None:
        """`meter` counts connections and answers."""
        self.loop = loop
        self.watches = watches_of(loop)
        self.handler = handler
        self.limits = limits
        self.meter = meter or Meter()
        self.heads = Heads()
        # One for all: what comes in is taken out before anything else comes in.
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))
        # Shared memory of bodies that are to come.
        self.awaited_bytes = 0
        self.is_draining = False
        # Seconds of the loop's clock, as of the last look: nobody's time is cut short by more than one look.
        self.now = loop.time()
        times_s = (limits.head_timeout_s, limits.body_timeout_s, limits.idle_timeout_s)
        self._look_s = min(_LOOK_S, *(time_s / 4 for time_s in (*times_s, limits.write_timeout_s)))
        self._looking: asyncio.TimerHandle | None = None
        self._connections: set[Connection] = set()
        # Clients that have connected and do not speak TLS yet.
        self._beginning: set[Connection] = set()
        self._emptied: asyncio.Future[None] | None = None

    def __call__(self) -> Connection:
        """A protocol for a connection that comes in."""
        return Connection(self)

    @property
    def connections(self) -> int:
        """The number of connections, with those that do not speak TLS yet."""
        return len(self._connections) + len(self._beginning)

    def begins(self, connection: Connection) -> bool:
        """Count a client that has connected and has yet to speak TLS; False if there is no room even to refuse it."""
        self._beginning.add(connection)
        is_welcome = not (self.is_crowded or self.is_draining)
        if not is_welcome:
            self._beginning.discard(connection)
        return is_welcome

    def gave_up(self, connection: Connection) -> None:
        """Count it no longer, unless it has been `opened`."""
        self._beginning.discard(connection)

    def opened(self, connection: Connection) -> bool:
        """Count it; False where there are too many already."""
        self._beginning.discard(connection)
        is_welcome = self.connections < self.limits.connections and not self.is_draining
        self._connections.add(connection)
        self.meter.connected()
        if self._looking is None:
            self.now = connection.since = self.loop.time()
            self._looking = self.loop.call_later(self._look_s, self._look)
        return is_welcome

    @property
    def is_crowded(self) -> bool:
        """Whether so many are there, who are told that they are too many, that others are told nothing."""
        most = self.limits.connections
        return self.connections > most + max(1, most // _TOLD_PART)

    def closed(self, connection: Connection) -> None:
        """Count it no longer."""
        self._connections.discard(connection)
        self.meter.disconnected()
        if not self._connections:
            if self._looking is not None:
                self._looking.cancel()
                self._looking = None
            if self._emptied is not None and not self._emptied.done():
                self._emptied.set_result(None)

    def _look(self) -> None:
        self.now = self.loop.time()
        for connection in list(self._connections):
            connection.look(self.now)
        self._relieve()
        self._looking = self.loop.call_later(self._look_s, self._look)

    def _relieve(self) -> None:
        """Leave the clients for whom the most waits, while too much waits for all."""
        waiting = [(each.unsent_bytes, each) for each in self._connections if each.is_stalled]
        total_bytes = sum(unsent_bytes for unsent_bytes, _ in waiting)
        for unsent_bytes, connection in sorted(waiting, key=lambda each: each[0], reverse=True):
            if total_bytes <= _UNSENT_BYTES:
                break
            total_bytes -= unsent_bytes
            connection.abort()

    def room_for(self, head: Head, size_bytes: int) -> tuple[memoryview, int]:
        """Memory for a body that is to come, and how much of it is shared: to be taken off `awaited_bytes` in the end.

        Raises `BadMessage` where there is none.
        """
        # It is taken before anything has come, so who only says that much is to come must not get very much.
        if self.awaited_bytes + size_bytes <= _AWAITED_BYTES:
            memory = self.handler.memory_for(head, size_bytes)
            if memory is not None:
                self.awaited_bytes += size_bytes
                return memory, size_bytes
        return memory_of(size_bytes), 0

    def refuse(self, connection: Connection, error: BadMessage) -> None:
        """Write the answer to what is no request."""
        self.meter.answered(error.status)
        Exchange(connection, _NO_HEAD, b"").fail(error.status, error.text, error.headers)

    async def drain(self, timeout_s: float) -> bool:
        """Finish what has begun and end all connections; False where some were cut off when the time was over."""
        self.is_draining = True
        for connection in list(self._connections):
            connection.close_if_idle()
        if self._connections:
            self._emptied = self.loop.create_future()
            try:
                await asyncio.wait_for(self._emptied, timeout_s)
            except TimeoutError:
                self.close()
                return False
        return True

    def close(self) -> None:
        """End all connections at once."""
        self.is_draining = True
        for connection in list(self._connections):
            connection.abort()
