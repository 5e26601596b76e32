"""The way into an application for clients of HTTP and gRPC: finds the model of each request, and passes it on to a
replica of it.

Ray's proxies receive requests on every node and give them to a replica of this deployment. It reads no tensor: of HTTP
it looks at the path, in OpenAI's API at the model that the body names, and of gRPC at the fields before the tensors.
The bytes go on as they came. The model's replica
answers with the handlers of `moonpool serve`. What is about no model, or about one that the application does not have,
is answered here, by the same handlers over a runtime without models.

RPCs come without generated classes: `add_servicer` has Ray's proxies leave messages as bytes. Ray would pickle messages
by the names of their modules, under which nobody can import them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cached_property
from typing import Any

import grpc
from ray import serve
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse

from moonpool.ipc.errors import MoonpoolError
from moonpool.ray.handle import ModelHandle, translated
from moonpool.ray.local_server import HttpReply, HttpRequest, LocalServer, RpcReply, service_of
from moonpool.ray.options import Traits
from moonpool.ray.replica import Failure
from moonpool.ray.rpc_stream import RpcStream
from moonpool.runtime.errors import ModelError
from moonpool.runtime.isolation.public_text import public_text
from moonpool.runtime.model.protobuf import BadProtobuf, service_messages
from moonpool.runtime.runtime import Runtime
from moonpool.runtime.server.grpc.infer_request import InferMessage
from moonpool.runtime.server.grpc.methods import SERVICE, UNARY, path_of
from moonpool.runtime.server.grpc.status import UNREADABLE, status_of
from moonpool.runtime.server.grpc.wire import parse
from moonpool.runtime.server.http.body import too_large
from moonpool.runtime.server.http.connection import error_body, error_headers, http_status
from moonpool.runtime.server.http.head import HEADER_LENGTH, JSON, BadHttpMessage
from moonpool.runtime.server.http.infer_request import read_plan
from moonpool.runtime.server.http.json_text import dumps, loads
from moonpool.runtime.server.http.options import HttpLimits
from moonpool.runtime.server.openai.errors import reply_of
from moonpool.runtime.server.openai.models import OWNER
from moonpool.runtime.server.openai.multipart import read_form

kserve = service_messages()
_log = logging.getLogger("moonpool")
# The RPCs that name a model in `name`. ModelInfer has it elsewhere.
_NAMING_RPCS = ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")
_MODEL = re.compile(r"/v2/models/(?!stats$)([^/]+)(/.*)?")
# OpenAI's API, and its requests that name the model in their body.
_OPENAI = re.compile(r"/v1/.*|(?:/v2)?/rerank")
_OPENAI_REQUEST = re.compile(r"/v1/(?:(?:chat/)?completions|embeddings|audio/transcriptions)|(?:/v[12])?/rerank")
# Requests that would change one process of many.
_CHANGES = re.compile(r"/v2/(?:logging|trace/setting|models/[^/]+/trace/setting)")
_CHANGING_RPCS = ("TraceSetting", "LogSettings")
_ONE_OF_MANY = (
    "trace and log settings belong to each replica, so clients cannot change them: set Options(log=...) and deploy the "
    "application again"
)
_STATUS_S = 1.0
_STARTED = int(time.time())
# States of a deployment whose replicas take requests, or come when there are some.
_SERVING = ("HEALTHY", "UPDATING", "UPSCALING", "DOWNSCALING")


class RawMessage:
    """A message as bytes, in the place of a protobuf."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 - the name that Ray calls
        return self._data


class Ingress:
    """The deployment that Ray's proxies call. One object for each replica of it."""

    def __init__(self, handles: Mapping[str, Any], models: Mapping[str, Traits], protocols: tuple[str, ...]) -> None:
        """`handles` are those of the deployments, by their names."""
        self._traits = dict(models)
        self._protocols = protocols
        self._deployments = dict(handles)
        self._models = {
            name: ModelHandle(name, _found(handles[traits.deployment], traits)) for name, traits in models.items()
        }
        self._runtime = Runtime()
        self._status: tuple[float, bool] = (0.0, False)

    @cached_property
    def _server(self) -> LocalServer:
        return LocalServer(service_of(self._runtime))

    def __del__(self) -> None:
        """End. Called by Ray."""
        # Neither is there if `__init__` failed.
        for name in ("_server", "_runtime"):
            if name in vars(self):
                vars(self)[name].close()

    async def traits(self, model: str) -> Traits | None:
        """Return the traits of a model for `moonpool.ray.get`; None if there is no such model."""
        return self._traits.get(model)

    # HTTP

    async def __call__(self, request: Request) -> HttpResponse:
        """Answer an HTTP request. Called by Ray."""
        scope = request.scope
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        # The path was decoded. The server would cut it at a question mark, which the refusals below do not see.
        path = path.replace("?", "%3F")
        query = scope.get("query_string", b"")
        target = path.encode("latin-1", "replace") + (b"?" + query if query else b"")
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        try:
            if "http" not in self._protocols:
                raise ModelError("this application does not serve HTTP", "NOT_FOUND")
            asked = HttpRequest(request.method, target, headers, await _body_of(request))
            return await self._http(path, asked)
        except BadHttpMessage as error:
            return _http(HttpReply(error.status, error.headers, error_body(error.text)))
        except Exception as error:
            # Ray would send the traceback to the client.
            if not isinstance(error, MoonpoolError):
                _log.exception("answering %s %s failed", request.method, path)
            if _OPENAI.fullmatch(path):
                refusal = reply_of(error)
                return _http(HttpReply(refusal.status, refusal.headers, refusal.body))
            body = error_body(public_text(error))
            return _http(HttpReply(http_status(error), error_headers(error, JSON), body))

    async def _http(self, path: str, asked: HttpRequest) -> HttpResponse:
        if asked.method == "POST" and _CHANGES.fullmatch(path):
            raise ModelError(_ONE_OF_MANY, "UNSUPPORTED")
        found = _MODEL.fullmatch(path)
        handle = None if found is None else self._models.get(found[1])
        if found is not None and handle is not None:
            if path.endswith("/generate_stream"):
                return await _streamed(handle, asked)
            return await _whole(handle, asked, _sequence_of(asked) if self._traits[found[1]].has_sequences else "")
        if asked.method == "POST" and _OPENAI_REQUEST.fullmatch(path):
            name, is_stream = _asked_of(asked)
            base, _, version = name.rpartition(":")
            named = self._models.get(name) or (self._models.get(base) if version.isdecimal() else None)
            if named is not None:
                return await (_streamed if is_stream else _whole)(named, asked)
        reply = await self._own(path, asked)
        return _http(await self._server.http(asked) if reply is None else reply)

    async def _own(self, path: str, asked: HttpRequest) -> HttpReply | None:
        """Answer requests about all models together; None for all others."""
        if path == "/v2/health/ready" and asked.method == "GET":
            return HttpReply(200 if await self._is_ready() else 400, ())
        if path == "/v2/models" and asked.method == "GET":
            names = {each["name"] for each in await self._index() if each.get("state") == "READY"}
            return _json({"models": sorted(names)})
        if path == "/v1/models" and asked.method == "GET":
            return _json({"object": "list", "data": [_as_openai(name) for name in sorted(self._models)]})
        name = path.removeprefix("/v1/models/")
        if asked.method == "GET" and name in self._models:
            return _json(_as_openai(name))
        if path == "/v2/models/stats" and asked.method == "GET":
            return _json({"model_stats": await self._statistics()})
        if path == "/v2/repository/index" and asked.method == "POST":
            return _json(await self._index())
        return None

    # gRPC

    async def _unary(self, name: str, message: bytes, context: Any) -> RawMessage:
        """Answer the RPC of this name."""
        path, metadata = path_of(name), _metadata(context)
        try:
            if "grpc" not in self._protocols:
                raise ModelError("this application does not serve gRPC", "UNSUPPORTED")
            reply = await self._rpc(name, path, metadata, message)
        except BadProtobuf:
            reply = RpcReply(None, UNREADABLE.code, UNREADABLE.text)
        except Exception as error:
            status = status_of(error)
            reply = RpcReply(None, status.code, status.text)
        if reply.message is None:
            context.set_code(grpc.StatusCode[reply.code])
            context.set_details(reply.details)
        return RawMessage(reply.message or b"")

    async def _rpc(self, name: str, path: bytes, metadata: Any, message: bytes) -> RpcReply:
        if name in _CHANGING_RPCS and _has_settings(name, message):
            raise ModelError(_ONE_OF_MANY, "UNSUPPORTED")
        sequence = ""
        if name == "ModelInfer":
            model, sequence = self.read(message)
        else:
            model = _model_of(name, message)
        handle = self._models.get(model)
        if handle is None:
            own = await self._own_rpc(name)
            return await self._server.rpc(path, metadata, message) if own is None else own

        async def send(target: Any, _: float | None) -> Any:
            return await target.rpc.remote(model, path, metadata, message, sequence=sequence)

        reply: RpcReply = _checked(await handle.call(send, sequence=sequence))
        return reply

    async def _own_rpc(self, name: str) -> RpcReply | None:
        if name == "ServerReady":
            ready = kserve.ServerReadyResponse(ready=await self._is_ready())
            return RpcReply(ready.SerializeToString())
        if name == "RepositoryIndex":
            index = kserve.RepositoryIndexResponse()
            for entry in await self._index():
                index.models.add(**entry)
            return RpcReply(index.SerializeToString())
        return None

    def read(self, message: bytes) -> tuple[str, str]:
        """Return the model that a ModelInferRequest names, and its sequence, if that decides about the replica.

        Raises `BadProtobuf`, `InvalidRequest`.
        """
        asked = InferMessage(message)
        traits = self._traits.get(asked.model)
        if traits is None or not traits.has_sequences:
            return asked.model, ""
        return asked.model, str(asked.read().parameters.sequence_id or "")

    async def ModelStreamInfer(self, requests: Any, grpc_context: Any) -> AsyncIterator[RawMessage]:  # noqa: N802 - the RPC's name
        """Answer a stream of requests. Called by Ray."""
        stream = RpcStream(self.read, self._models, _metadata(grpc_context))
        async for message in stream.answers(requests):
            yield RawMessage(message)
        if stream.status is not None:
            grpc_context.set_code(grpc.StatusCode[stream.status.code])
            grpc_context.set_details(stream.status.details)
            # Ray takes the status from there, and no other error.
            raise RuntimeError(stream.status.details)

    # All models together

    async def _is_ready(self) -> bool:
        """Return whether every deployment of the application takes requests. Asks Ray's controller once a second at
        most.
        """
        at_s, is_ready = self._status
        if time.monotonic() - at_s > _STATUS_S:
            app = serve.get_replica_context().app_name
            status = await asyncio.to_thread(serve.status)
            deployments = status.applications[app].deployments
            is_ready = all(each.status in _SERVING for each in deployments.values())
            self._status = time.monotonic(), is_ready
        return is_ready

    async def _index(self) -> list[dict[str, str]]:
        found = await self._gather(lambda target: target.index.remote())
        known = {each["name"] for each in found}
        # A packed deployment has many more models than its replicas have loaded.
        missing = [
            {"name": name, "state": "UNAVAILABLE", "reason": "no replica has loaded it yet"}
            for name in self._models
            if name not in known
        ]
        return sorted([*found, *missing], key=lambda each: each["name"])

    async def _statistics(self) -> list[dict[str, Any]]:
        return await self._gather(lambda target: target.statistics.remote())

    async def _gather(self, ask: Callable[[Any], Awaitable[list[Any]]]) -> list[Any]:
        """Ask one replica of each deployment."""
        answers = await asyncio.gather(*(ask(each) for each in self._deployments.values()), return_exceptions=True)
        return [each for found in answers if isinstance(found, list) for each in found]


def _unary(name: str) -> Callable[..., Awaitable[RawMessage]]:
    async def answer(self: Ingress, message: bytes, grpc_context: Any) -> RawMessage:
        return await self._unary(name, message, grpc_context)

    answer.__name__, answer.__doc__ = name, f"Answer the RPC {name}. Called by Ray."
    return answer


for _name in UNARY:
    setattr(Ingress, _name, _unary(_name))


def add_servicer(servicer: Any, server: Any) -> None:
    """Have Ray's gRPC proxies serve KServe v2. For
    `grpc_options={"grpc_servicer_functions": ["moonpool.ray.add_servicer"]}`.

    Messages stay bytes up to the replica.
    """
    handlers = {name: grpc.unary_unary_rpc_method_handler(getattr(servicer, name)) for name in UNARY}
    stream = "ModelStreamInfer"
    handlers[stream] = grpc.stream_stream_rpc_method_handler(getattr(servicer, stream))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _found(handle: Any, traits: Traits) -> Callable[[], Awaitable[tuple[Any, Traits]]]:
    async def find() -> tuple[Any, Traits]:
        return handle, traits

    return find


def _checked(reply: Any) -> Any:
    if isinstance(reply, Failure):
        raise reply.error()
    return reply


def _json(value: Any) -> HttpReply:
    return HttpReply(200, JSON, dumps(value))


async def _body_of(request: Request) -> bytes:
    """Read the body. Raises `BadHttpMessage` as soon as it is larger than `moonpool serve` takes."""
    body, most = bytearray(), HttpLimits().body_bytes
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise too_large(f"at least {len(body)}", most)
    return bytes(body)


def _http(reply: HttpReply) -> HttpResponse:
    response = HttpResponse(reply.body, reply.status)
    response.raw_headers = _headers(reply, len(reply.body))
    return response


def _headers(reply: HttpReply, length: int | None = None) -> list[tuple[bytes, bytes]]:
    headers = [(name.lower(), value) for name, value in reply.headers]
    return headers if length is None else [*headers, (b"content-length", b"%d" % length)]


def _as_openai(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": _STARTED, "owned_by": OWNER}


def _asked_of(asked: HttpRequest) -> tuple[str, bool]:
    """Return the model that a request of OpenAI's API names, "" if none, and whether it wants a stream.

    Mistakes in the request are reported where it is answered.
    """
    kind = next((value for name, value in asked.headers if name == b"content-type"), b"").decode("latin-1")
    try:
        fields = read_form(kind, asked.body).texts if kind.startswith("multipart/") else loads(asked.body)
    except (MoonpoolError, ValueError):
        fields = None
    if not isinstance(fields, dict):
        return "", False
    model, stream = fields.get("model"), fields.get("stream")
    return model if isinstance(model, str) else "", stream in (True, "true", "1")


async def _whole(handle: ModelHandle, asked: HttpRequest, sequence: str = "") -> HttpResponse:
    async def send(target: Any, _: float | None) -> Any:
        return await target.http.remote(handle.name, asked, sequence=sequence)

    return _http(_checked(await handle.call(send, sequence=sequence)))


async def _streamed(handle: ModelHandle, asked: HttpRequest) -> HttpResponse:
    """Return a response whose body comes in pieces. The status is that of the first one."""
    target, _ = await handle.routed()
    with translated(handle.name):
        pieces = target.options(stream=True).http_stream.remote(handle.name, asked)
        first: HttpReply = _checked(await anext(pieces))

    async def rest() -> AsyncIterator[bytes]:
        async for piece in pieces:
            yield _checked(piece)

    response = StreamingResponse(rest(), first.status)
    response.raw_headers = _headers(first)
    return response


def _sequence_of(asked: HttpRequest) -> str:
    """Return the sequence of a request for inference; "" if it names none, or is malformed, which its model's replica
    says.
    """
    length = next((value for name, value in asked.headers if name == HEADER_LENGTH), None)
    try:
        text = asked.body if length is None else asked.body[: int(length)]
        details = read_plan(text).details
    except (MoonpoolError, ValueError):
        return ""
    return "" if details is None else str(details.correlation_id or "")


def _metadata(context: Any) -> tuple[tuple[str, str | bytes], ...]:
    return tuple((str(key), value) for key, value in context.invocation_metadata())


def _model_of(name: str, message: bytes) -> str:
    """Return the model that an RPC names; "" if it names none."""
    if name not in _NAMING_RPCS:
        return ""
    found: str = parse(getattr(kserve, f"{name}Request"), message).name
    return found


def _has_settings(name: str, message: bytes) -> bool:
    kind = kserve.TraceSettingRequest if name == "TraceSetting" else kserve.LogSettingsRequest
    return bool(parse(kind, message).settings)
