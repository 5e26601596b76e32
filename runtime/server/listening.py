"""The ports and connections of a server: sockets to listen with, open files, and the number of clients that they
allow.
"""

from __future__ import annotations

import asyncio
import asyncio.trsock
import contextlib
import errno
import os
import resource
import socket
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.server.options.table import ServerOptions


class CannotListen(MoonpoolError):
    """An address or a port at which the server cannot listen."""

    code = "UNAVAILABLE"

    def __init__(self, protocol: str, address: str, port: int, error: OSError) -> None:
        # Errors of event loops have words of their own around the system's.
        is_system_s = error.errno is not None and error.errno > 0
        why = os.strerror(error.errno) if is_system_s else error.strerror or str(error)  # type: ignore[arg-type]
        if error.errno == errno.EADDRINUSE:
            flag = f"--reuse-{'grpc' if protocol == 'grpc' else 'http'}-port=true"
            why += f"; servers of one user share a port if all of them have {flag}"
        elif error.errno == errno.EACCES:
            why += "; take a port from 1024 on, or give the server CAP_NET_BIND_SERVICE"
        elif error.errno == errno.EADDRNOTAVAIL:
            why += "; this machine has no such address, 0.0.0.0 is all that it has"
        super().__init__(f"cannot listen at {address}, port {port} ({protocol}): {why}")


async def bound_sockets(address: str, port: int, *, reuse_port: bool) -> list[socket.socket]:
    """Bind sockets to this port, one for each address of the name; none listens yet. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    try:
        for family, kind, protocol, _, place in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            bound.append(one)
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                # IPv4 has a socket of its own.
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(place)
    except OSError:
        for one in bound:
            one.close()
        raise
    return bound


class ListeningServer(Protocol):
    """A server whose sockets are bound."""

    @property
    def sockets(self) -> Sequence[socket.socket | asyncio.trsock.TransportSocket | None]:
        """Return its sockets. uvloop has None, or a closed one, where it closed a socket."""

    async def start_serving(self) -> None:
        """Listen, and accept clients from now on."""


async def serve(server: ListeningServer) -> None:
    """Have a server accept clients from now on. Raises `OSError`.

    Two servers that start at the same time may both bind a port, but only the first one may listen. uvloop closes the
    socket of the other one and raises nothing.
    """
    await server.start_serving()
    if any(each is None or each.fileno() < 0 for each in server.sockets):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


_FILES = resource.RLIMIT_NOFILE
# Enough for the connections of the default options. Not more, as models inherit the limit, and some programs close
# every number up to it.
_ENOUGH = 1 << 16
# For so many connections of HTTP, one may be open to be told that there are too many, and one may be open on the port
# for metrics.
_PER_TOLD = _PER_SCRAPER = 8


class Connections(NamedTuple):
    """The most connections at the same time."""

    http: int
    grpc: int
    metrics: int
    together: int
    """The most of HTTP and gRPC together."""


def raise_limit() -> None:
    """Raise the limit of open files as far as the system allows, see setrlimit(2).

    A shell's limit is for programs without clients.
    """
    before, most = resource.getrlimit(_FILES)
    wanted = _ENOUGH if most == resource.RLIM_INFINITY else min(most, _ENOUGH)
    if before != resource.RLIM_INFINITY and before < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(_FILES, (wanted, most))


def wanted(options: ServerOptions) -> Connections:
    http = options.http_max_connections
    grpc = options.grpc_max_connections if options.allow_grpc else 0
    metrics = max(1, http // _PER_SCRAPER)
    most = options.max_connections
    if most is None:
        return Connections(http, grpc, metrics, http + grpc)
    # Whoever monitors has places that clients cannot take.
    metrics = min(metrics, max(1, most // _PER_SCRAPER))
    together = max(1, most - metrics)
    return Connections(min(http, together), min(grpc, together), metrics, together)


def connections(options: ServerOptions) -> Connections:
    """Return the limits of the options, reduced in proportion if they would leave less than half of the descriptors.

    Stubs need that half to be started again.
    """
    asked = wanted(options)
    descriptors = asked.together + asked.metrics + asked.http / _PER_TOLD
    limit, _ = resource.getrlimit(_FILES)
    part = 1.0 if limit == resource.RLIM_INFINITY else min(1.0, limit / 2 / max(1, descriptors))
    return Connections(*(max(1, int(each * part)) for each in asked))
