"""The front ends of a server: the public ports, and as many processes as options ask for, each started again when it ends.

Theory of operation. One keeper thread for each slot starts a front end, sleeps on `_changed` until it has ended, and starts
the next one after a pause. The pause doubles while front ends end early, and begins anew after one that was well. Starting
and ending a process block, so neither the reactor nor the event loop may do it. The reactor only adds a front end that has
ended to `_gone`. `_lock` guards the slots, `_gone` and the flags; no keeper holds it while it starts, ends or waits for a
process.

Order of the end: `_is_stopping` is set first, so that no keeper starts another front end. `drain` then sends STOP to those
in the slots and waits for them together. `close` joins the keepers before it empties the slots: a keeper that was just
starting a process has put it into its slot by then, so none is left behind.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.server.http.options import HttpOptions
from moonpool.runtime.server.listening import CannotListen
from moonpool.runtime.server.log import LogOptions
from moonpool.runtime.server.pool.directory import Directory
from moonpool.runtime.server.pool.front_end_process import FrontEndProcess
from moonpool.runtime.server.pool.messages import Word
from moonpool.runtime.server.pool.settings import settings_of

if TYPE_CHECKING:
    from moonpool.runtime.server.grpc.options import GrpcOptions


class FrontEnds:
    """Takes the public ports, and has front ends listen at them. For one thread at a time."""

    def __init__(
        self,
        count: int,
        directory: Directory,
        http: HttpOptions,
        grpc: GrpcOptions | None,
        connections: int | None,
        log: LogOptions,
    ) -> None:
        """`directory` shares the stubs of the runtime whose models are served.

        `http` and `grpc` are the server's options with the public ports, and `connections` bounds all ports of one
        front end together. `bind` takes the ports.
        """
        self._directory = directory
        self.ports: dict[str, int] = {}
        """The public ports, by "http" and "grpc"."""
        self._count = count
        self._connections = connections
        self._log = log
        self._folder = Path(tempfile.mkdtemp(prefix="moonpool-"))
        self._http = http if http.port is not None else None
        self._grpc = grpc
        self._reserved: list[socket.socket] = []
        self._pool: FrontEndPool | None = None

    def own_http(self, public: HttpOptions) -> HttpOptions:
        """Return the options with which the main process listens for requests that front ends pass on."""
        if public.port is None:
            return public
        return replace(
            public, port=None, path=self._path("http"), certificate=None, private_key=None
        )

    def own_grpc(self, public: GrpcOptions) -> GrpcOptions:
        """Do as `own_http`, for gRPC."""
        return replace(
            public, address=f"unix:{self._path('grpc')}", use_ssl=False, use_ssl_mutual=False
        )

    def _path(self, name: str) -> str:
        return str(self._folder / name)

    def bind(self) -> None:
        """Reserve the public ports before anything else starts. Raises `CannotListen`."""
        if self._http is not None and self._http.port is not None:
            self.ports["http"] = self._reserve("http", self._http.address, self._http.port)
        if self._grpc is not None:
            self.ports["grpc"] = self._reserve("grpc", self._grpc.address, self._grpc.port)

    def _reserve(self, name: str, address: str, port: int) -> int:
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                address, port, type=socket.SOCK_STREAM
            )[0]
            # Another server of this user may have the port and let others share it. This one must not join it.
            with socket.socket(family, kind, protocol) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind(place)
            # It holds the port for the front ends. Nobody listens on it, so it gets no connections.
            reserved = socket.socket(family, kind, protocol)
            self._reserved.append(reserved)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            _bind(reserved, place)
        except OSError as error:
            raise CannotListen(name, address, port, error) from error
        number: int = reserved.getsockname()[1]
        return number

    def start(self, reactor: Reactor) -> None:
        """Start the front ends, and return when they listen. The main process must listen already. Raises `OSError`."""
        http, grpc = self._http, self._grpc
        if http is not None:
            http = replace(http, port=self.ports["http"], metrics_port=None, reuse_port=True)
        if grpc is not None:
            grpc = replace(grpc, port=self.ports["grpc"], reuse_port=True)
        settings = settings_of(http, grpc, self._connections, str(self._folder), self._log)
        self._pool = FrontEndPool(self._directory, reactor, settings, self._count)
        self._pool.start()

    def drain(self, timeout_s: float) -> bool:
        """Take no more connections, and finish the requests in flight; False if some were cut off."""
        return True if self._pool is None else self._pool.drain(timeout_s)

    def close(self) -> None:
        """End the front ends at once, and give the ports back. May be called many times."""
        if self._pool is not None:
            self._pool.close()
        for reserved in self._reserved:
            reserved.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _bind(reserved: socket.socket, place: Any) -> None:
    """Bind a socket that nobody will listen on to a free port. Raises `OSError`."""
    try:
        reserved.bind(place)
    except OSError:
        # The kernel still remembers connections of a server that has ended at this port. The option is not set before, because
        # another server could bind to a port that was bound with it, as long as nobody listens.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(place)


_log = RuntimeLog("moonpool")
_START_S = 30.0
# The pause before a front end is started again: the first one, and the longest of several in a row.
_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0
_HEALTHY_S = 30.0


class FrontEndPool:
    """Keeps `count` front ends running. Any thread but the reactor's may call any method."""

    def __init__(
        self,
        directory: Directory,
        reactor: Reactor,
        settings: Mapping[str, Any],
        count: int,
    ) -> None:
        """`settings` are those of `settings_of`."""
        self._directory = directory
        self._reactor = reactor
        self._settings = settings
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._is_stopping = False
        # Set when a front end could not be started, or ended before it listened.
        self._has_failed = False
        self._slots: list[FrontEndProcess | None] = [None] * count
        self._keepers = [
            threading.Thread(
                target=self._keep, args=(number,), name=f"moonpool-front-end-{number}", daemon=True
            )
            for number in range(count)
        ]
        self._gone: set[FrontEndProcess] = set()

    def start(self) -> None:
        """Start all of them, and return when they listen. Raises `OSError` if one does not, `OutOfThreads` among them."""
        try:
            for keeper in self._keepers:
                start_thread(keeper)
        except OutOfThreads:
            self.close()
            raise
        end_s = time.monotonic() + _START_S
        with self._lock:
            self._changed.wait_for(
                lambda: self._has_failed or self._all_listen(), max(0.0, end_s - time.monotonic())
            )
            is_well = self._all_listen() and not self._has_failed
        if not is_well:
            self.close()
            raise OSError("a front end does not listen; the log says why")

    def _all_listen(self) -> bool:
        return all(
            front_end is not None and front_end.is_listening.is_set() for front_end in self._slots
        )

    def _keep(self, number: int) -> None:
        """Start the front end of this slot again and again, until the end."""
        pause_s = _PAUSE_S
        while True:
            began_s = time.monotonic()
            front_end = self._start_one(number)
            with self._lock:
                while not (self._is_stopping or front_end is None or front_end in self._gone):
                    self._changed.wait()
                if self._is_stopping:
                    return
                self._slots[number] = None
                if front_end is not None:
                    self._gone.discard(front_end)
            if front_end is None or not front_end.is_listening.is_set():
                with self._lock:
                    self._has_failed = True
                    self._changed.notify_all()
            if front_end is not None:
                _log.error("[%s] has ended and is started again", front_end.name)
                self._directory.remove(front_end)
                front_end.end()
            pause_s = _PAUSE_S if time.monotonic() - began_s > _HEALTHY_S else pause_s * 2
            with self._lock:
                if self._changed.wait_for(
                    lambda: self._is_stopping, min(pause_s, _LONGEST_PAUSE_S)
                ):
                    return

    def _start_one(self, number: int) -> FrontEndProcess | None:
        try:
            front_end = FrontEndProcess(
                f"front_end_{number}", self._reactor, self._receive, self._lose
            )
        except OSError as error:
            _log.error("a front end cannot be started: %s", error)
            return None
        with self._lock:
            self._slots[number] = front_end
        try:
            front_end.begin(self._settings)
            self._directory.add(front_end)
        except (MoonpoolError, OSError) as error:
            _log.error(
                "[%s] killed: its initial state could not be sent: %s", front_end.name, error
            )
            # `_lose` follows, and the front end is started again after a pause.
            front_end.process.kill()
        return front_end

    def _receive(self, front_end: FrontEndProcess, fields: list[Any]) -> None:
        self._directory.receive(front_end, fields)
        if fields[0] == Word.LISTENING:
            with self._lock:
                self._changed.notify_all()

    def _lose(self, front_end: FrontEndProcess) -> None:
        with self._lock:
            self._gone.add(front_end)
            self._changed.notify_all()

    # The end

    def drain(self, timeout_s: float) -> bool:
        """Take no more connections, and finish the requests in flight; False if some were cut off."""
        with self._lock:
            self._is_stopping = True
            self._changed.notify_all()
            front_ends = [front_end for front_end in self._slots if front_end is not None]
        for front_end in front_ends:
            front_end.send(Word.STOP, int(timeout_s * 1000))
        end_s = time.monotonic() + timeout_s
        codes = [
            front_end.process.wait(max(0.0, end_s - time.monotonic())) for front_end in front_ends
        ]
        self.close()
        return all(code == 0 for code in codes)

    def close(self) -> None:
        """End all of them at once. May be called many times."""
        with self._lock:
            self._is_stopping = True
            self._changed.notify_all()
        for keeper in self._keepers:
            if keeper.ident is not None:
                keeper.join()
        with self._lock:
            front_ends = [front_end for front_end in self._slots if front_end is not None]
            self._slots = [None] * len(self._slots)
        for front_end in front_ends:
            self._directory.remove(front_end)
            front_end.end()
