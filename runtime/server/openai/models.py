"""Lists, loads and unloads models over OpenAI's API, and tells on its own port whether the server is ready.

Theory of operation. Everything runs in tasks of the server's loop; a load waits on a thread. Two requests for one model
wait for each other at a lock of its name, so that of several clients which load it at once, one has loaded it and the
others hear that it is loaded. Locks live as long as somebody holds or awaits them: clients may name models without end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote
from weakref import WeakValueDictionary

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import InvalidRequest, ModelNotFound
from moonpool.runtime.model.config.model import name_problem
from moonpool.runtime.server.http.head import JSON
from moonpool.runtime.server.http.routes import RouteReply, RouteRequest, reply
from moonpool.runtime.server.openai.asking import ModelAsker
from moonpool.runtime.server.openai.errors import NoSuchModel
from moonpool.runtime.server.service import Service

OWNER = "Triton Inference Server"
# The text of Triton's front end.
_REFUSED = "Model load/unload requires --model-control-mode=explicit"


class NotReady(MoonpoolError):
    """The server takes no requests yet, or not any more."""

    code = "UNKNOWN"


class OpenAIModels:
    """The endpoints for models. For the loop's thread."""

    def __init__(self, service: Service, asker: ModelAsker, executor: Executor) -> None:
        """`executor` waits for loads."""
        self._service = service
        self._asker = asker
        self._executor = executor
        self._started = int(time.time())
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def list(self, _: RouteRequest) -> RouteReply:
        """List the models that are served."""
        names = sorted({hosted.model.name for hosted in self._service.models.served()})
        return reply({"object": "list", "data": [self._shown(name) for name in names]})

    async def show(self, request: RouteRequest) -> RouteReply:
        """Describe a model, or a version of it."""
        name = _name_in(request)
        try:
            self._asker.find(name)
        except ModelNotFound:
            raise NoSuchModel(name, status=HTTPStatus.NOT_FOUND) from None
        return reply(self._shown(name))

    async def load(self, request: RouteRequest) -> RouteReply:
        """Load a model that is not loaded, and answer when it is ready."""
        name = self._changeable(request)
        async with self._lock_of(name):
            if self._service.models.versions(name):
                raise InvalidRequest(f"Model '{name}' is already loaded")
            await self._elsewhere(self._service.repository.load, name)
        return reply(self._shown(name))

    async def unload(self, request: RouteRequest) -> RouteReply:
        """Unload a model that is loaded, and answer when the requests that are in it are finished."""
        name = self._changeable(request)
        async with self._lock_of(name):
            try:
                await self._elsewhere(self._service.repository.unload_patiently, name)
            except ModelNotFound:
                raise NoSuchModel(name) from None
        return reply({"status": "success", "model": name})

    async def ready(self, _: RouteRequest) -> RouteReply:
        """Tell whether the server takes requests."""
        if not self._service.metadata.is_ready():
            raise NotReady("the server is not ready for requests")
        return RouteReply(200, JSON)

    def _shown(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": OWNER}

    def _changeable(self, request: RouteRequest) -> str:
        """Return the model that a request would load or unload. Raises `InvalidRequest`."""
        if self._service.models.refuses_control:
            raise InvalidRequest(_REFUSED)
        name = _name_in(request)
        if problem := name_problem(name):
            raise InvalidRequest(f"Invalid model name: {problem}")
        return name

    def _lock_of(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _elsewhere(self, function: Callable[..., Any], name: str) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, function, name)


def _name_in(request: RouteRequest) -> str:
    """Return the name in a path. Clients of this API write it with percent signs where it has other characters."""
    return unquote(request.parts["model"])
