"""Asks a server the requests of a case, and returns the answers in a form that can be compared.

Some answers depend on when one asks: a model that is being unloaded is there for a while, and a tritonserver lets go of
shared memory after the answer to the request that used it. So these requests are repeated until what they ask for has
happened, under a deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.conformance.comparing import comparable, message, words
from moonpool.runtime.conformance.tensors import KEY, KEY_BYTES
from moonpool.runtime.conformance.wire import TIMEOUT_S, Http, WireReply, get, post, send
from moonpool.runtime.model.protobuf import service_messages
from moonpool.runtime.process.files import parsed_json

kserve = service_messages()
T = TypeVar("T")
Call = tuple[str, Any]
SERVICE = "inference.GRPCInferenceService"
_PAUSE_S = 0.005
_INDEX = post("/v2/repository/index")
_REGIONS_PATH = "/v2/systemsharedmemory"
_REGIONS_STATUS = get(f"{_REGIONS_PATH}/status")


class NeverHappened(Exception):
    """The server never did what was asked for. The text says what."""


@contextlib.contextmanager
def region() -> Iterator[Callable[[], None]]:
    """Make the shared memory that the requests speak of, and remove it in the end. Yields what makes it empty.

    A server on another machine does not see it. Raises `MoonpoolError` if it is there already.
    """
    path = Path("/dev/shm") / KEY.lstrip("/")

    def clear() -> None:
        path.write_bytes(bytes(KEY_BYTES))

    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        raise MoonpoolError(
            f"{path} is there already: another run is under way, or was killed; delete the file"
        ) from None
    try:
        clear()
        yield clear
    finally:
        path.unlink(missing_ok=True)


class AskedServer:
    """Is where to ask. `channel` is an open `grpc.Channel`, or None for a server that has no gRPC."""

    def __init__(self, host: str, http_port: int, channel: Any) -> None:
        self.host = host
        self.http_port = http_port
        self.channel = channel

    def send(self, request: Http) -> WireReply:
        """Send a request over HTTP. Raises OSError and `http.client.HTTPException`."""
        return send(self.http_port, request, self.host)

    def call(self, method: str, request: Any) -> Any:
        """Call a method over gRPC. Returns the message as plain values, or the code and the text of the error."""
        import grpc

        answer = getattr(kserve, f"{method}Response")
        rpc = self.channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return message(rpc(request, timeout=TIMEOUT_S))
        except grpc.RpcError as error:
            return error.code().name, words(error.details() or "")


def answers_over_http(server: AskedServer, requests: Sequence[Http]) -> list[Any]:
    """Send requests, one after the other. How often a change was waited for is left out.

    Raises `NeverHappened`, OSError and `http.client.HTTPException`.
    """
    replies = [(request, _answer_over_http(server, request)) for request in requests]
    return [comparable(reply) for request, reply in replies if not request.until]


def _answer_over_http(server: AskedServer, request: Http) -> WireReply:
    if request.until or request.has:

        def asked() -> WireReply | None:
            reply = server.send(request)
            is_it = reply.status == request.until if request.until else request.has in reply.body
            return reply if is_it else None

        return _wait(asked, f"{request.path} to be {request.until or request.has!r}")
    if request.path.startswith(_REGIONS_PATH) and request.path.endswith("/unregister"):
        return _wait(lambda: _forgotten_over_http(server, request), "the region to be gone")
    reply = server.send(request)
    if request.path.endswith("/unload"):
        # Several answers are right until it is gone.
        _wait(lambda: b"UNLOADING" not in server.send(_INDEX).body, "the model to be gone")
    return reply


def _forgotten_over_http(server: AskedServer, request: Http) -> WireReply | None:
    """Unregister, and return the reply if the region is gone, all of them where none is named."""
    reply = server.send(request)
    if reply.status != 200:
        return None if b"nregister" in reply.body else reply
    status = server.send(_REGIONS_STATUS)
    if status.status != 200:
        return reply
    kept = {each["name"] for each in parsed_json(status.body)}
    _, named, name = request.path.removesuffix("/unregister").partition("/region/")
    return None if (name in kept if named else kept) else reply


def answers_over_grpc(server: AskedServer, calls: Sequence[Call]) -> list[Any]:
    """Make calls, one after the other. Raises `NeverHappened`."""
    return [_answer_over_grpc(server, method, request) for method, request in calls]


def _answer_over_grpc(server: AskedServer, method: str, request: Any) -> Any:
    if method == "SystemSharedMemoryUnregister":
        return _wait(lambda: _forgotten_over_grpc(server, request), "the region to be gone")[0]
    answer = server.call(method, request)
    if method == "RepositoryModelUnload":
        _wait(lambda: not _is_leaving(server, request.model_name), "the model to be gone")
    return answer


def _is_leaving(server: AskedServer, model: str) -> bool:
    index = server.call("RepositoryIndex", kserve.RepositoryIndexRequest())
    models = index.get("models", ()) if isinstance(index, dict) else ()
    return any(each.get("name") == model and each.get("state") == "UNLOADING" for each in models)


def _forgotten_over_grpc(server: AskedServer, request: Any) -> tuple[Any] | None:
    """Unregister, and return the answer if the region is gone, all of them for an empty name."""
    answer = server.call("SystemSharedMemoryUnregister", request)
    if isinstance(answer, tuple):
        return None if "unregister" in answer[1] else (answer,)
    status = server.call("SystemSharedMemoryStatus", kserve.SystemSharedMemoryStatusRequest())
    kept = status.get("regions", {}) if isinstance(status, dict) else {}
    return None if (request.name in kept if request.name else kept) else (answer,)


def stream(server: AskedServer, messages: Sequence[Any], metadata: Sequence[tuple[str, str]]) -> Any:
    """Return all messages of a stream, and how it ended. The next request waits for the answer to the last."""
    import grpc

    answered = threading.Semaphore(0)

    def asking() -> Iterator[Any]:
        for index, request in enumerate(messages):
            if index:
                answered.acquire(timeout=TIMEOUT_S)
            yield request

    rpc = server.channel.stream_stream(
        f"/{SERVICE}/ModelStreamInfer",
        request_serializer=kserve.ModelInferRequest.SerializeToString,
        response_deserializer=kserve.ModelStreamInferResponse.FromString,
    )
    found: list[Any] = []
    call = rpc(asking(), metadata=metadata, timeout=TIMEOUT_S)
    with contextlib.suppress(grpc.RpcError):  # `code` and `details` tell
        for response in call:
            found.append(message(response))
            answered.release()
    answered.release(len(messages) + 1)
    return found, call.code().name, words(call.details() or "")


def call_of_nothing(server: AskedServer, path: str) -> tuple[str, str]:
    """Call a method that is not there. Returns the code and the text of the error."""
    call = server.channel.stream_stream(f"/{path}")(iter([b""]), timeout=TIMEOUT_S)
    return call.code().name, call.details()


def _wait(condition: Callable[[], T | None], what: str) -> T:
    """Ask until there is an answer, and return it. Raises `NeverHappened`."""
    end_s = time.monotonic() + TIMEOUT_S
    while True:
        is_over = time.monotonic() >= end_s
        answer = condition()
        if answer:
            return answer
        if is_over:
            raise NeverHappened(f"waited for {TIMEOUT_S:g} s for {what}")
        time.sleep(_PAUSE_S)
