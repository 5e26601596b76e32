"""A port that speaks TLS, and counts its clients from the moment that they connect."""

# Theory of operation
#
# A loop's own server makes a protocol for a client of TLS only after the handshake. Until then nothing counts the
# client, so half handshakes could take any number of descriptors. Here connections are accepted by hand: the port counts
# each of them before anything is read. Then a task of the loop does the handshake, and ends with it.
#
# All of it runs on the loop's thread. A connection is in `_shaking` from `accept` until its task ends. From `begins` on
# the port counts it as beginning, until `opened` (the client speaks HTTP) or `gave_up` (it never will).

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from moonpool.runtime.event_loop import watch

if TYPE_CHECKING:
    import ssl

    from moonpool.runtime.frontend.http.connection import Connection
    from moonpool.runtime.frontend.http.port import Port

_log = logging.getLogger("moonpool")
# Connections that are accepted before others have their turn.
_TURN = 64
# How long nobody is accepted when the process has no descriptor left.
_REST_S = 0.2


class TlsServer:
    """Accepts clients of a port. For the loop's thread."""

    def __init__(
        self, port: Port, listening: list[socket.socket], context: ssl.SSLContext, backlog: int
    ) -> None:
        """Own the sockets, which are bound."""
        self.sockets = listening
        self._port = port
        self._loop = port.loop
        self._context = context
        self._backlog = backlog
        self._shaking: set[asyncio.Task[None]] = set()

    async def start_serving(self) -> None:
        """Accept clients from now on."""
        for listening in self.sockets:
            listening.listen(self._backlog)
            self._watch(listening)

    def close(self) -> None:
        """Accept nobody any more, and leave those who do not speak TLS yet."""
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
            _log.error("no connection can be accepted: %s", error)
            self._loop.call_later(_REST_S, self._watch, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_TURN):
            try:
                client, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.error("no connection can be accepted: %s", error)
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(_REST_S, self._watch, listening)
                return
            connection = self._port()
            if not self._port.begins(connection):
                client.close()
                continue
            if not self._port.watches.hold(client.fileno()):
                self._port.gave_up(connection)
                client.close()
                continue
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._shake(client, connection))
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

    async def _shake(self, client: socket.socket, connection: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection,
                client,
                ssl=self._context,
                ssl_handshake_timeout=self._port.limits.head_timeout_s,
            )
        except OSError as error:
            # Errors of TLS and timeouts are OSErrors, too.
            _log.debug("a client did not come to speak TLS: %s", error)
        finally:
            self._port.gave_up(connection)
