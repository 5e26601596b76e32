"""A port that speaks TLS, and counts its clients from the moment that they connect.

Theory of operation. A loop's own server makes a protocol for a client of TLS only after the handshake. Until then
nothing would count the client, so half handshakes could take any number of descriptors. Here connections are accepted
by hand: the port counts each of them before anything is read. Then a task of the loop does the handshake, and ends with
it.

All of it runs on the loop's thread. A connection is in `_shaking` from `accept` until its task ends. From `begins` on
the port counts it as beginning, until `opened` (the client speaks TLS) or `gave_up` (it never will). `close` first
stops accepting, then cancels the handshakes; connections that were made belong to the port, which drains or closes
them.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any, Protocol

from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.event_loop import Watches, watch
from moonpool.runtime.server.clients import Clients

_log = RuntimeLog("moonpool")
# Connections that are accepted before others have their turn.
_TURN = 64
# Seconds without accepting anybody when the process has no descriptor left.
_REST_S = 0.2
# The least time between two lines of the log about failures.
_QUIET_S = 30.0


class CountingPort(Protocol):
    """A port that counts its clients, and makes a connection for each. For the loop's thread."""

    loop: asyncio.AbstractEventLoop
    watches: Watches
    handshake_timeout_s: float
    clients: Clients[Any]

    def __call__(self) -> Any:
        """Make a protocol for a new connection."""


class TlsServer:
    """Accepts clients of a port. For the loop's thread."""

    def __init__(
        self, port: CountingPort, listening: list[socket.socket], context: ssl.SSLContext, backlog: int
    ) -> None:
        """Own the sockets, which are bound."""
        self.sockets = listening
        self._port = port
        self._loop = port.loop
        self._context = context
        self._backlog = backlog
        self._shaking: set[asyncio.Task[None]] = set()
        # The failures since the last line of the log, and the time of the loop at which the next line may come.
        self._unsaid = 0
        self._says_at = -_QUIET_S

    async def start_serving(self) -> None:
        """Accept clients from now on."""
        for listening in self.sockets:
            listening.listen(self._backlog)
            self._watch(listening)

    def close(self) -> None:
        """Accept nobody any more, and end the connections that do not speak TLS yet."""
        for listening in self.sockets:
            if listening.fileno() >= 0:
                self._loop.remove_reader(listening.fileno())
                listening.close()
        for task in list(self._shaking):
            task.cancel()

    def _watch(self, listening: socket.socket) -> None:
        if listening.fileno() < 0:
            return
        try:
            watch(self._loop, listening.fileno(), self._accept, listening)
        except OSError as error:
            self._rest(listening, error)

    def _rest(self, listening: socket.socket, error: OSError) -> None:
        """Try again a little later. Clients can cause endless failures, so the log has few of them."""
        self._unsaid += 1
        if self._loop.time() >= self._says_at:
            _log.error("no connection can be accepted (tried %d times): %s", self._unsaid, error)
            self._unsaid = 0
            self._says_at = self._loop.time() + _QUIET_S
        self._loop.call_later(_REST_S, self._watch, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_TURN):
            try:
                client, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._loop.remove_reader(listening.fileno())
                self._rest(listening, error)
                return
            connection = self._port()
            if not self._port.clients.begins(connection):
                client.close()
                continue
            if not self._port.watches.hold(client.fileno()):
                self._port.clients.gave_up(connection)
                client.close()
                continue
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._shake(client, connection))
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

    async def _shake(self, client: socket.socket, connection: asyncio.BaseProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, client, ssl=self._context, ssl_handshake_timeout=self._port.handshake_timeout_s
            )
        except OSError as error:
            # Errors of TLS and timeouts are OSErrors, too.
            _log.debug("the TLS handshake of a client failed: %s", error)
        finally:
            self._port.clients.gave_up(connection)
