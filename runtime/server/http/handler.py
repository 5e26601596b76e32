"""The handlers of the ports: they refuse who may not ask, give requests for inference to the models, and others to
routes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import NamedTuple

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.hosting.model_control import version_of
from moonpool.runtime.server.http.body import over_openai_size
from moonpool.runtime.server.http.connection import HttpExchange, error_body, http_status
from moonpool.runtime.server.http.head import JSON, TEXT, BadHttpMessage, Head, Headers, path_of
from moonpool.runtime.server.http.inference import HttpInference, InferTarget
from moonpool.runtime.server.http.routes import ErrorReply, RouteTable, id_header, id_of
from moonpool.runtime.server.http.turns import LONG_BYTES
from moonpool.runtime.server.inference.forwarding import ForwardedHeaders
from moonpool.runtime.server.page.content import PAGE
from moonpool.runtime.server.restriction import Origins, Restriction, refused_type

_INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/(\d+))?/infer")
# The API of a path is that of the first pattern which fits, and so is its group of OpenAI's API.
_MODEL = r"/v2/models/[^/]+(?:/versions/\d+)?"
_APIS = [
    (re.compile(pattern), api, group)
    for pattern, api, group in (
        (r"/v2/health/(?:live|ready)", "health", None),
        (_MODEL + r"/ready", "health", None),
        (_MODEL + r"/(?:infer|generate|generate_stream)", "inference", None),
        (_MODEL + r"/config", "model-config", None),
        (r"/v2/models(?:/[^/]+(?:/versions/\d+)?)?/stats|/v2/moonpool/overview", "statistics", None),
        (r"/v2(?:/models/[^/]+)?/trace/setting", "trace", None),
        (r"/v2/logging", "logging", None),
        (r"/v2/repository/.*", "model-repository", None),
        (r"/v2/(?:system|cuda)sharedmemory/.*", "shared-memory", None),
        (r"/v2(?:/models)?", "metadata", None),
        (_MODEL, "metadata", None),
        (r"/v1/models/[^/]+/(?:load|unload)", "model-repository", "model-repository"),
        (r"/v1/models(?:/.*)?", "metadata", "model-repository"),
        (
            r"/v1/(?:chat/)?completions|/v1/embeddings|/v1/audio/transcriptions|(?:/v[12])?/rerank",
            "inference",
            "inference",
        ),
        (r"/health/ready", "health", "health"),
        (r"/metrics", None, "metrics"),
    )
]
_CHANGED_BY_POST = ("trace", "logging", "model-repository", "shared-memory")
_LOAD = re.compile(r"/v2/repository/(?:[^/]+/)?models/[^/]+/load")
_INDEX = re.compile(r"/v2/repository(?:/[^/]+)?/index")
_METRICS_BODY_BYTES = 64 << 10
_CHALLENGE: Headers = (*TEXT, (b"WWW-Authenticate", b"Bearer"))
_FOREIGN = (HTTPStatus.FORBIDDEN, "requests from pages of other origins are refused", TEXT)


class _Plan(NamedTuple):
    """The decision for all requests with the same head."""

    refusal: tuple[int, str, Headers] | None
    target: InferTarget | None


class HttpHandler:
    """The handler of the port for HTTP, and of one for OpenAI's API."""

    def __init__(
        self,
        inference: HttpInference,
        others: RouteTable,
        restriction: Restriction,
        origins: Origins,
        header_forward_pattern: str = "",
        *,
        is_openai: bool = False,
    ) -> None:
        """A port for OpenAI's API has nothing of KServe's."""
        self._is_openai = is_openai
        self._inference = inference
        self._others = others
        self._restriction = restriction
        self._origins = origins
        self._forwarding = ForwardedHeaders(header_forward_pattern)

    def handle(self, exchange: HttpExchange) -> None:
        """Answer the request, or give it to the part that answers it."""
        plan = self._plan(exchange.head)
        if plan.target is not None:
            exchange.received_ns = time.monotonic_ns()
            self._inference.handle(exchange, plan.target)
        elif plan.refusal is not None:
            exchange.fail(*plan.refusal)
        elif len(exchange.body) > LONG_BYTES:
            self._inference.turns.take(exchange, partial(self._others.handle, exchange))
        else:
            self._others.handle(exchange)

    def failure(self, head: Head, status: int, text: str, headers: Headers) -> tuple[Headers, bytes]:
        """Return an error in the form of the API that was asked."""
        if self._asks_openai(head):
            others = (each for each in headers if each[0] != b"Content-Type")
            return (*JSON, *others, *id_header(id_of(head))), ErrorReply(status, text).body
        return headers, error_body(text)

    def refuse(self, head: Head) -> BadHttpMessage | None:
        """Return the refusal of a request, which saves its body."""
        refusal = self._plan(head).refusal
        return None if refusal is None else BadHttpMessage(*refusal)

    def most_bytes_of(self, head: Head) -> int:
        """Return the limit for inference, or for JSON; a request to load a model may hold files."""
        target = self._plan(head).target
        if target is not None:
            return self._inference.most_bytes_of(target)
        limits = self._inference.limits
        return limits.body_bytes if _LOAD.fullmatch(path_of(head)) else limits.json_bytes

    def over_size(self, head: Head) -> Callable[[str, int], BadHttpMessage] | None:
        """Return what refuses a body in the words of Triton's front end for OpenAI's API, for requests of that."""
        return over_openai_size if self._asks_openai(head) else None

    def _asks_openai(self, head: Head) -> bool:
        path = path_of(head)
        return self._is_openai or path.startswith("/v1/") or _apis_of(path)[1] == "inference"

    def memory_for(self, head: Head, size_bytes: int) -> memoryview | None:
        """Return memory that the model's stubs see, if the request is for inference."""
        target = self._plan(head).target
        return None if target is None else self._inference.memory_for(target, head, size_bytes)

    def _plan(self, head: Head) -> _Plan:
        plan = head.plan
        if type(plan) is not _Plan:
            plan = head.plan = self._make_plan(head)
        return plan

    def _make_plan(self, head: Head) -> _Plan:
        path = path_of(head)
        found = None if self._is_openai else _INFER.fullmatch(path)
        api, group = ("inference", None) if found else _apis_of(path)
        refusal = self._refusal(head, path, api, group)
        if refusal is None and api == "inference":
            refusal = self._forward(head)
        if refusal is not None or found is None:
            return _Plan(refusal, None)
        if head.method != "POST":
            return _Plan((405, "Method Not Allowed", TEXT), None)
        model, version = found.groups()
        try:
            number = version_of(version or "")
        except MoonpoolError as error:
            return _Plan((http_status(error), str(error), TEXT), None)
        return _Plan(None, InferTarget(model, number, head))

    def _forward(self, head: Head) -> tuple[int, str, Headers] | None:
        """Keep the headers that the model gets, or return the refusal of one."""
        headers = ((k.decode("latin-1"), v.decode("latin-1")) for k, v in head.raw_headers)
        try:
            head.forwarded = self._forwarding.choose(headers)
        except InvalidRequest as error:
            return http_status(error), str(error), JSON
        return None

    def _refusal(self, head: Head, path: str, api: str | None, group: str | None) -> tuple[int, str, Headers] | None:
        header = header_of(head)
        opens_page = path == PAGE and head.method in ("GET", "HEAD")
        if self._origins.is_foreign(header, opens_page=opens_page):
            return _FOREIGN
        if group is not None:
            refusal = self._restriction.refuse_openai(group, header)
            if refusal is not None:
                return 401, refusal.text, _CHALLENGE
        if api is None:
            return None
        is_change = head.method == "POST" and api in _CHANGED_BY_POST and not _INDEX.fullmatch(path)
        refusal = self._restriction.refuse(api, header, is_change=is_change)
        if refusal is not None:
            return (401, refusal.text, _CHALLENGE) if refusal.is_unknown else (403, refusal.text, TEXT)
        wrong = refused_type(header) if is_change else None
        if wrong is not None:
            text = f"a body of the type {wrong} changes nothing here; send application/json"
            return HTTPStatus.UNSUPPORTED_MEDIA_TYPE, text, TEXT
        return None


def _apis_of(path: str) -> tuple[str | None, str | None]:
    """Return KServe's and OpenAI's API to which a path belongs."""
    return next(((api, group) for pattern, api, group in _APIS if pattern.fullmatch(path)), (None, None))


def header_of(head: Head) -> Callable[[str], str | None]:
    """Return a function that looks a header up by its lower-case name."""

    def header(name: str) -> str | None:
        value = head.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    return header


class MetricsHandler:
    def __init__(self, routes: RouteTable, origins: Origins) -> None:
        self._routes = routes
        self._origins = origins

    def handle(self, exchange: HttpExchange) -> None:
        """Answer a request, unless another site's page sent it."""
        if self._origins.is_foreign(header_of(exchange.head)):
            exchange.fail(*_FOREIGN)
        else:
            self._routes.handle(exchange)

    def failure(
        self,
        head: Head,  # noqa: ARG002 - one form for all
        status: int,  # noqa: ARG002
        text: str,
        headers: Headers,
    ) -> tuple[Headers, bytes]:
        """Return an error as KServe v2 has it."""
        return headers, error_body(text)

    def refuse(self, head: Head) -> BadHttpMessage | None:
        """Refuse pages of other sites before they send a body."""
        is_foreign = self._origins.is_foreign(header_of(head))
        return BadHttpMessage(*_FOREIGN) if is_foreign else None

    def most_bytes_of(self, head: Head) -> int:  # noqa: ARG002 - the same for all
        """Return a small limit: no request needs a body."""
        return _METRICS_BODY_BYTES

    def over_size(self, head: Head) -> None:
        """Leave the words to the connection."""

    def memory_for(self, head: Head, size_bytes: int) -> memoryview | None:  # noqa: ARG002 - no wish
        """Receive bodies anywhere."""
        return None
