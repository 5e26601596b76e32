"""The HTTP side of a server: its ports, from the first connection to the last."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from concurrent.futures import Executor
from ipaddress import ip_address
from typing import Protocol

from moonpool.runtime.process.threads import TaskPool
from moonpool.runtime.server.clients import AllClients, Clients
from moonpool.runtime.server.http.connection import Handler, HttpConnection, HttpPort, clients_of
from moonpool.runtime.server.http.control import control_routes, metrics_routes, page_routes, signposts
from moonpool.runtime.server.http.handler import HttpHandler, MetricsHandler
from moonpool.runtime.server.http.inference import HttpInference
from moonpool.runtime.server.http.options import HttpOptions
from moonpool.runtime.server.http.routes import Route, RouteTable
from moonpool.runtime.server.listening import CannotListen, bound_sockets, serve
from moonpool.runtime.server.meter import Meter
from moonpool.runtime.server.restriction import Origins, Restriction
from moonpool.runtime.server.service import Service
from moonpool.runtime.server.tls import TlsServer

# Connections that wait in the kernel until somebody accepts them.
_BACKLOG = 4096
# For work that is too long for the loop but ends by itself, and for work that may wait for models.
_THREADS, _PATIENT_THREADS = 4, 16


class OpenAIPart(Protocol):
    """Gives HTTP the endpoints of OpenAI's API."""

    def routes(self) -> list[Route]:
        """Return the routes of all endpoints."""

    def port_routes(self) -> list[Route]:
        """Return what a port for this API alone has beside those."""


class HttpServer:
    """Serves until it is drained or closed. For the thread of the loop that it was made in."""

    def __init__(
        self,
        service: Service,
        options: HttpOptions,
        make_openai: Callable[[Service, Executor], OpenAIPart],
        together: AllClients | None = None,
    ) -> None:
        """`make_openai` makes the endpoints of OpenAI's API, with an executor that waits for models.

        `together` counts the clients of all ports of the process.
        """
        self.ports: dict[str, int] = {}
        """The ports that are served, by "http", "openai" and "metrics"."""
        self._service = service
        self._options = options
        self._make_openai = make_openai
        self._addresses = {
            "http": options.address,
            "openai": options.openai_address,
            "metrics": options.metrics_address,
        }
        self._together = together or AllClients()
        self._parts: list[tuple[asyncio.Server | TlsServer, HttpPort]] = []
        self._executor = TaskPool(_THREADS, "moonpool-http")
        self._patient = TaskPool(_PATIENT_THREADS, "moonpool-control")

    async def start(self) -> None:
        """Take the ports, unless that was done, and serve. Raises what `bind` raises."""
        if not self._parts:
            await self.bind()
        for name, (server, _) in zip(self.ports, self._parts, strict=True):
            try:
                await serve(server)
            except OSError as error:
                raise CannotListen(name, self._addresses[name], self.ports[name], error) from error

    async def bind(self) -> None:
        """Take the ports; nobody is served before `start`.

        Raises `CannotListen`, and `OSError` for bad certificates.
        """
        options, service, loop = self._options, self._service, asyncio.get_running_loop()
        try:
            places = {"http": (options.address, options.port), "openai": (options.openai_address, options.openai_port)}
            if any(port is not None for _, port in places.values()):
                context, handlers = _tls(options), self._make_handlers()
                for name, (address, port) in places.items():
                    if port is not None:
                        await self._listen(name, address, port, handlers[name], context)
            if options.metrics_port is not None:
                # On the threads for short work: monitoring must not wait for models.
                table = RouteTable(loop, self._executor, metrics_routes(service, self._executor))
                await self._listen(
                    "metrics",
                    options.metrics_address,
                    options.metrics_port,
                    MetricsHandler(table, self._origins(options.metrics_address)),
                    None,
                )
        except BaseException:
            self.close()
            raise

    def _make_handlers(self) -> dict[str, HttpHandler]:
        """Return the handlers of the ports for HTTP and for OpenAI's API. Long bodies of both wait for each other."""
        options, service, loop = self._options, self._service, asyncio.get_running_loop()
        endpoints = self._make_openai(service, self._patient)
        service.overview.has_openai = options.allow_openai
        routes = {
            "http": [
                *control_routes(service, self._patient),
                *page_routes(service.overview, self._executor),
                *signposts(options, self.ports),
                *(endpoints.routes() if options.allow_openai else ()),
            ],
            "openai": [
                *endpoints.routes(),
                *endpoints.port_routes(),
                *(metrics_routes(service, self._executor) if options.metrics_port is not None else ()),
            ],
        }
        inference = HttpInference(service, loop, self._executor, options.limits)
        restriction = Restriction(options.restricted, options.control_token, options.openai_restricted)
        return {
            name: HttpHandler(
                inference,
                RouteTable(loop, self._executor, found),
                restriction,
                self._origins(options.openai_address if name == "openai" else options.address),
                options.header_forward_pattern,
                is_openai=name == "openai",
            )
            for name, found in routes.items()
        }

    def _origins(self, address: str) -> Origins:
        """Make the check of what browsers send to a port at this address."""
        return Origins(self._options.allowed_origins, is_loopback=_is_loopback(address))

    async def _listen(self, name: str, address: str, number: int, handler: Handler, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        limits = self._options.limits
        port = HttpPort(loop, handler, limits, self._clients(name))
        reuse_port = self._options.reuse_port
        server: asyncio.Server | TlsServer
        try:
            if tls is not None:
                sockets = await bound_sockets(address, number, reuse_port=reuse_port)
                server = TlsServer(port, sockets, tls, _BACKLOG)
            else:
                server = await loop.create_server(
                    port, address, number, backlog=_BACKLOG, reuse_port=reuse_port or None, start_serving=False
                )
        except OSError as error:
            raise CannotListen(name, address, number, error) from error
        self._parts.append((server, port))
        self.ports[name] = server.sockets[0].getsockname()[1]

    def _clients(self, name: str) -> Clients[HttpConnection]:
        limits, together = self._options.limits, self._together
        if name != "metrics":
            meter = self._service.metrics.frontends.http
            title = "HTTP" if name == "http" else "the port for OpenAI's API"
            return clients_of(title, limits.connections, together, meter)
        # A meter that nobody reads: requests for metrics are no traffic.
        few = limits.metrics_connections
        return clients_of("the port for metrics", few, together, Meter(), is_apart=True)

    async def drain(self, timeout_s: float) -> bool:
        """Take no more connections, finish the requests in flight, and close the server.

        Returns False if some were not finished in time and were cut off.
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
