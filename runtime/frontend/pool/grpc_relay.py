"""RPCs that a front end does not answer itself: their bytes go to the main process, and its bytes come back."""

from __future__ import annotations

import contextlib
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc

from moonpool.runtime.frontend.grpc.status import Status
from moonpool.runtime.frontend.grpc.stream import ENDING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moonpool.runtime.frontend.grpc.call import Call

_NO_LIMIT = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
# What each connection says for itself.
_OWN = ("user-agent", "content-type", "te", "accept-encoding")


class GrpcRelay:
    """Handlers for calls. Thread-safe; nothing blocks but in threads of its own."""

    def __init__(self, target: str) -> None:
        """`target` is where the main process listens."""
        self._channel = grpc.insecure_channel(target, options=_NO_LIMIT)

    def handle(self, call: Call) -> None:
        """One message there, one back."""
        call.receive(lambda data: self.pass_on(call, data))

    def pass_on(self, call: Call, data: bytes | None) -> None:
        """As `handle`, with the message."""
        if data is None:
            call.fail(Status("UNIMPLEMENTED", "the request has no message"))
            return
        ask: Any = self._channel.unary_unary(call.method.decode())
        future = ask.future(data, metadata=_metadata(call), wait_for_ready=False)
        future.add_done_callback(lambda done: _answer(call, done))
        call.when_gone(future.cancel)

    def handle_stream(self, call: Call) -> None:
        """Any number there, any number back."""
        _Stream(self._channel, call).begin()

    def close(self) -> None:
        """End what is under way."""
        self._channel.close()


def _metadata(call: Call) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (key, value)
        for key, value in call.metadata
        if key not in _OWN and not key.startswith(("grpc-", ":"))
    )


def _answer(call: Call, done: Any) -> None:
    if done.code() is grpc.StatusCode.OK:
        call.reply(done.result())
    else:
        call.fail(Status(done.code().name, done.details() or ""))


class _Stream:
    """One RPC with a stream in each direction, and the thread that takes what comes back.

    Each way one message at a time: the next one is read when the other side has taken the one before, so that nothing piles
    up here.
    """

    def __init__(self, channel: grpc.Channel, call: Call) -> None:
        self._channel = channel
        self._call = call
        self._asked: SimpleQueue[bytes | None] = SimpleQueue()
        self._room = threading.Semaphore(1)
        self._answers: Any = None
        # Whether the client sends no more, and whether it might have, had the server not been about to end.
        self._has_all = self._is_draining = False

    def begin(self) -> None:
        """Open the stream to the main process."""
        ask: Any = self._channel.stream_stream(self._call.method.decode())
        self._answers = ask(self._questions(), metadata=_metadata(self._call))
        self._call.when_gone(self._gone)
        self._call.when_draining(self._drain)
        thread = threading.Thread(target=self._pass_back, name="moonpool-grpc-relay", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the machine has no thread to spare
            self._gone()
            raise

    def _questions(self) -> Iterator[bytes]:
        self._call.receive(self._asked.put)
        while (data := self._asked.get()) is not None:
            yield data
            self._call.receive(self._asked.put)
        self._has_all = True

    def _drain(self) -> None:
        """The server is about to end: what was asked is still answered."""
        self._is_draining = not self._has_all
        self._asked.put(None)

    def _gone(self) -> None:
        self._answers.cancel()
        self._asked.put(None)
        self._room.release()

    def _pass_back(self) -> None:
        # What it ends with is told below.
        with contextlib.suppress(grpc.RpcError):
            for answer in self._answers:
                # One at a time: who does not read is not sent more.
                self._room.acquire()
                if not self._call.send(answer, self._room.release):
                    self._answers.cancel()
                    self._room.release()
        self._room.acquire()
        self._asked.put(None)
        code = self._answers.code()
        if code is not grpc.StatusCode.OK:
            self._call.fail(Status(code.name, self._answers.details() or ""))
        elif self._is_draining:
            self._call.fail(ENDING)
        else:
            self._call.finish()
