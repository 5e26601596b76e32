"""One front end as the main process has it: its process, its directory, what it was told."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import encode
from moonpool.ipc.errors import Closed, PeerGone, ProtocolError
from moonpool.runtime.frontend.pool.messages import End, codec
from moonpool.runtime.process import SpawnedProcess
from moonpool.runtime.spawner import spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moonpool.runtime.reactor import Reactor

_log = logging.getLogger("moonpool")
_STDERR = 2
_EXIT_S = 5.0
_Item = tuple[bytes, tuple[int, ...]]


class Member:
    """Any thread may `tell`; `heard` and `gone` are called on the reactor's."""

    def __init__(
        self,
        name: str,
        reactor: Reactor,
        heard: Callable[[Member, list[Any]], None],
        gone: Callable[[Member], None],
    ) -> None:
        """Start the process. Raises OSError."""
        self.name = name
        self.is_listening = threading.Event()
        self._reactor = reactor
        self._heard = heard
        self._gone = gone
        self._codec = codec(End.MAIN)
        self._channel, end = Channel.pair()
        self._is_gone = False
        try:
            self.process = SpawnedProcess(
                spawn(
                    [
                        sys.executable,
                        "-m",
                        "moonpool.runtime.frontend.pool.front_end",
                        name,
                        str(end.fileno()),
                        str(os.getpid()),
                    ],
                    environment=_environment(),
                    folder=os.getcwd(),
                    output_fd=_STDERR,
                    fds=(end.fileno(),),
                )
            )
        except BaseException:
            self._channel.close()
            raise
        finally:
            end.close()
        # A front end may be behind with reading, and nobody who tells it something may wait for it.
        self._letters: SimpleQueue[_Item | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send, name=f"moonpool-{name}", daemon=True)
        try:
            self._sender.start()
        except RuntimeError as error:
            self.process.kill()
            self.process.wait(_EXIT_S)
            self.process.close()
            self._channel.close()
            raise OSError(errno.EAGAIN, str(error)) from error
        reactor.watch(self._channel.fileno(), self._read)

    def tell(self, *message: object, fds: tuple[int, ...] = ()) -> None:
        """Send a message, soon; never blocks. Owns the descriptors."""
        self._letters.put((encode(*message), fds))

    def tell_with_file(self, *message: object, contents: Mapping[str, Any]) -> None:
        """As `tell`, with a file of JSON."""
        self.tell(*message, fds=(_file_of(contents),))

    def _send(self) -> None:
        while (item := self._letters.get()) is not None:
            packet, fds = item
            try:
                with suppress(PeerGone, Closed):  # its end is seen elsewhere
                    self._channel.send_waiting_with(packet, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def _read(self) -> None:
        try:
            for _ in range(64):
                packet = self._channel.receive_ready()
                if packet is None:
                    return
                self._heard(self, self._codec.decode(packet))
        except PeerGone:
            self._leave()
        except ProtocolError as error:
            _log.error("[%s] broke the protocol and was ended: %s", self.name, error)
            self.process.kill()
            self._leave()

    def _leave(self) -> None:
        if not self._is_gone:
            self._is_gone = True
            self._reactor.forget(self._channel.fileno())
            self._gone(self)

    def end(self) -> None:
        """End the process if it is there still, and give everything up. Not for the reactor's thread."""
        self.process.kill()
        if self.process.wait(_EXIT_S) is None:
            _log.error("[%s] cannot be killed: %r", self.name, self.process)
        self._letters.put(None)
        self._channel.wake()
        self._sender.join()
        closed = threading.Event()

        def close() -> None:
            self._leave()
            self._channel.close()
            closed.set()

        self._reactor.call_soon(close)
        closed.wait(_EXIT_S)
        self.process.close()

    def __repr__(self) -> str:
        return f"<front end {self.name} {self.process!r}>"


def _environment() -> dict[str, str]:
    """That of this process; moonpool is where it is here."""
    # Not resolved: the folders of the package may be links.
    folder = str(Path(__file__).parents[4])
    paths = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _file_of(contents: Mapping[str, Any]) -> int:
    fd = os.memfd_create("moonpool-directory", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(json.dumps(contents).encode())
    # The place at which it is read is the same for all that have it.
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
