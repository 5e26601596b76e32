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
from moonpool.runtime.frontend.pool.messages import End, Word, codec
from moonpool.runtime.process import SpawnedProcess
from moonpool.runtime.spawner import spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moonpool.runtime.reactor import Reactor

_log = logging.getLogger("moonpool")
_STDERR = 2
_EXIT_S = 5.0
# The time between two heartbeats, and the turns in a row that a front end may leave unanswered. Turns are counted, not
# seconds: while this process itself did not run, no front end is late.
_BEAT_S = 1.0
_MOST_BEATS, _MOST_BEATS_AT_START = 10, 60
# Turns in which it used so much processor time count apart, up to a larger number: to parse a body as large as the limits
# allow takes long, and clients must not be able to end a front end by such bodies.
_MOST_BUSY_BEATS = 120
_BUSY_S = 0.05
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
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
        # Turns since a PING that is not answered yet, and the processor time of the process at the last one.
        self._beats = self._busy_beats = 0
        self._used_s = 0.0
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

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Tell it what to listen on, and from now on end it if it does not answer."""
        self.tell_with_file(Word.SETTINGS, contents=settings)
        self.tell(Word.PING)
        self._reactor.call_later(_BEAT_S, self._beat)

    def _beat(self) -> None:
        """End a process that was stopped or hangs. The kernel goes on giving it clients, who would wait for ever."""
        if self._is_gone:
            return
        used_s, before_s = _processor_time_s(self.process.pid), self._used_s
        self._used_s = used_s
        if used_s - before_s >= _BUSY_S:
            self._busy_beats += 1
        else:
            self._beats += 1
        most = _MOST_BEATS if self.is_listening.is_set() else _MOST_BEATS_AT_START
        if self._beats > most or self._busy_beats > _MOST_BUSY_BEATS:
            turns = _MOST_BUSY_BEATS if self._busy_beats > _MOST_BUSY_BEATS else most
            _log.error("[%s] has not answered for %g s and is ended", self.name, turns * _BEAT_S)
            self.process.kill()
            return
        self._reactor.call_later(_BEAT_S, self._beat)

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
            except Exception:
                # The message is lost, and the front end must not serve without it.
                _log.exception("[%s] a message cannot be sent to it, so it is ended", self.name)
                self.process.kill()
            finally:
                for fd in fds:
                    os.close(fd)

    def _read(self) -> None:
        try:
            for _ in range(64):
                packet = self._channel.receive_ready()
                if packet is None:
                    return
                fields = self._codec.decode(packet)
                if fields[0] == Word.PONG:
                    self._answered()
                else:
                    self._heard(self, fields)
        except PeerGone:
            self._leave()
        except ProtocolError as error:
            _log.error("[%s] broke the protocol and was ended: %s", self.name, error)
            self.process.kill()
            self._leave()

    def _answered(self) -> None:
        self._beats = self._busy_beats = 0
        self._reactor.call_later(_BEAT_S, self._ping)

    def _ping(self) -> None:
        if not self._is_gone:
            self.tell(Word.PING)

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


def _processor_time_s(pid: int) -> float:
    """Return the processor time of a process; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # After the name, which may contain anything.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


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
