"""The process of a front end: `python -m moonpool.runtime.frontend.pool.front_end NAME FD PARENT`.

It listens on the server's ports, answers requests for inference of plain models itself, and passes everything
else on to the main process, which started it and is at the other end of the directory, the socket FD. It ends with its parent,
the process PARENT.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import encode
from moonpool.ipc.errors import PeerGone
from moonpool.runtime.event_loop import run
from moonpool.runtime.frontend.pool.front_http import FrontHttpServer
from moonpool.runtime.frontend.pool.front_service import FrontService
from moonpool.runtime.frontend.pool.guest_models import GuestModels
from moonpool.runtime.frontend.pool.messages import End, Word, codec
from moonpool.runtime.frontend.pool.settings import grpc_options, http_options
from moonpool.runtime.reactor import Reactor
from moonpool.runtime.server.log_lines import LogOptions, ServerLog, logged
from moonpool.runtime.spawner import die_with

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator

    from moonpool.runtime.frontend.pool.front_grpc import FrontGrpcServer

_log = logging.getLogger("moonpool")


class FrontEnd:
    """Runs once, on the main thread."""

    def __init__(self, channel: Channel, settings: dict[str, Any]) -> None:
        self._channel = channel
        self._settings = settings
        self._reactor = Reactor()
        self._models = GuestModels(
            self._reactor, ThreadPoolExecutor(1, "moonpool-execute"), self._tell, Path("/")
        )
        self._http: FrontHttpServer | None = None
        self._grpc: FrontGrpcServer | None = None
        self._stopping: asyncio.Future[float]
        self._loop: asyncio.AbstractEventLoop

    async def run(self) -> int:
        """Serve until the main process says STOP; the exit code: 0 if all requests were finished."""
        self._loop = asyncio.get_running_loop()
        self._stopping = self._loop.create_future()
        threading.Thread(target=self._listen, name="moonpool-directory", daemon=True).start()
        await self._start()
        self._tell(Word.LISTENING)
        is_drained = await self._drain(await self._stopping)
        left = threading.Event()
        self._reactor.call_soon(self._models.leave)
        self._reactor.call_soon(left.set)
        left.wait()
        return 0 if is_drained else 1

    async def _start(self) -> None:
        settings, service = self._settings, FrontService(self._models)
        if settings["http"] is not None:
            options, upstream = http_options(settings["http"]), f"{settings['folder']}/http"
            self._http = FrontHttpServer(service, options, upstream)
            await self._http.start()
        if settings["grpc"] is not None:
            # Not for those who serve HTTP alone: they need not have gRPC installed.
            from moonpool.runtime.frontend.pool.front_grpc import FrontGrpcServer

            upstream = f"unix:{settings['folder']}/grpc"
            self._grpc = FrontGrpcServer(service, grpc_options(settings["grpc"]), upstream)
            self._grpc.start()

    async def _drain(self, timeout_s: float) -> bool:
        drains: list[Awaitable[bool]] = []
        if self._http is not None:
            drains.append(self._http.drain(timeout_s))
        if self._grpc is not None:
            drains.append(asyncio.to_thread(self._grpc.drain, timeout_s))
        return all(await asyncio.gather(*drains))

    # Theory of operation: this process knows only what the directory says, message after message. If one of
    # them were lost, unloaded models would go on answering, and loads would wait for ever. So any
    # error while a message is sent or handled ends the process, and the main process starts another one.

    def _tell(self, *message: object) -> None:
        with _ending_with_an_error():
            self._channel.send_waiting(encode(*message))

    def _listen(self) -> None:
        """The thread of the directory: what it hears is done on the reactor's, in order."""
        words = codec(End.FRONT)
        with _ending_with_an_error():
            while True:
                packet, fds = self._channel.receive_with_fds()
                fields = words.decode(packet)
                if fields[0] == Word.STOP:
                    self._loop.call_soon_threadsafe(self._stop, fields[1] / 1000)
                elif fields[0] == Word.SET_ASIDE:
                    # Not on the reactor's thread, which may be waiting for it.
                    self._models.memory.answered(fds, *fields[1:])
                elif fields[0] == Word.PING:
                    # Through the loop and the reactor, since clients would wait for ever if one of them hung. A loop that
                    # is closed raises RuntimeError: the process is about to end.
                    with contextlib.suppress(RuntimeError):
                        self._loop.call_soon_threadsafe(
                            self._reactor.call_soon, partial(self._tell, Word.PONG)
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
    """End the process if something fails inside: the main process is gone, or this process has lost one of its messages."""
    try:
        yield
    except PeerGone:
        os._exit(1)
    except BaseException:
        _log.exception("the front end has lost what the main process told it, and ends")
        logging.shutdown()
        os._exit(1)


def _settings(channel: Channel) -> dict[str, Any]:
    """The first message of the directory."""
    packet, fds = channel.receive_with_fds()
    codec(End.FRONT).decode(packet)
    with open(fds[0], "rb") as file:
        settings: dict[str, Any] = json.loads(file.read())
    return settings


def main() -> int:
    """Read the arguments, serve, and return the exit code."""
    die_with(int(sys.argv[3]))
    # Whoever ends the server tells the main process, and that tells its front ends.
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
    logging.shutdown()
    # Not sys.exit: threads that wait for more to do would keep the process.
    os._exit(code)
