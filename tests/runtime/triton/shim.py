"""The other end of a launcher's channel, as the library inside tritonserver is: for tests of the launcher alone."""

from __future__ import annotations

import io
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.waiting import Deadline

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import encode, unpack_layout
from moonpool.ipc.conversation import Conversation, Overflow
from moonpool.ipc.errors import PeerGone
from moonpool.ipc.messages import NO_CORE, Kind, Side
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.triton.install import LAUNCHER
from moonpool.runtime.triton.launcher_channel import LauncherChannel
from moonpool.runtime.triton.launching import Launcher
from moonpool.runtime.triton.messages import End, Word

_TIMEOUT_S = 60.0
_FP32 = 11


class Stub:
    """One generation of an instance, as far as it has come."""

    def __init__(self, born: list[Any], fds: list[int]) -> None:
        _, _, self.generation, self.pid, request, request_size, response, response_size = born
        control, calls, self.pidfd, request_fd, response_fd = fds
        self.control = Channel(socket.socket(fileno=control))
        self.calls = Channel(socket.socket(fileno=calls))
        self.requests = SharedRegion(request, request_size, request_fd)
        self.responses = SharedRegion(response, response_size, response_fd)
        self.started: list[Any] | None = None
        self._work: Conversation | None = None
        self._batch = 0

    def start(self, started: list[Any], fds: list[int]) -> None:
        self.started = started
        channel = Channel(socket.socket(fileno=fds[0]))
        self._work = Conversation(channel, Side.RUNTIME, Overflow(), after=Kind.LOADED)

    @property
    def work(self) -> Conversation:
        assert self._work is not None
        return self._work

    def infer(self, values: list[float]) -> list[float]:
        """One request with one input of FP32, which is answered with one output. Raises `PeerGone`."""
        data = np.array(values, np.float32)
        self.requests.memory()[: data.nbytes] = data.tobytes()
        layout = encode([[0, _FP32, [len(values)], 0, 0, data.nbytes]])
        self._batch += 1
        block = [self.requests.id, 0, data.nbytes]
        self.work.send(Kind.EXECUTE, self._batch, NO_CORE, [], [block], layout, None, None)
        return self.answer()

    def answer(self) -> list[float]:
        """Return the next message on the work channel, which must be an ANSWER of one output."""
        _, batch, _, _, _, blocks, packed, remarks, _ = self.work.receive()
        assert (batch, remarks) == (self._batch, None)
        ((tensor,),) = unpack_layout(packed)
        region_id, begin, _ = blocks[tensor[3]]
        (region,) = [r for r in (self.requests, self.responses) if r.id == region_id]
        data = bytes(region.memory()[begin + tensor[4] : begin + tensor[4] + tensor[5]])
        return [float(value) for value in np.frombuffer(data, np.float32)]

    def kill(self) -> None:
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        for channel in (self.control, self.calls, *([self._work.channel] if self._work else [])):
            channel.close()
        self.requests.close()
        self.responses.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Shim:
    """Starts a launcher as the library does, and talks to it. `close` ends both."""

    def __init__(
        self,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        options: Mapping[str, str] | None = None,
        backend: tuple[str, str] = ("python", "/opt/tritonserver/backends/python"),
    ) -> None:
        channel, end = Channel.pair()
        self.process = self._launch(end, python, environment)
        self._peer = LauncherChannel(channel, End.SHIM)
        self._heard: queue.SimpleQueue[tuple[list[Any], list[int]] | None] = queue.SimpleQueue()
        self._hearing = threading.Thread(target=self._hear)
        self._hearing.start()
        self.notes: list[tuple[int, str]] = []
        # The descriptors of the last message.
        self.fds: list[int] = []
        self.stubs: dict[int, Stub] = {}
        self._numbers = 0
        self.hello = self.hear(Word.HELLO)
        config = json.dumps({"cmdline": dict(options or {})})
        self.tell(Word.BACKEND, *backend, config, "triton 2.51.0")

    def _launch(self, end: socket.socket, python: str, environment: Mapping[str, str] | None) -> Any:
        """Start a launcher that owns this end."""
        # A server's sockets are inheritable, too.
        os.set_inheritable(end.fileno(), True)
        with end:
            return subprocess.Popen(
                [python, "-I", str(LAUNCHER), str(end.fileno())],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=dict(os.environ if environment is None else environment),
                close_fds=False,
            )

    def _hear(self) -> None:
        with suppress(PeerGone):
            while True:
                self._heard.put(self._peer.receive())
        self._heard.put(None)

    def tell(self, *message: object) -> None:
        self._peer.send(*message)

    def hear(self, *words: Word, timeout_s: float = _TIMEOUT_S) -> list[Any]:
        """The next message that is one of these, with what comes before it that concerns stubs noted."""
        deadline = Deadline(timeout_s)
        while True:
            try:
                heard = self._heard.get(timeout=deadline.remaining_s)
            except queue.Empty:
                raise AssertionError(f"none of {words} came; noted: {self.notes}") from None
            if heard is None:
                raise PeerGone(f"the launcher has ended; noted: {self.notes}")
            fields, fds = heard
            word = fields[0]
            if word == Word.NOTE:
                self.notes.append((fields[1], fields[2]))
            elif word == Word.BORN:
                if fields[1] in self.stubs:
                    self.stubs[fields[1]].close()
                self.stubs[fields[1]] = Stub(fields, fds)
            elif word == Word.STARTED:
                self.stubs[fields[1]].start(fields, fds)
            if word in words:
                self.fds = fds
                return fields

    def wait_for_note(self, text: str, *levels: int) -> None:
        """Wait for a note with this text, of one of these levels if there are any: the launcher's log has a thread of
        its own.
        """
        while not any(text in noted and level in (levels or (level,)) for level, noted in self.notes):
            self.hear(Word.NOTE)

    def load(self, directory: Path, config: Mapping[str, Any], *, completes: bool = False) -> list[Any]:
        """MODEL_READY or REFUSED of version 1 of the model in this directory."""
        self._numbers += 1
        name = directory.name
        text = json.dumps({"name": name, **config})
        self.tell(Word.MODEL, self._numbers, name, 1, str(directory), text, completes)
        return self.hear(Word.MODEL_READY, Word.REFUSED)

    def begin_start(self, model: int, name: str = "m_0", kind: str = "CPU", device: int = 0) -> int:
        """Ask for an instance; its number."""
        self._numbers += 1
        self.tell(Word.INSTANCE, self._numbers, model, name, kind, device)
        return self._numbers

    def start(self, model: int, name: str = "m_0") -> Stub:
        """An instance that was started."""
        number = self.begin_start(model, name)
        message = self.hear(Word.STARTED, Word.REFUSED)
        assert message[0] == Word.STARTED, message
        return self.stubs[number]

    def number_of(self, stub: Stub) -> int:
        return next(number for number, each in self.stubs.items() if each is stub)

    def lose(self, stub: Stub, *, is_executing: bool = True, is_shortage: bool = False, why: str = "") -> list[Any]:
        """Report a stub as lost, and return the fields of DIED."""
        number = self.number_of(stub)
        self.tell(Word.LOST, number, stub.generation, is_executing, is_shortage, why)
        return self.hear(Word.DIED)

    def end(self, stub: Stub) -> None:
        """Have an instance ended."""
        number = self.number_of(stub)
        self.tell(Word.END, number)
        assert self.hear(Word.ENDED) == [Word.ENDED, number]

    def stderr(self) -> str:
        """Return the launcher's stderr, once it has ended."""
        said: bytes = self.process.stderr.read()
        return said.decode()

    def close(self) -> None:
        self._peer.wake()
        self._hearing.join()
        self._peer.close()
        # These messages came last, and no test waited for them.
        while not self._heard.empty():
            _, fds = self._heard.get() or ([], [])
            for fd in fds:
                os.close(fd)
        for stub in self.stubs.values():
            stub.close()
        try:
            self.process.wait(_TIMEOUT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stderr.close()


class ShimHere(Shim):
    """Has its launcher in a thread of this process, where a test can get at it."""

    def _launch(self, end: socket.socket, *_: object) -> Any:
        peer = LauncherChannel(Channel(end), End.LAUNCHER)

        def run() -> None:
            try:
                Launcher(peer).run()
            finally:
                peer.close()

        thread = threading.Thread(target=run, name="test-launcher")
        thread.start()
        return SimpleNamespace(wait=thread.join, kill=lambda: None, stderr=io.BytesIO(), pid=os.getpid())
