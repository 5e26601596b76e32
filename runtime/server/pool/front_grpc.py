"""gRPC in a front end: ModelInfer of plain models is answered here, all other calls are passed on to the main process.

Theory of operation. Calls come from the thread of the event loop, which must not block. A call with one message is
passed on as a future, and its callback, on a thread of the library, answers the client. A stream has a thread of its own,
which waits for the main process's messages. Each direction holds one message: the next one is read when the other side has
taken the one before, so nothing piles up for a side that does not read. `_room` is the semaphore for the way back.

A client that goes ends both directions (`_gone`): it cancels the call to the main process, releases `_room`, which the
thread may be waiting for, and puts None into the queue of questions, which the library's iterator may be waiting for. A
drain only ends the questions, and the answers to those that were asked still come.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import grpc

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.hosting.model_control import version_of
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.server.clients import AllClients
from moonpool.runtime.server.grpc.call import GrpcCall, Method
from moonpool.runtime.server.grpc.infer_request import InferMessage
from moonpool.runtime.server.grpc.inference import GrpcInference
from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.grpc.server import GrpcServer
from moonpool.runtime.server.grpc.status import ENDING, Status
from moonpool.runtime.server.inference.request import Hosted
from moonpool.runtime.server.pool.attached import AttachedModel
from moonpool.runtime.server.service import Service
from moonpool.runtime.stubs.regions import CallerMemory

_INFER, _STREAM = b"ModelInfer", b"ModelStreamInfer"
_SHARED = b"shared_memory_region"


class FrontGrpcInference(GrpcInference):
    """Answers ModelInfer with the stubs of the main process."""

    def __init__(
        self,
        relay: GrpcRelay,
        service: Service,
        loop: asyncio.AbstractEventLoop,
        options: GrpcOptions,
    ) -> None:
        super().__init__(service, loop, options)
        self._relay = relay

    def find(self, message: InferMessage) -> Hosted:
        hosted: Hosted = self.service.models.find(message.model, version_of(message.version))
        return hosted

    def caller_memory(self, hosted: Hosted) -> CallerMemory | None:
        model: AttachedModel = hosted  # type: ignore[assignment]
        return model.memory

    def place(self, first: bytes, size_bytes: int) -> InferMessage | None:
        # What may be passed on must not lie where a stub could change it.
        return None if _SHARED in first else super().place(first, size_bytes)

    def is_ours(self, call: GrpcCall, data: bytes | InferMessage) -> bool:
        if isinstance(data, InferMessage) or _SHARED not in data:
            return True
        # The main process has the memory that clients have registered.
        self._relay.pass_on(call, data)
        return False

    def refuse(self, call: GrpcCall, message: InferMessage, error: MoonpoolError) -> None:
        if message.is_placed:  # the model has gone meanwhile
            super().refuse(call, message, error)
        else:
            # The main process knows all models, and the error for a name that it does not know.
            self._relay.pass_on(call, message.data)


class FrontGrpcServer(GrpcServer):
    """Listens at the public port, beside the other front ends."""

    def __init__(
        self,
        service: Service,
        options: GrpcOptions,
        upstream: str,
        together: AllClients | None = None,
    ) -> None:
        """`upstream` is the address at which the main process listens."""
        self._relay = GrpcRelay(upstream)
        super().__init__(service, options, together)

    def make_inference(
        self, service: Service, loop: asyncio.AbstractEventLoop, options: GrpcOptions
    ) -> GrpcInference:
        return FrontGrpcInference(self._relay, service, loop, options)

    def methods(self) -> dict[bytes, Method]:
        found = super().methods()
        for path, method in found.items():
            if path.endswith(_STREAM):
                found[path] = method._replace(handle=self._relay.handle_stream, place=None)
            elif not path.endswith(_INFER):
                found[path] = method._replace(handle=self._relay.handle)
        return found

    def close(self) -> None:
        super().close()
        self._relay.close()


_NO_LIMIT = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
# Metadata of one connection, which the library sets anew on another one.
_OWN = ("user-agent", "content-type", "te", "accept-encoding")


class GrpcRelay:
    """Passes calls on to the main process. Thread-safe. No method blocks."""

    def __init__(self, target: str) -> None:
        """`target` is the address at which the main process listens."""
        self._channel = grpc.insecure_channel(target, options=_NO_LIMIT)

    def handle(self, call: GrpcCall) -> None:
        """Pass on a call with one message in each direction."""
        call.receive(lambda data: self.pass_on(call, data))

    def pass_on(self, call: GrpcCall, data: bytes | None) -> None:
        """Do as `handle`, for a call whose message was read."""
        if data is None:
            call.fail(Status("UNIMPLEMENTED", "the request has no message"))
            return
        # The main process counts it.
        call.received_ns = 0
        ask: Any = self._channel.unary_unary(call.method.decode())
        future = ask.future(data, metadata=_metadata(call), wait_for_ready=False)
        future.add_done_callback(lambda done: _answer(call, done))
        call.when_gone(future.cancel)

    def handle_stream(self, call: GrpcCall) -> None:
        """Pass on a call with a stream in each direction."""
        _Stream(self._channel, call).begin()

    def close(self) -> None:
        """Cancel the calls in flight."""
        self._channel.close()


def _metadata(call: GrpcCall) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (key, value)
        for key, value in call.metadata
        if key not in _OWN and not key.startswith(("grpc-", ":"))
    )


def _answer(call: GrpcCall, done: Any) -> None:
    if done.code() is grpc.StatusCode.OK:
        call.reply(done.result())
    else:
        call.fail(Status(done.code().name, done.details() or ""))


class _Stream:
    """One call with a stream in each direction, and the thread that passes the answers back."""

    def __init__(self, channel: grpc.Channel, call: GrpcCall) -> None:
        self._channel = channel
        self._call = call
        self._asked: SimpleQueue[bytes | None] = SimpleQueue()
        self._room = threading.Semaphore(1)
        self._answers: Any = None
        # The client has sent its last message; the server drains, and the client might have sent more.
        self._has_all = self._is_draining = False

    def begin(self) -> None:
        """Open the stream to the main process."""
        ask: Any = self._channel.stream_stream(self._call.method.decode())
        self._answers = ask(self._questions(), metadata=_metadata(self._call))
        self._call.when_gone(self._gone)
        self._call.when_draining(self._drain)
        thread = threading.Thread(target=self._pass_back, name="moonpool-grpc-relay", daemon=True)
        try:
            start_thread(thread)
        except OutOfThreads:
            self._gone()
            raise

    def _questions(self) -> Iterator[bytes]:
        self._call.receive(self._asked.put)
        while (data := self._asked.get()) is not None:
            yield data
            self._call.receive(self._asked.put)
        self._has_all = True

    def _drain(self) -> None:
        """Take no more messages of the client, as the server ends. Those that came are still answered."""
        self._is_draining = not self._has_all
        self._asked.put(None)

    def _gone(self) -> None:
        self._answers.cancel()
        self._asked.put(None)
        self._room.release()

    def _pass_back(self) -> None:
        # The status that the stream ends with is read below.
        with contextlib.suppress(grpc.RpcError):
            for answer in self._answers:
                # The next answer waits until the client has taken this one.
                self._room.acquire()
                if not self._call.send((answer,), self._room.release):
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
