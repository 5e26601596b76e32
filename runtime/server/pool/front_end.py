"""The process of a front end: `python -m moonpool.runtime.server.pool.front_end NAME FD PARENT`.

It listens at the server's public ports and answers inference of plain models itself. It passes all other requests on to the
main process, which started it, and which holds the other end of the directory, the socket FD. It ends with that process,
PARENT.

Theory of operation. Three threads serve. The main thread is the event loop of HTTP and gRPC. The reactor's thread owns the models: it
does what the directory says, reads the stubs' control channels, and reports counts. The thread of the directory only
receives. It hands each message to the reactor, in order, with two exceptions: SET_ASIDE, because the reactor may be the one
that waits for it, and STOP and PING, which go through the event loop.

This process knows nothing but what the directory says, message after message. If one of them were lost, unloaded models
would go on answering, and loads would wait for ever. So any error while a message is sent or handled ends the process with
`os._exit`, and the main process starts another one. The end of the directory means that the main process is gone. The
kernel kills this process then, too, as `die_with` has asked it to; whichever comes first is right.

Signals of a terminal reach all processes of the server. This one ignores them: the main process drains it in order, by
STOP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.ipc import signals
from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import encode
from moonpool.ipc.errors import PeerGone
from moonpool.runtime.log import RuntimeLog, flush
from moonpool.runtime.process.event_loop import run
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.spawner import die_with
from moonpool.runtime.process.threads import TaskPool, start_thread
from moonpool.runtime.server.clients import AllClients
from moonpool.runtime.server.log import LogOptions, ServerLog, logged
from moonpool.runtime.server.metrics import FrontendMetrics
from moonpool.runtime.server.pool.attached import AttachedModels
from moonpool.runtime.server.pool.front_http import FrontHttpServer
from moonpool.runtime.server.pool.messages import End, Word, codec
from moonpool.runtime.server.pool.settings import grpc_options, http_options
from moonpool.runtime.server.service import Service
from moonpool.runtime.server.shared_memory import SystemSharedMemory
from moonpool.runtime.server.tracing.traces import Traces

if TYPE_CHECKING:
    from moonpool.runtime.server.pool.front_grpc import FrontGrpcServer

_log = RuntimeLog("moonpool")
# Seconds that the reactor may take to leave the models. Its callbacks do not block, but the machine may be busy.
_LEAVE_S = 60.0


class _Metrics:
    """Stands for `ServerMetrics`: the protocols count in it, and nobody asks it for a text."""

    def __init__(self, frontends: FrontendMetrics) -> None:
        self.frontends = frontends

    def endpoint_load(self, _form: str) -> None:
        """Return nothing: the metrics of models are the main process's."""


class FrontService(Service):
    """The models of a front end. All other parts of a service are the main process's, to which requests for them are passed on."""

    def __init__(self, models: AttachedModels) -> None:
        self.models = models  # type: ignore[assignment]
        # Clients register their memory with the main process. Requests that name it are passed on.
        self.shared_memory = SystemSharedMemory()
        self.traces = Traces()
        self.capture = None
        self.metrics = _Metrics(models.traffic)  # type: ignore[assignment]


class FrontEnd:
    """A front end's life from LISTENING to the last count. Runs once, on the main thread."""

    def __init__(self, channel: Channel, settings: dict[str, Any]) -> None:
        self._channel = channel
        self._settings = settings
        self._reactor = Reactor()
        self._models = AttachedModels(
            self._reactor, TaskPool(1, "moonpool-execute"), self._send, Path("/")
        )
        self._http: FrontHttpServer | None = None
        self._grpc: FrontGrpcServer | None = None
        self._stopping: asyncio.Future[float]
        self._loop: asyncio.AbstractEventLoop

    async def run(self) -> int:
        """Serve until STOP comes, and return the exit code: 0 if all requests were finished."""
        self._loop = asyncio.get_running_loop()
        self._stopping = self._loop.create_future()
        listener = threading.Thread(target=self._listen, name="moonpool-directory", daemon=True)
        start_thread(listener)
        await self._start()
        self._send(Word.LISTENING)
        is_drained = await self._drain(await self._stopping)
        if not self._reactor.run(self._models.leave, _LEAVE_S):
            _log.error(
                "models were not released within %g s; the front end ends without waiting longer",
                _LEAVE_S,
            )
            return 1
        return 0 if is_drained else 1

    async def _start(self) -> None:
        settings, service = self._settings, FrontService(self._models)
        together = AllClients(settings["connections"])
        if settings["http"] is not None:
            options, upstream = http_options(settings["http"]), f"{settings['folder']}/http"
            self._http = FrontHttpServer(service, options, upstream, together)
            await self._http.start()
        if settings["grpc"] is not None:
            # A server of HTTP alone need not have gRPC's library installed.
            from moonpool.runtime.server.pool.front_grpc import FrontGrpcServer

            upstream = f"unix:{settings['folder']}/grpc"
            calls = grpc_options(settings["grpc"])
            self._grpc = FrontGrpcServer(service, calls, upstream, together)
            await self._grpc.bind()
            await self._grpc.start()

    async def _drain(self, timeout_s: float) -> bool:
        drains: list[Awaitable[bool]] = []
        if self._http is not None:
            drains.append(self._http.drain(timeout_s))
        if self._grpc is not None:
            drains.append(self._grpc.drain(timeout_s))
        return all(await asyncio.gather(*drains))

    # The directory

    def _send(self, *message: object) -> None:
        with _ending_with_an_error():
            self._channel.send_waiting(encode(*message))

    def _listen(self) -> None:
        """Receive messages, and hand them to the reactor in order. The thread of the directory."""
        words = codec(End.FRONT)
        with _ending_with_an_error():
            while True:
                packet, fds = self._channel.receive_with_fds()
                fields = words.decode(packet)
                if fields[0] == Word.STOP:
                    self._loop.call_soon_threadsafe(self._stop, fields[1] / 1000)
                elif fields[0] == Word.SET_ASIDE:
                    # The reactor's thread may be waiting for it.
                    self._models.memory.answered(fds, *fields[1:])
                elif fields[0] == Word.PING:
                    # PONG must prove that the loop and the reactor both run, as clients would wait for ever if one of them
                    # hung. A loop that is closed raises RuntimeError: the process is about to end.
                    with contextlib.suppress(RuntimeError):
                        self._loop.call_soon_threadsafe(
                            self._reactor.call_soon, partial(self._send, Word.PONG)
                        )
                else:
                    self._reactor.call_soon(partial(self._handle, fields, fds))

    def _handle(self, fields: list[Any], fds: list[int]) -> None:
        with _ending_with_an_error():
            self._models.handle(fields, fds)

    def _stop(self, timeout_s: float) -> None:
        if not self._stopping.done():
            self._stopping.set_result(timeout_s)


@contextlib.contextmanager
def _ending_with_an_error() -> Iterator[None]:
    """End the process if anything fails inside: the main process is gone, or one of its messages is lost."""
    try:
        yield
    except PeerGone:
        os._exit(1)
    except BaseException:
        _log.exception("the front end has lost a message of the main process, and ends")
        flush()
        os._exit(1)


def _settings(channel: Channel) -> dict[str, Any]:
    """Receive the first message of the directory, SETTINGS."""
    packet, fds = channel.receive_with_fds()
    codec(End.FRONT).decode(packet)
    with open(fds[0], "rb") as file:
        settings: dict[str, Any] = json.loads(file.read())
    return settings


def main() -> int:
    """Read the arguments, serve, and return the exit code."""
    die_with(int(sys.argv[3]))
    signals.use_defaults()
    # The main process gets them, too, and sends STOP.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[2])))
    try:
        settings = _settings(channel)
    except PeerGone:
        return 1
    with logged(ServerLog(LogOptions(**settings["log"]))):
        return run(FrontEnd(channel, settings).run())


if __name__ == "__main__":
    code = main()
    # sys.exit would wait for threads that wait for more work.
    os._exit(code)
