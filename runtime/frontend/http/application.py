"""Everything of KServe v2 and of Triton's extensions that is not in a hurry, as a Starlette application."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import Response
from starlette.routing import Route

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import InvalidRequest, ModelError
from moonpool.runtime.frontend.http.asgi import EXCHANGE
from moonpool.runtime.frontend.http.exchange import error_body
from moonpool.runtime.frontend.http.generate import generate, generate_stream
from moonpool.runtime.frontend.http.json_text import NotJson, dumps, loads, member
from moonpool.runtime.frontend.statuses import http_status
from moonpool.runtime.public_text import public_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from concurrent.futures import Executor

    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from moonpool.runtime.frontend.service import Service

    Endpoint = Callable[[Request], Awaitable[Response]]

_TEXT, _JSON = "text/plain", "application/json"


class _Digits(Convertor[str]):
    """A version as it stands in a path: digits, and as text, since Triton has its own idea of numbers."""

    regex = "[0-9]+"

    def convert(self, value: str) -> str:
        """As it is."""
        return value

    def to_string(self, value: str) -> str:
        """As it is."""
        return value


register_url_convertor("digits", _Digits())


def reply(value: Any, status: int = 200) -> Response:
    """A JSON response."""
    return Response(dumps(value), status, media_type=_JSON)


def failure(status: int, text: str, media_type: str = _JSON) -> Response:
    """An error in the form that all have."""
    response = Response(error_body(text), status)
    # Otherwise Starlette adds a charset to what is text.
    response.headers["content-type"] = media_type
    return response


def done(media_type: str = _JSON) -> Response:
    """A response that says nothing but that it went well."""
    response = Response(b"")
    response.headers["content-type"] = media_type
    return response


class Endpoints:
    """The handlers. For an event loop's thread; what may block runs in an executor."""

    def __init__(self, service: Service, executor: Executor) -> None:
        self._service = service
        self._executor = executor

    async def _elsewhere(self, function: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, function, *arguments)

    # Health and metadata

    async def live(self, _: Request) -> Response:
        """Whether the server answers at all."""
        return done(_TEXT)

    async def ready(self, _: Request) -> Response:
        """Whether it takes requests."""
        response = done(_TEXT)
        response.status_code = 200 if self._service.metadata.is_ready() else 400
        return response

    async def model_ready(self, request: Request) -> Response:
        """Whether a model takes requests."""
        name, version = _model_of(request)
        if await self._elsewhere(self._service.metadata.model_ready, name, version):
            return done(_TEXT)
        return failure(400, "Model version not ready", _TEXT)

    async def server(self, _: Request) -> Response:
        """Metadata of the server."""
        return reply(self._service.metadata.server_metadata())

    async def models(self, _: Request) -> Response:
        """List the names of the models that are ready, as KServe's servers do."""
        repository = self._service.repository
        entries = await self._elsewhere(lambda: repository.index(ready_only=True))
        return reply({"models": sorted({entry["name"] for entry in entries})})

    async def model(self, request: Request) -> Response:
        """Metadata of a model."""
        return reply(self._service.metadata.model_metadata(*_model_of(request)))

    async def config(self, request: Request) -> Response:
        """Configuration of a model."""
        return reply(self._service.metadata.model_config(*_model_of(request)))

    async def statistics(self, request: Request) -> Response:
        """Statistics of a model, or of all."""
        return reply(self._service.metadata.statistics(*_model_of(request)))

    # Models

    async def index(self, request: Request) -> Response:
        """All models of the repositories."""
        ready = member(await _body(request, empty={}), "ready", bool)
        repository = self._service.repository
        return reply(await self._elsewhere(lambda: repository.index(ready_only=bool(ready))))

    async def load(self, request: Request) -> Response:
        """Load or reload a model."""
        _check_repository(request)
        parameters = member(await _body(request, empty={}), "parameters", dict) or {}
        config: str | None = None
        files: dict[str, bytes] = {}
        for key in parameters:
            value = member(parameters, key, str)
            if key == "config":
                config = value
            elif key.startswith("file:"):
                files[key] = _decoded(key, value or "")
            else:
                raise NotJson("unexpected error on creating Triton parameter")
        name = request.path_params["model"]
        await self._elsewhere(self._service.repository.load, name, config, files or None)
        return done()

    async def unload(self, request: Request) -> Response:
        """Unload a model."""
        _check_repository(request)
        try:
            parameters = _object(await _body(request, empty={})).get("parameters")
        except NotJson:
            parameters = None  # Triton does not look at it, either
        dependents = _object(parameters).get("unload_dependents") is True
        name, repository = request.path_params["model"], self._service.repository
        await self._elsewhere(lambda: repository.unload(name, unload_dependents=dependents))
        return done()

    # Shared memory

    async def system_status(self, request: Request) -> Response:
        """Which regions clients have registered."""
        return reply(self._service.shared_memory.status(request.path_params.get("region", "")))

    async def system_register(self, request: Request) -> Response:
        """Register a region."""
        body = await _body(request)
        key, size_bytes = member(body, "key", str), member(body, "byte_size", int)
        for field, value in (("key", key), ("byte_size", size_bytes)):
            if value is None:
                raise InvalidRequest(f"Shared memory register request has no '{field}' field")
        offset = member(body, "offset", int) or 0
        name = request.path_params["region"]
        self._service.shared_memory.register(name, key or "", offset, size_bytes or 0)
        return done()

    async def system_unregister(self, request: Request) -> Response:
        """Forget a region, or all."""
        self._service.shared_memory.unregister(request.path_params.get("region", ""))
        return done()

    async def cuda_status(self, request: Request) -> Response:
        """There are no regions on a GPU."""
        region = request.path_params.get("region", "")
        if region:
            raise ModelError(f"Unable to find cuda shared memory region: '{region}'", "NOT_FOUND")
        return reply([])

    async def cuda_register(self, request: Request) -> Response:
        """Refused: tensors on a GPU are not served."""
        self._service.shared_memory.check_enabled()
        if member(await _body(request), "raw_handle", dict) is None:
            raise InvalidRequest("Shared memory register request has no 'raw_handle' field")
        raise ModelError(
            f"failed to register CUDA shared memory region '{request.path_params['region']}': "
            "this server has no GPU support",
            "UNSUPPORTED",
        )

    async def cuda_unregister(self, _: Request) -> Response:
        """There is nothing to forget."""
        self._service.shared_memory.check_enabled()
        return done()

    # Traces and logging

    async def trace(self, request: Request) -> Response:
        """The settings of traces, after the changes where there are some."""
        changes = _object(await _body(request)) if request.method == "POST" else None
        traces, name = self._service.traces, request.path_params.get("model", "")
        return reply(await self._elsewhere(traces.settings, name, changes))

    async def logging(self, request: Request) -> Response:
        """The settings of the log, after the changes where there are some."""
        changes = _object(await _body(request)) if request.method == "POST" else None
        return reply(await self._elsewhere(self._service.logs.settings, changes))

    # Generate

    async def generate(self, request: Request) -> Response:
        """One response, as JSON."""
        return await self._generated(generate, request)

    async def generate_stream(self, request: Request) -> Response:
        """Any number of responses, as events."""
        return await self._generated(generate_stream, request)

    async def _generated(self, function: Callable[..., Any], request: Request) -> Response:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise InvalidRequest("Unsupported content-encoding, only 'identity' is supported.")
        exchange, body = request.scope[EXCHANGE], await request.body()
        answer: Response = await function(self._service, exchange, *_model_of(request), body)
        return answer

    # Metrics

    async def metrics(self, _: Request) -> Response:
        """What Prometheus reads."""
        text = await self._elsewhere(self._service.metrics_text)
        return Response(text, media_type="text/plain; charset=utf-8")


def application(
    service: Service, executor: Executor, further: Iterable[BaseRoute] = ()
) -> Starlette:
    """The application of the port for HTTP; `further` routes come after those of the protocol."""
    at = Endpoints(service, executor)
    model, versioned = "/v2/models/{model}", "/v2/models/{model}/versions/{version:digits}"
    routes = [
        _route("/v2/health/live", _TEXT, GET=at.live),
        _route("/v2/health/ready", _TEXT, GET=at.ready),
        _route("/v2", _JSON, GET=at.server),
        _route("/v2/models", _JSON, GET=at.models),
        _route("/v2/models/stats", _JSON, GET=at.statistics),
        _route("/v2/repository/index", _JSON, POST=at.index),
        _route("/v2/repository/{repository}/index", _JSON, POST=at.index),
        _route("/v2/repository/models/{model}/load", _JSON, POST=at.load),
        _route("/v2/repository/models/{model}/unload", _JSON, POST=at.unload),
        _route("/v2/repository/{repository}/models/{model}/load", _JSON, POST=at.load),
        _route("/v2/repository/{repository}/models/{model}/unload", _JSON, POST=at.unload),
        _route("/v2/trace/setting", _JSON, GET=at.trace, POST=at.trace),
        _route(model + "/trace/setting", _JSON, GET=at.trace, POST=at.trace),
        _route("/v2/logging", _JSON, GET=at.logging, POST=at.logging),
    ]
    for path in (model, versioned):
        routes += [
            _route(path, _JSON, GET=at.model),
            _route(path + "/ready", _TEXT, GET=at.model_ready),
            _route(path + "/config", _JSON, GET=at.config),
            _route(path + "/stats", _JSON, GET=at.statistics),
            _route(path + "/generate", _JSON, POST=at.generate),
            _route(path + "/generate_stream", _JSON, POST=at.generate_stream),
        ]
    for kind, status, register, unregister in (
        ("system", at.system_status, at.system_register, at.system_unregister),
        ("cuda", at.cuda_status, at.cuda_register, at.cuda_unregister),
    ):
        base = f"/v2/{kind}sharedmemory"
        routes += [
            _route(base + "/status", _JSON, GET=status),
            _route(base + "/unregister", _JSON, POST=unregister),
            _route(base + "/region/{region}/status", _JSON, GET=status),
            _route(base + "/region/{region}/register", _JSON, POST=register),
            _route(base + "/region/{region}/unregister", _JSON, POST=unregister),
        ]
    return _application([*routes, *further])


def metrics_application(service: Service, executor: Executor) -> Starlette:
    """The application of the port for metrics."""
    at = Endpoints(service, executor)
    return _application([_route("/metrics", _TEXT, GET=at.metrics)])


def _application(routes: list[BaseRoute]) -> Starlette:
    async def not_found(_: Request, __: Exception) -> Response:
        return failure(404, "Not Found", _TEXT)

    async def not_allowed(_: Request, __: Exception) -> Response:
        return failure(405, "Method Not Allowed", _TEXT)

    async def refused(_: Request, error: Exception) -> Response:
        return failure(http_status(error), public_text(error))

    # What nobody foresaw is raised again behind its answer, and logged by whoever runs this.
    handlers: Any = {404: not_found, 405: not_allowed, MoonpoolError: refused, Exception: refused}
    made = Starlette(routes=routes, exception_handlers=handlers)
    made.router.redirect_slashes = False
    return made


def _route(path: str, wrong: str, **endpoints: Endpoint) -> Route:
    """A path with its handlers by method; `wrong` is the media type of the answer to other methods."""

    async def handle(request: Request) -> Response:
        endpoint = endpoints.get(request.method)
        if endpoint is None:
            return failure(405, "Method Not Allowed", wrong)
        return await endpoint(request)

    route = Route(path, handle)
    route.methods = set()
    return route


def _model_of(request: Request) -> tuple[str, str]:
    return request.path_params.get("model", ""), request.path_params.get("version", "")


async def _body(request: Request, empty: Any = None) -> Any:
    """The value of the body; `empty`, where it is given, for a body of nothing. Raises `NotJson`."""
    raw = await request.body()
    return empty if not raw and empty is not None else loads(raw)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _check_repository(request: Request) -> None:
    if "repository" in request.path_params:
        raise ModelError("'repository_name' specification is not supported", "UNSUPPORTED")


def _decoded(key: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"'{key}' is no base64 text") from None
