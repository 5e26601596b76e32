"""A runtime with models, and the HTTP front end before it, in a loop of its own thread."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

import moonpool
from moonpool.runtime.server.http.options import HttpOptions
from moonpool.runtime.server.http.server import HttpServer
from moonpool.runtime.server.openai.routes import OpenAIEndpoints
from moonpool.runtime.server.service import Service

uvloop.new_event_loop().close()
TIMEOUT_S = 60.0
MODELS = Path(__file__).parents[3] / "examples" / "models"


class Reply(NamedTuple):
    """The response that a client reads."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def value(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        error: str = self.value["error"]
        return error


class Serving:
    """`with Serving(runtime) as serving: serving.post("/v2/models/m/infer", {...})`."""

    def __init__(self, runtime: moonpool.Runtime, **options: Any) -> None:
        self.runtime = runtime
        self.service = Service(runtime)
        self._options = HttpOptions(**{"port": 0, "metrics_port": 0, **options})

    def __enter__(self) -> Serving:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-http")
        self._thread.start()
        try:
            self.server: HttpServer = self.run(self._start)
        except BaseException:
            self._end()
            raise
        ports = self.server.ports
        self.port = ports["http"] if "http" in ports else ports["openai"]
        # Start all threads now: one that starts in the middle of a test would look like a leak.
        self.pools = self.server._executor, self.server._patient
        for executor in self.pools:
            count = executor.most
            together = threading.Barrier(count)
            for done in [executor.submit(together.wait, TIMEOUT_S) for _ in range(count)]:
                done.result()
        return self

    async def _start(self) -> HttpServer:
        server = HttpServer(self.service, self._options, OpenAIEndpoints)
        await server.start()
        return server

    def run(self, function: Callable[[], Any]) -> Any:
        """Run a coroutine in the loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(function(), self.loop).result(TIMEOUT_S)

    def __exit__(self, *_: object) -> None:
        self.run(lambda: self.server.drain(TIMEOUT_S))
        self._end()

    def _end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | Mapping[str, Any] | list[Any] = b"",
        headers: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=TIMEOUT_S)
        try:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, raw, dict(headers or {}))
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, found, answer.read())
        finally:
            connection.close()

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        return self.ask("GET", path, b"", headers)

    def post(self, path: str, body: Any = b"", headers: Mapping[str, str] | None = None) -> Reply:
        return self.ask("POST", path, body, headers)
