"""What a server with several front ends has beside one that serves by itself."""

from __future__ import annotations

import shutil
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.runtime.frontend.addresses import CannotListen
from moonpool.runtime.frontend.pool.fleet import Fleet
from moonpool.runtime.frontend.pool.settings import settings_of

if TYPE_CHECKING:
    from moonpool.runtime.frontend.grpc.options import GrpcOptions
    from moonpool.runtime.frontend.http.options import HttpOptions
    from moonpool.runtime.frontend.pool.directory import Directory
    from moonpool.runtime.reactor import Reactor
    from moonpool.runtime.server.log_lines import LogOptions


class FrontEnds:
    """Takes the public ports, and has front ends serve at them. For one thread at a time."""

    def __init__(
        self,
        count: int,
        directory: Directory,
        http: HttpOptions,
        grpc: GrpcOptions | None,
        log: LogOptions,
    ) -> None:
        """`directory` is the audience of the runtime whose models are served.

        `http` and `grpc` are what the server is to listen on; nothing is taken yet.
        """
        self._directory = directory
        self.ports: dict[str, int] = {}
        """The public ports, by "http" and "grpc"."""
        self._count = count
        self._log = log
        self._folder = Path(tempfile.mkdtemp(prefix="moonpool-"))
        self._http = http if http.port is not None else None
        self._grpc = grpc
        self._reserved: list[socket.socket] = []
        self._fleet: Fleet | None = None

    def own_http(self, public: HttpOptions) -> HttpOptions:
        """What the main process listens on in place of the public port."""
        if public.port is None:
            return public
        return replace(
            public, port=None, path=self._path("http"), certificate=None, private_key=None
        )

    def own_grpc(self, public: GrpcOptions) -> GrpcOptions:
        """As `own_http`."""
        return replace(
            public, address=f"unix:{self._path('grpc')}", use_ssl=False, use_ssl_mutual=False
        )

    def _path(self, name: str) -> str:
        return str(self._folder / name)

    def bind(self) -> None:
        """Take the public ports, so that nobody else has them. Raises `CannotListen`."""
        if self._http is not None and self._http.port is not None:
            self.ports["http"] = self._reserve("http", self._http.address, self._http.port)
        if self._grpc is not None:
            self.ports["grpc"] = self._reserve("grpc", self._grpc.address, self._grpc.port)

    def _reserve(self, name: str, address: str, port: int) -> int:
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                address, port, type=socket.SOCK_STREAM
            )[0]
            # Whoever has it may share it with processes of the same user; we do not want to be among them.
            with socket.socket(family, kind, protocol) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind(place)
            # It is not listened on, so it gets no connections.
            reserved = socket.socket(family, kind, protocol)
            self._reserved.append(reserved)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(place)
        except OSError as error:
            raise CannotListen(name, address, port, error) from error
        number: int = reserved.getsockname()[1]
        return number

    def start(self, reactor: Reactor) -> None:
        """Start the front ends; returns when they listen. The main process listens already. Raises `OSError`."""
        http, grpc = self._http, self._grpc
        if http is not None:
            http = replace(http, port=self.ports["http"], metrics_port=None, reuse_port=True)
        if grpc is not None:
            grpc = replace(grpc, port=self.ports["grpc"], reuse_port=True)
        settings = settings_of(http, grpc, str(self._folder), self._log)
        self._fleet = Fleet(self._directory, reactor, settings, self._count)
        self._fleet.start()

    def drain(self, timeout_s: float) -> bool:
        """Take no more connections, finish the requests that are there; False where some were cut off."""
        return True if self._fleet is None else self._fleet.drain(timeout_s)

    def close(self) -> None:
        """End everything at once. May be called many times."""
        if self._fleet is not None:
            self._fleet.close()
        for reserved in self._reserved:
            reserved.close()
        shutil.rmtree(self._folder, ignore_errors=True)
