"""The HTTP front end of a server: its ports, from the first connection to the last."""

from __future__ import annotations

import asyncio
import ssl
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from ipaddress import ip_address
from typing import TYPE_CHECKING

from moonpool.runtime.frontend.addresses import CannotListen, bound_sockets
from moonpool.runtime.frontend.http.application import application, metrics_application
from moonpool.runtime.frontend.http.asgi import AsgiBridge
from moonpool.runtime.frontend.http.inference import Inference
from moonpool.runtime.frontend.http.port import Port
from moonpool.runtime.frontend.http.routes import MetricsRoutes, Routes
from moonpool.runtime.frontend.http.signposts import routes as signposts
from moonpool.runtime.frontend.http.tls import TlsServer
from moonpool.runtime.frontend.page.routes import routes as page_routes
from moonpool.runtime.frontend.restriction import Origins, Restriction

if TYPE_CHECKING:
    from moonpool.runtime.frontend.http.handler import Handler
    from moonpool.runtime.frontend.http.options import HttpOptions
    from moonpool.runtime.frontend.service import Service

# As many as the kernel lets wait that nobody has had the time to accept.
_BACKLOG = 4096
# So many connections of clients there may be for one of whoever reads the metrics.
_PER_SCRAPER = 8
# For what is too long for the loop, but ends by itself; and for what may wait for models.
_THREADS, _PATIENT_THREADS = 4, 16


class HttpServer:
    """Serves until it is drained or closed. For the thread of the loop that it was made in."""

    def __init__(self, service: Service, options: HttpOptions) -> None:
        self.ports: dict[str, int] = {}
        """The ports that are served, by "http" and "metrics"."""
        self._service = service
        self._options = options
        self._parts: list[tuple[asyncio.AbstractServer | TlsServer, Port]] = []
        self._executor = ThreadPoolExecutor(_THREADS, "moonpool-http")
        self._patient = ThreadPoolExecutor(_PATIENT_THREADS, "moonpool-control")

    async def start(self) -> None:
        """Take the ports, unless that was done, and serve. Raises what `bind` raises."""
        if not self._parts:
            await self.bind()
        for server, _ in self._parts:
            await server.start_serving()

    async def bind(self) -> None:
        """Take the ports; nobody is served before `start`.

        Raises `CannotListen`, and `OSError` for bad certificates.
        """
        options, service, loop = self._options, self._service, asyncio.get_running_loop()
        try:
            if options.port is not None:
                routes, context = self.make_routes(), _tls(options)
                await self._listen("http", options.address, options.port, routes, context)
            if options.path is not None:
                meter = service.metrics.frontends.http
                port = Port(loop, self.make_routes(), options.limits, meter)
                server = await loop.create_unix_server(
                    port, options.path, backlog=_BACKLOG, start_serving=False
                )
                self._parts.append((server, port))
            if options.metrics_port is not None:
                # Whoever watches the server is not to wait for its models.
                bridge = AsgiBridge(loop, metrics_application(service, self._executor))
                await self._listen(
                    "metrics",
                    options.metrics_address,
                    options.metrics_port,
                    MetricsRoutes(bridge, self._origins(options.metrics_address)),
                    None,
                )
        except BaseException:
            self.close()
            raise

    def make_routes(self) -> Routes:
        """The handler of a port."""
        options, service, loop = self._options, self._service, asyncio.get_running_loop()
        page = page_routes(service.overview, self._executor)
        further = [*page, *signposts(options, self.ports)]
        return Routes(
            Inference(service, loop, self._executor, options.limits),
            AsgiBridge(loop, application(service, self._patient, further)),
            *self.guards(),
        )

    def guards(self) -> tuple[Restriction, Origins, str]:
        """Who may ask for what, and which headers go on to models."""
        options = self._options
        return (
            Restriction(options.restricted, options.control_token),
            self._origins(options.address),
            options.header_forward_pattern,
        )

    def _origins(self, address: str) -> Origins:
        """Make the check of what browsers send to a port at this address."""
        return Origins(self._options.allowed_origins, is_loopback=_is_loopback(address))

    async def _listen(
        self, name: str, address: str, number: int, handler: Handler, tls: ssl.SSLContext | None
    ) -> None:
        loop = asyncio.get_running_loop()
        limits = self._options.limits
        if name == "http":
            port = Port(loop, handler, limits, self._service.metrics.frontends.http)
        else:
            # What Prometheus asks for is no traffic.
            few = max(1, limits.connections // _PER_SCRAPER)
            port = Port(loop, handler, replace(limits, connections=few))
        reuse_port = self._options.reuse_port
        server: asyncio.AbstractServer | TlsServer
        try:
            if tls is not None:
                sockets = await bound_sockets(address, number, reuse_port=reuse_port)
                server = TlsServer(port, sockets, tls, _BACKLOG)
            else:
                server = await loop.create_server(
                    port,
                    address,
                    number,
                    backlog=_BACKLOG,
                    reuse_port=reuse_port or None,
                    start_serving=False,
                )
        except OSError as error:
            raise CannotListen(name, address, number, error) from error
        self._parts.append((server, port))
        self.ports[name] = server.sockets[0].getsockname()[1]

    async def drain(self, timeout_s: float) -> bool:
        """Take no more connections and requests, finish those that are there.

        False where some were not finished in time, and were cut off. The server is closed then.
        """
        for server, _ in self._parts:
            server.close()
        ended = await asyncio.gather(*(port.drain(timeout_s) for _, port in self._parts))
        self.close()
        return all(ended)

    def close(self) -> None:
        """End everything at once."""
        for server, port in self._parts:
            server.close()
            port.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._patient.shutdown(wait=False, cancel_futures=True)


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def _tls(options: HttpOptions) -> ssl.SSLContext | None:
    if options.certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(options.certificate, options.private_key)
    context.set_alpn_protocols(["http/1.1"])
    return context
