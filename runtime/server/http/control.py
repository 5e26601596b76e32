"""All routes except for inference: of KServe v2, of Triton's extensions, of the page, and of paths that people try
first.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any

from moonpool.runtime.errors import InvalidRequest, ModelError
from moonpool.runtime.server.http.generate import generate, generate_stream
from moonpool.runtime.server.http.head import JSON, TEXT, Headers
from moonpool.runtime.server.http.json_text import NotJson, dumps, member
from moonpool.runtime.server.http.options import HttpOptions
from moonpool.runtime.server.http.routes import Endpoint, Route, RouteReply, RouteRequest, failure, reply
from moonpool.runtime.server.page.content import PAGE, encoded, page
from moonpool.runtime.server.page.overview import Overview
from moonpool.runtime.server.restriction import place_of_host
from moonpool.runtime.server.service import Service

_UTF8: Headers = ((b"Content-Type", b"text/plain; charset=utf-8"),)
_DONE = RouteReply(200, JSON)
_OVERVIEW: Headers = ((b"Cache-Control", b"no-store"), (b"X-Content-Type-Options", b"nosniff"), *JSON)
_NUMBER = re.compile(r"[0-9]{1,15}")
_ANYWHERE = ("0.0.0.0", "::", "")


class Endpoints:
    """The endpoints. For the event loop's thread; what may block runs in an executor."""

    def __init__(self, service: Service, executor: Executor) -> None:
        self._service = service
        self._executor = executor

    async def _elsewhere(self, function: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, function, *arguments)

    # Health and metadata

    async def live(self, _: RouteRequest) -> RouteReply:
        """Answer while the server answers at all."""
        return reply({"live": True})

    async def ready(self, _: RouteRequest) -> RouteReply:
        """Tell whether the server takes requests."""
        is_ready = self._service.metadata.is_ready()
        return RouteReply(200 if is_ready else 400, JSON, dumps({"ready": is_ready}))

    async def model_ready(self, request: RouteRequest) -> RouteReply:
        """Tell whether a model takes requests."""
        if await self._elsewhere(self._service.metadata.model_ready, *request.model):
            return reply({"name": request.model[0], "ready": True})
        return failure(400, "Model version not ready", TEXT)

    async def server(self, _: RouteRequest) -> RouteReply:
        return reply(self._service.metadata.server_metadata())

    async def models(self, _: RouteRequest) -> RouteReply:
        """List the names of the models that are ready, as KServe's servers do."""
        repository = self._service.repository
        entries = await self._elsewhere(lambda: repository.index(ready_only=True))
        return reply({"models": sorted({entry["name"] for entry in entries})})

    async def model(self, request: RouteRequest) -> RouteReply:
        return reply(self._service.metadata.model_metadata(*request.model))

    async def config(self, request: RouteRequest) -> RouteReply:
        """Return the configuration of a model."""
        return reply(self._service.metadata.model_config(*request.model))

    async def statistics(self, request: RouteRequest) -> RouteReply:
        return reply(self._service.metadata.statistics(*request.model))

    # Models

    async def index(self, request: RouteRequest) -> RouteReply:
        """List all models of the repositories."""
        ready = member(await request.json(empty={}), "ready", bool)
        repository = self._service.repository
        return reply(await self._elsewhere(lambda: repository.index(ready_only=bool(ready))))

    async def load(self, request: RouteRequest) -> RouteReply:
        """Load or reload a model."""
        _check_repository(request)
        parameters = member(await request.json(empty={}), "parameters", dict) or {}
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
        name = request.parts["model"]
        await self._elsewhere(self._service.repository.load, name, config, files or None)
        return _DONE

    async def unload(self, request: RouteRequest) -> RouteReply:
        _check_repository(request)
        try:
            parameters = _object(await request.json(empty={})).get("parameters")
        except NotJson:
            parameters = None  # Triton does not look at it either
        dependents = _object(parameters).get("unload_dependents") is True
        name, repository = request.parts["model"], self._service.repository
        await self._elsewhere(lambda: repository.unload(name, unload_dependents=dependents))
        return _DONE

    # Shared memory

    async def system_status(self, request: RouteRequest) -> RouteReply:
        """List the regions that clients have registered."""
        return reply(self._service.shared_memory.status(request.parts.get("region", "")))

    async def system_register(self, request: RouteRequest) -> RouteReply:
        body = await request.json()
        key, size_bytes = member(body, "key", str), member(body, "byte_size", int)
        for field, value in (("key", key), ("byte_size", size_bytes)):
            if value is None:
                raise InvalidRequest(f"Shared memory register request has no '{field}' field")
        offset = member(body, "offset", int) or 0
        name = request.parts["region"]
        self._service.shared_memory.register(name, key or "", offset, size_bytes or 0)
        return _DONE

    async def system_unregister(self, request: RouteRequest) -> RouteReply:
        """Forget a region, or all."""
        self._service.shared_memory.unregister(request.parts.get("region", ""))
        return _DONE

    async def cuda_status(self, request: RouteRequest) -> RouteReply:
        """List no region: the server takes none on a GPU."""
        region = request.parts.get("region", "")
        if region:
            raise ModelError(f"Unable to find cuda shared memory region: '{region}'", "NOT_FOUND")
        return reply([])

    async def cuda_register(self, request: RouteRequest) -> RouteReply:
        """Refuse: tensors on a GPU are not served."""
        self._service.shared_memory.check_enabled()
        if member(await request.json(), "raw_handle", dict) is None:
            raise InvalidRequest("Shared memory register request has no 'raw_handle' field")
        raise ModelError(
            f"failed to register CUDA shared memory region '{request.parts['region']}': this server has no GPU support",
            "UNSUPPORTED",
        )

    async def cuda_unregister(self, _: RouteRequest) -> RouteReply:
        """Do nothing: there is no region to forget."""
        self._service.shared_memory.check_enabled()
        return _DONE

    # Traces and logging

    async def trace(self, request: RouteRequest) -> RouteReply:
        """Change the settings of traces, and return them."""
        changes = _object(await request.json()) if request.method == "POST" else None
        traces, name = self._service.traces, request.parts.get("model", "")
        return reply(await self._elsewhere(traces.settings, name, changes))

    async def logging(self, request: RouteRequest) -> RouteReply:
        """Change the settings of the log, and return them."""
        changes = _object(await request.json()) if request.method == "POST" else None
        return reply(await self._elsewhere(self._service.logs.settings, changes))

    # Generate

    async def generate(self, request: RouteRequest) -> RouteReply:
        """Return the only response of a model, as JSON."""
        _check_encoding(request)
        return await generate(self._service, request)

    async def generate_stream(self, request: RouteRequest) -> None:
        """Send any number of responses, as events."""
        _check_encoding(request)
        await generate_stream(self._service, request)

    # Metrics

    async def metrics(self, _: RouteRequest) -> RouteReply:
        """Return the metrics in Prometheus's form."""
        text = await self._elsewhere(self._service.metrics.text)
        return RouteReply(200, _UTF8, text.encode())


def control_routes(service: Service, executor: Executor) -> list[Route]:
    """Return the routes of the port for HTTP."""
    at = Endpoints(service, executor)
    model, versioned = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
    routes = [
        _route("/v2/health/live", TEXT, GET=at.live),
        _route("/v2/health/ready", TEXT, GET=at.ready),
        _route("/v2", GET=at.server),
        _route("/v2/models", GET=at.models),
        _route("/v2/models/stats", GET=at.statistics),
        _route("/v2/repository/index", POST=at.index),
        _route("/v2/repository/{repository}/index", POST=at.index),
        _route("/v2/repository/models/{model}/load", POST=at.load),
        _route("/v2/repository/models/{model}/unload", POST=at.unload),
        _route("/v2/repository/{repository}/models/{model}/load", POST=at.load),
        _route("/v2/repository/{repository}/models/{model}/unload", POST=at.unload),
        _route("/v2/trace/setting", GET=at.trace, POST=at.trace),
        _route(model + "/trace/setting", GET=at.trace, POST=at.trace),
        _route("/v2/logging", GET=at.logging, POST=at.logging),
    ]
    for path in (model, versioned):
        routes += [
            _route(path, GET=at.model),
            _route(path + "/ready", TEXT, GET=at.model_ready),
            _route(path + "/config", GET=at.config),
            _route(path + "/stats", GET=at.statistics),
            _route(path + "/generate", POST=at.generate),
            _route(path + "/generate_stream", POST=at.generate_stream),
        ]
    for kind, status, register, unregister in (
        ("system", at.system_status, at.system_register, at.system_unregister),
        ("cuda", at.cuda_status, at.cuda_register, at.cuda_unregister),
    ):
        base = f"/v2/{kind}sharedmemory"
        routes += [
            _route(base + "/status", GET=status),
            _route(base + "/unregister", POST=unregister),
            _route(base + "/region/{region}/status", GET=status),
            _route(base + "/region/{region}/register", POST=register),
            _route(base + "/region/{region}/unregister", POST=unregister),
        ]
    return routes


def metrics_routes(service: Service, executor: Executor) -> list[Route]:
    return [_route("/metrics", TEXT, GET=Endpoints(service, executor).metrics)]


def _route(path: str, wrong: Headers = JSON, **endpoints: Endpoint) -> Route:
    return Route(path, endpoints, wrong)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _check_repository(request: RouteRequest) -> None:
    if "repository" in request.parts:
        raise ModelError("'repository_name' specification is not supported", "UNSUPPORTED")


def _check_encoding(request: RouteRequest) -> None:
    if request.header(b"content-encoding", "identity") != "identity":
        raise InvalidRequest("Unsupported content-encoding, only 'identity' is supported.")


def _decoded(key: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"'{key}' is not base64") from None


def signposts(options: HttpOptions, ports: Mapping[str, int]) -> list[Route]:
    """Return routes from `/docs` to the page and from `/metrics` to the port for metrics, which people and tools try
    here first.

    `ports` may get the port "metrics" later.
    """

    async def docs(_: RouteRequest) -> RouteReply:
        # Relative, as a proxy may have put the server under a path of its own.
        return _redirect("./", "The page of this server is at its root, /.")

    async def metrics(request: RouteRequest) -> RouteReply:
        if "metrics" not in ports:
            return RouteReply(404, (), b"This server serves no metrics: see --allow-metrics.\n")
        # By the name that the client used for this port, unless the one for metrics listens at another address.
        place = place_of_host(request.header(b"host", "")) or "localhost"
        if options.metrics_address not in (*_ANYWHERE, options.address):
            place = _bracketed(options.metrics_address)
        url = f"http://{place}:{ports['metrics']}/metrics"
        return _redirect(url, f"The metrics of this server are at {url}.")

    return [
        Route(path, {"GET": endpoint, "HEAD": endpoint}) for path, endpoint in (("/docs", docs), ("/metrics", metrics))
    ]


def page_routes(overview: Overview, executor: Executor) -> list[Route]:
    """Return the routes `/` and `/v2/moonpool/overview`. `executor` makes the overview."""
    shown = RouteReply(200, *page())

    async def show_page(_: RouteRequest) -> RouteReply:
        return shown

    async def show_overview(request: RouteRequest) -> RouteReply:
        since = request.query("since")
        if since is not None and not _NUMBER.fullmatch(since):
            error = {"error": "since must be the number of samples that are known: 0 or more"}
            return RouteReply(400, _OVERVIEW, encoded(error))
        number = None if since is None else int(since)

        def tell() -> bytes:
            return encoded(overview.snapshot(number))

        # An overview reads from /proc, which takes longer with every process.
        body = await asyncio.get_running_loop().run_in_executor(executor, tell)
        return RouteReply(200, _OVERVIEW, body)

    return [
        Route(path, {"GET": endpoint, "HEAD": endpoint})
        for path, endpoint in ((PAGE, show_page), ("/v2/moonpool/overview", show_overview))
    ]


def _redirect(location: str, text: str) -> RouteReply:
    return RouteReply(307, ((b"Location", location.encode("latin-1")), *_UTF8), f"{text}\n".encode())


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
