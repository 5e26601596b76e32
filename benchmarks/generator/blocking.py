"""A connection that sends one prepared request after the other and waits for each answer, for callers that have threads
of their own.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moonpool.benchmarks.generator.engine import Wire, WireError
from moonpool.benchmarks.generator.grpc import GrpcWire
from moonpool.benchmarks.generator.http import EventWire, HttpWire
from moonpool.runtime.client.request import METHOD, STREAM_METHOD, Endpoint, Unreachable

if TYPE_CHECKING:
    import ssl

_READ_BYTES = 1 << 16
# The type of `workers.Prepared`: a message, or its parts.
_Prepared = bytes | Sequence[bytes]


def make_wire(
    endpoint: Endpoint, requests: Sequence[_Prepared], headers: Sequence[tuple[str, str]], *, is_stream: bool = False
) -> Callable[[], Wire]:
    """Return a function that makes the protocol of a connection to a server."""
    if endpoint.scheme == "http":
        wire = EventWire if is_stream else HttpWire
        return lambda: wire(*requests)
    return lambda: GrpcWire(
        endpoint.authority,
        STREAM_METHOD if is_stream else METHOD,
        *requests,
        is_stream=is_stream,
        metadata=headers,
        is_tls=endpoint.tls is not None,
    )


def context_of(endpoint: Endpoint) -> ssl.SSLContext | None:
    """Return the context for TLS to a server; None without TLS. Raises `BadAddress` for files that are no
    certificates.
    """
    if endpoint.tls is None:
        return None
    return endpoint.tls.context("http/1.1" if endpoint.scheme == "http" else "h2")


class BlockingConnection:
    """A connection to a server. For one thread. It is opened when it is needed, and closed when nothing refers to
    it.
    """

    def __init__(self, endpoint: Endpoint, wire: Callable[[], Wire], timeout_s: float) -> None:
        self._endpoint = endpoint
        self._make_wire = wire
        self._timeout_s = timeout_s
        self._context = context_of(endpoint)
        self._socket: socket.socket | None = None
        self._wire = wire()

    def ask(self, kind: int) -> str:
        """Send the request of that number; return its outcome, as a `Wire` says it. Raises `Unreachable`."""
        sock = self._socket or self._opened()
        try:
            sock.sendall(b"".join(self._wire.begin(kind, 0)))
            while True:
                data = sock.recv(_READ_BYTES)
                if not data:
                    raise ConnectionResetError("the server closed the connection")
                outcome = self._wire.feed(data)
                if answer := self._wire.outgoing():
                    sock.sendall(b"".join(answer))
                if outcome is not None:
                    break
        except (OSError, WireError) as error:
            self.close()
            return str(error)
        if self._wire.closes:
            self.close()
        return outcome

    def _opened(self) -> socket.socket:
        address = self._endpoint.host, self._endpoint.port
        try:
            sock = socket.create_connection(address, self._timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_hostname=self._endpoint.host)
            self._wire = self._make_wire()
            if opening := self._wire.opening():
                sock.sendall(b"".join(opening))
        except OSError as error:
            raise Unreachable(f"no server answers at {self._endpoint.url}: {error}") from error
        self._socket = sock
        return sock

    def close(self) -> None:
        """Close the connection; the next request opens it again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.close()
