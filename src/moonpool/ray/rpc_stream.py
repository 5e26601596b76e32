"""ModelStreamInfer through the ingress: each request of a client's stream goes to a replica by itself, and their
answers become one stream.

As in Triton, models that give one response answer in the order of the requests, and decoupled ones as their responses
come. Ray does not keep the order of calls to a replica. So a request of a sequence is sent when the one before it has
been answered; requests that belong to no sequence are sent at once.

Theory of operation. One event loop runs everything. A task reads the client's requests and makes a task for each of
them, at most `_MOST_OPEN` at a time. These put answers into one queue, from which `answers` takes them. The queue is
short, so replicas wait for a client that reads slowly. A stream ends when all requests are answered, or with the first
status that is an error. Closing the generator cancels all tasks, and Ray then cancels what they wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from moonpool.ipc.errors import MoonpoolError
from moonpool.ray.handle import ModelHandle, translated
from moonpool.ray.local_server import RpcReply
from moonpool.ray.replica import Failure
from moonpool.runtime.errors import ModelNotFound
from moonpool.runtime.isolation.public_text import public_text
from moonpool.runtime.model.protobuf import BadProtobuf
from moonpool.runtime.server.grpc.call import Metadata
from moonpool.runtime.server.grpc.infer_request import InferMessage
from moonpool.runtime.server.grpc.infer_response import error_in_stream
from moonpool.runtime.server.grpc.methods import path_of
from moonpool.runtime.server.grpc.status import UNREADABLE, status_of

_MOST_OPEN, _MOST_WAITING = 256, 16


class RpcStream:
    def __init__(
        self, read: Callable[[bytes], tuple[str, str]], models: Mapping[str, ModelHandle], metadata: Metadata
    ) -> None:
        """`read` returns the model and the sequence of a request."""
        self.status: RpcReply | None = None
        """The status that ended the stream, if it is an error."""
        self._read = read
        self._models = models
        self._metadata = metadata
        self._answers: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_WAITING)
        self._room = asyncio.Semaphore(_MOST_OPEN)
        self._tasks: set[asyncio.Task[None]] = set()
        # The last request in order, and the last one of each sequence.
        self._last: asyncio.Task[None] | None = None
        self._sequences: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def answers(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the messages for the client."""
        self._add(asyncio.create_task(self._begin_all(requests)))
        try:
            while self.status is None:
                message = await self._answers.get()
                if message is None:
                    break
                yield message
        finally:
            for task in list(self._tasks):
                task.cancel()

    def _add(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """Forget a task. If it failed, somebody would wait for its answer for ever, so the stream ends."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            status = status_of(error)
            self._end(RpcReply(None, status.code, status.text))

    async def _begin_all(self, requests: AsyncIterator[bytes]) -> None:
        """Begin each request of the client, and end the stream behind the last answer."""
        async for message in requests:
            await self._room.acquire()
            self._begin(message)
        others = self._tasks - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)
        await self._answers.put(None)

    def _begin(self, message: bytes) -> None:
        try:
            model, sequence = self._read(message)
        except BadProtobuf:
            self._end(RpcReply(None, UNREADABLE.code, UNREADABLE.text))
            return
        except MoonpoolError as error:
            model, sequence = "", ""
            refused: MoonpoolError | None = error
        else:
            refused = None
        key = (model, sequence) if sequence else None
        before = None if key is None else self._sequences.get(key)
        answering = self._answer(message, model, sequence, refused, before, self._last)
        task = asyncio.create_task(answering)
        self._last = task
        if key is not None:
            self._sequences[key] = task
        self._add(task)
        task.add_done_callback(lambda _: self._ended(task, key))

    def _ended(self, task: asyncio.Task[None], key: tuple[str, str] | None) -> None:
        self._room.release()
        if self._last is task:
            self._last = None
        if key is not None and self._sequences.get(key) is task:
            del self._sequences[key]

    def _end(self, status: RpcReply) -> None:
        self.status = status
        while not self._answers.empty():
            self._answers.get_nowait()
        self._answers.put_nowait(None)

    async def _answer(
        self,
        message: bytes,
        model: str,
        sequence: str,
        refused: MoonpoolError | None,
        before: asyncio.Task[None] | None,
        last: asyncio.Task[None] | None,
    ) -> None:
        """Answer one request. `before` is the one before it in its sequence, `last` the one before it in the stream."""
        handle = self._models.get(model)
        try:
            if refused is not None:
                raise refused
            if handle is None:
                raise ModelNotFound(f"Request for unknown model: '{model}' is not found")
            if before is not None:
                await asyncio.wait([before])
            target, traits = await handle.routed()
            replies = target.options(stream=True).rpc_stream.remote(
                model, path_of("ModelStreamInfer"), self._metadata, message, sequence=sequence
            )
            with translated(model, sequence=sequence):
                if traits.is_decoupled:
                    async for reply in replies:
                        await self._take(reply)
                    return
                found = [reply async for reply in replies]
            if last is not None:
                await asyncio.wait([last])
            for reply in found:
                await self._take(reply)
        except MoonpoolError as error:
            if last is not None:
                await asyncio.wait([last])
            await self._answers.put(error_in_stream(public_text(error), _id_of(message)))

    async def _take(self, reply: RpcReply | Failure) -> None:
        if isinstance(reply, Failure):
            raise reply.error()
        if reply.message is not None:
            await self._answers.put(reply.message)
        elif reply.code != "OK":
            self._end(reply)


def _id_of(message: bytes) -> str:
    """Return the id of a request; empty if it cannot be read."""
    try:
        return InferMessage(message).request_id
    except (MoonpoolError, BadProtobuf):
        return ""
