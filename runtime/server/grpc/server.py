"""The gRPC server: its port, its connections and handlers, its beginning and its end.

Theory of operation. A server belongs to the thread of an event loop. It makes a `GrpcConnection` for each client, looks
after all of them once a second, and has what they share: the buffer to receive into, the limits, the threads that pack
and unpack messages. With TLS its clients count from the moment that they connect (`server.tls`).

Drain and end. `drain` closes the sockets that listen, and has every connection say GOAWAY: what the client has sent
until then is answered, and what it sends later it may send elsewhere. Calls are told, so that streams end. Connections
close with their last calls, and those that remain when the time is over are aborted, which ends their calls early. No
handler is called after that. `close` has the threads for work that takes long end when they are done. It does not wait
for them: a load goes on until it is done, and the runtime waits for it, too.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.event_loop import watches_of
from moonpool.runtime.process.threads import TaskPool
from moonpool.runtime.server.clients import AllClients, Clients, relieve
from moonpool.runtime.server.grpc import open_nghttp2
from moonpool.runtime.server.grpc.call import OpenCalls
from moonpool.runtime.server.grpc.connection import GrpcConnection, GrpcProtocol
from moonpool.runtime.server.grpc.control import GrpcControl
from moonpool.runtime.server.grpc.inference import GrpcInference
from moonpool.runtime.server.grpc.methods import methods
from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.grpc.reflection import reflection_methods
from moonpool.runtime.server.grpc.stream import Streams
from moonpool.runtime.server.listening import CannotListen, bound_sockets, serve
from moonpool.runtime.server.service import Service
from moonpool.runtime.server.tls import TlsServer

if TYPE_CHECKING:
    from moonpool.runtime.server.grpc import _http2

_log = RuntimeLog("moonpool")
_BACKLOG = 4096
_BUFFER_BYTES = 256 << 10
_LOOK_S = 1.0
_HANDSHAKE_S = 20.0
# Each RPC except for inference and health has a thread while it is answered. RPCs that wait for models have a pool of
# their own.
_CONTROL_THREADS = 4
_PATIENT_THREADS = 16


class GrpcServer:
    """Serves a service over gRPC until it is drained or closed. For the thread of the loop that it was made in.

    Its connections know it as their port.
    """

    def __init__(self, service: Service, options: GrpcOptions, together: AllClients | None = None) -> None:
        """Take no port yet. `together` counts the clients of all ports of the process. Raises `MissingHttp2`."""
        self._new_session, where = open_nghttp2()
        _log.info("gRPC is served over %s", where)
        self.loop = loop = asyncio.get_running_loop()
        self.watches = watches_of(loop)
        self.handshake_timeout_s = _HANDSHAKE_S
        self.options = options
        self._quick = TaskPool(_CONTROL_THREADS, "moonpool-grpc-control")
        self._slow = TaskPool(_PATIENT_THREADS, "moonpool-grpc-patient")
        self._control = GrpcControl(service)
        self._inference = GrpcInference(service, loop, options)
        self._streams = Streams(self._inference, options)
        # For work that takes long.
        self.pool = self._inference.executor
        meter = service.metrics.frontends.grpc
        found = methods(self._control, self._inference, self._streams, self._quick, self._slow)
        if options.reflection:
            found |= reflection_methods()
        self.calls = OpenCalls(loop, found, options, meter)
        """The RPCs that have not ended."""
        self.clients: Clients[GrpcConnection] = Clients(
            "gRPC", options.max_connections, together or AllClients(), meter
        )
        self.port = 0
        """The number of the port."""
        # One for all connections: bytes are taken out of it before more are received.
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))
        # Seconds of the loop's clock at the last look.
        self.now = loop.time()
        # Large messages that have taken memory and have not come whole.
        self.awaited_bytes = 0
        self._servers: list[asyncio.Server | TlsServer] = []
        self._looking: asyncio.TimerHandle | None = None
        times_ms = (
            options.keepalive_time_ms,
            options.keepalive_timeout_ms,
            options.max_connection_age_ms,
            options.max_connection_age_grace_ms,
            options.write_timeout_ms,
            options.read_timeout_ms,
        )
        self._look_s = min(_LOOK_S, *(time_ms / 4000 for time_ms in times_ms if time_ms))

    async def bind(self) -> None:
        """Take the port; nobody is served before `start`.

        Raises `MoonpoolError` if the port is taken, or a file for TLS cannot be read.
        """
        options = self.options
        context = _context(options)
        try:
            sockets = await bound_sockets(options.address, options.port, reuse_port=options.reuse_port)
        except OSError as error:
            raise CannotListen("grpc", options.address, options.port, error) from error
        self.port = sockets[0].getsockname()[1]
        if context is not None:
            self._servers.append(TlsServer(self, sockets, context, _BACKLOG))
            return
        for each in sockets:
            self._servers.append(await self.loop.create_server(self, sock=each, backlog=_BACKLOG, start_serving=False))

    async def start(self) -> None:
        """Accept calls from now on."""
        try:
            for server in self._servers:
                await serve(server)
        except OSError as error:
            raise CannotListen("grpc", self.options.address, self.port, error) from error
        self._look()

    def __call__(self) -> GrpcProtocol:
        """Make a protocol for a new connection."""
        return GrpcProtocol(self)

    def make_session(self) -> _http2.Session:
        """Return HTTP/2 for a new connection."""
        packs = self.options.infer_response_compression_level != "none"
        return self._new_session(self.options.max_message_bytes, packs)

    def _look(self) -> None:
        self.now = self.loop.time()
        for connection in list(self.clients.open):
            connection.look(self.now)
        relieve(self.clients.open)
        self._looking = self.loop.call_later(self._look_s, self._look)

    # The end

    async def drain(self, timeout_s: float) -> bool:
        """Accept no more calls, finish those in flight, and cancel those that are not finished in time.

        Returns whether all were finished.
        """
        self._control.is_draining = self.clients.is_closed = True
        for server in self._servers:
            server.close()
        for connection in list(self.clients.open):
            connection.drain()
        deadline = self.loop.time() + timeout_s
        is_drained = await self.calls.drain(timeout_s)
        if is_drained:
            # The last bytes may still be on their way.
            await self.clients.emptied(max(0.0, deadline - self.loop.time()))
        self.close()
        return is_drained

    def close(self) -> None:
        """End at once. May be called many times, and in any state."""
        self._control.is_draining = self.clients.is_closed = True
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        for server in self._servers:
            server.close()
        for connection in list(self.clients.open):
            connection.abort()
        self._quick.shutdown(wait=False)
        self._slow.shutdown(wait=False, cancel_futures=True)
        self._inference.close()


def _context(options: GrpcOptions) -> ssl.SSLContext | None:
    if not (options.use_ssl or options.use_ssl_mutual):
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    files = [options.server_cert, options.server_key]
    try:
        context.load_cert_chain(*files)
        if options.use_ssl_mutual:
            context.verify_mode = ssl.CERT_REQUIRED
            files = [options.root_cert]
            context.load_verify_locations(options.root_cert)
    except OSError as error:
        # Errors of TLS are OSErrors, too.
        raise MoonpoolError(f"gRPC with TLS cannot use {' and '.join(files)}: {error.strerror or error}") from error
    return context
