"""One front end as the main process sees it: its process, its end of the directory, its heartbeat.

Theory of operation. Any thread may send to a front end, also one that holds a lock, and a front end may be slow to read. So
`send` only appends to a queue, and a thread of its own writes to the socket and may block there. That thread owns the
descriptors of a message until they are sent. A message that cannot be sent is lost, and a front end without it would serve
models that are unloaded, so it is killed. The reactor reads the socket, without ever blocking, and notices its end.

The heartbeat finds front ends that were stopped or hang. The kernel goes on giving connections to such a process, and their
clients would wait for ever. PING travels through the front end's event loop and its reactor, so PONG proves that both run.
Late answers are counted in turns of this process's reactor and not in seconds: while this process itself was stopped, no
turn passed.

`end` closes in this order: the process, which unblocks the sender; the sender, after which nobody writes; the socket, on
the reactor's thread, as that may be reading it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import encode
from moonpool.ipc.errors import Closed, PeerGone, ProtocolError
from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.child import SpawnedProcess
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.spawner import spawn, working_folder
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.server.pool.messages import End, Word, codec

_log = RuntimeLog("moonpool")
_STDERR = 2
_EXIT_S = 5.0
# The time between two heartbeats, and the turns in a row that a front end may leave unanswered.
_BEAT_S = 1.0
_MOST_BEATS, _MOST_BEATS_AT_START = 10, 60
# Turns in which a front end used so much processor time count apart, up to a larger number. Parsing a body as large as the
# limits allow takes long, and clients must not be able to end a front end by such bodies.
_MOST_BUSY_BEATS = 120
_BUSY_S = 0.05
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_Item = tuple[bytes, tuple[int, ...]]


class FrontEndProcess:
    """Starts, watches and ends one front end.

    Any thread may `send`. `on_message` and `gone` are called on the reactor's thread.
    """

    def __init__(
        self,
        name: str,
        reactor: Reactor,
        on_message: Callable[[FrontEndProcess, list[Any]], None],
        gone: Callable[[FrontEndProcess], None],
    ) -> None:
        """Start the process. Raises `OSError`, `OutOfThreads` among them."""
        self.name = name
        self.is_listening = threading.Event()
        self._reactor = reactor
        self._on_message = on_message
        self._gone = gone
        self._codec = codec(End.MAIN)
        self._channel, end = Channel.pair()
        self._is_gone = False
        # The turns since a PING that is not answered yet, idle and busy ones, and the processor time at the last turn.
        self._beats = self._busy_beats = 0
        self._used_s = 0.0
        try:
            self.process = SpawnedProcess(
                spawn(
                    [
                        sys.executable,
                        "-m",
                        "moonpool.runtime.server.pool.front_end",
                        name,
                        str(end.fileno()),
                        str(os.getpid()),
                    ],
                    environment=_environment(),
                    folder=working_folder(),
                    output_fd=_STDERR,
                    fds=(end.fileno(),),
                )
            )
        except BaseException:
            self._channel.close()
            raise
        finally:
            end.close()
        self._messages: SimpleQueue[_Item | None] = SimpleQueue()
        self._sender = threading.Thread(
            target=self._send, name=f"moonpool-send-{name}", daemon=True
        )
        try:
            start_thread(self._sender)
        except OutOfThreads:
            self.process.kill()
            self.process.wait(_EXIT_S)
            self.process.close()
            self._channel.close()
            raise
        reactor.watch(self._channel.fileno(), self._read)

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Send the options, and begin the heartbeat."""
        self.send_with_file(Word.SETTINGS, contents=settings)
        self.send(Word.PING)
        self._reactor.call_later(_BEAT_S, self._beat)

    def _beat(self) -> None:
        """Count a turn, and kill the process if it has left too many unanswered."""
        if self._is_gone:
            return
        used_s, before_s = _processor_time_s(self.process.pid), self._used_s
        self._used_s = used_s
        # A front end that works without answering is parsing something large, and gets more turns than one that is stopped.
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

    def send(self, *message: object, fds: tuple[int, ...] = ()) -> None:
        """Send a message, soon; never blocks. Owns the descriptors."""
        self._messages.put((encode(*message), fds))

    def send_with_file(self, *message: object, contents: Mapping[str, Any]) -> None:
        """Send a message with a file of JSON."""
        self.send(*message, fds=(_file_of(contents),))

    def _send(self) -> None:
        while (item := self._messages.get()) is not None:
            packet, fds = item
            try:
                with suppress(PeerGone, Closed):  # `_read` notices the end
                    self._channel.send_waiting_with(packet, fds)
            except Exception:
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
                    self._on_message(self, fields)
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
            self.send(Word.PING)

    def _leave(self) -> None:
        if not self._is_gone:
            self._is_gone = True
            self._reactor.forget(self._channel.fileno())
            self._gone(self)

    def end(self) -> None:
        """Kill the process if it still runs, and close everything. Not for the reactor's thread, which this waits for."""
        self.process.kill()
        if self.process.wait(_EXIT_S) is None:
            _log.error("[%s] cannot be killed: %s", self.name, repr(self.process))
        self._messages.put(None)
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
            # The name comes before and may contain anything, also a parenthesis.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _environment() -> dict[str, str]:
    """Return the environment of this process, with the folder of this package on the path."""
    # Not resolved: the folders of the package may be links.
    folder = str(Path(__file__).parents[4])
    paths = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _file_of(contents: Mapping[str, Any]) -> int:
    fd = os.memfd_create("moonpool-directory", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(json.dumps(contents).encode())
    # The descriptor that is sent shares its offset with this one, and the reader begins there.
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
