"""Takes the place of `tests/utils.py` in Triton's suite for its OpenAI front end: the same three names, over `moonpool
serve`.

It runs in the suite's own environment. `MOONPOOL` names the program, and `MOONPOOL_TOKENIZER` the folder whose chat
template stands for any tokenizer that has no folder of its own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import requests

sys.path.append(str(Path(__file__).resolve().parent.parent / "openai_frontend"))

_PORT = 9000
_START_S = 120.0
# Options with a value that have no counterpart: the tensors of a model tell its convention, and calls are the model's.
_DROPPED = ("--backend", "--tool-call-parser")
_PIECE_BYTES = 1 << 20
Message = MutableMapping[str, Any]


def _template(tokenizer: str) -> str:
    folder = tokenizer if os.path.isdir(tokenizer) else os.environ["MOONPOOL_TOKENIZER"]
    return f"--model-option=*:MOONPOOL_CHAT_TEMPLATE={os.path.abspath(folder)}"


def _translated(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of Triton's front end as those of `moonpool serve`."""
    made: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--tokenizer":
            made.append(_template(next(rest)))
        elif argument in _DROPPED:
            next(rest)
        elif argument != "--enable-kserve-frontends":
            made.append(argument)
    return made


class _Process:
    """A server on a port, which is ready."""

    def __init__(self, arguments: Sequence[str], port: int, environment: Mapping[str, str] | None = None) -> None:
        self.url = f"http://localhost:{port}"
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - until the end
        ports = [f"--openai-port={port}", "--http-port=0", "--metrics-port=0", "--allow-grpc=false"]
        command = [os.environ["MOONPOOL"], "serve", *arguments, *ports]
        self._process = subprocess.Popen(command, stderr=self._log, env={**os.environ, **(environment or {})})
        try:
            self._wait()
        except BaseException:
            self.end()
            raise

    def _wait(self) -> None:
        until_s = time.monotonic() + _START_S
        while not self._is_ready():
            code = self._process.poll()
            if code is not None or time.monotonic() > until_s:
                self._log.seek(0)
                raise RuntimeError(f"the server is not ready (exit code {code}):\n{self._log.read()}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            return bool(requests.get(f"{self.url}/health/ready", timeout=10).status_code == 200)
        except requests.RequestException:
            return False

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.seek(0)
        sys.stderr.write(self._log.read())
        self._log.close()


class OpenAIServer:
    """A server on the usual port, started with arguments of Triton's front end."""

    API_KEY = "EMPTY"

    def __init__(self, cli_args: Sequence[str], *, env_dict: Mapping[str, str] | None = None) -> None:
        self._process = _Process(_translated(cli_args), _PORT, env_dict)
        self.url_root = self._process.url

    def __enter__(self) -> OpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.end()

    def url_for(self, *parts: str) -> str:
        return f"{self.url_root}/{'/'.join(parts)}"

    def get_client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.API_KEY)

    def get_async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.API_KEY)


class _Servers:
    """All servers that were made of one repository."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._running: list[_Process] = []

    def start(self, tokenizer: str | None) -> str:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        process = _Process([*self._arguments, *([_template(tokenizer)] if tokenizer else [])], port)
        self._running.append(process)
        return process.url

    def stop(self) -> None:
        while self._running:
            self._running.pop().end()


def setup_server(
    model_repository: str, model_control_mode: str = "none", load_models: Sequence[str] | None = None
) -> _Servers:
    loads = [f"--load-model={name}" for name in load_models or ()]
    return _Servers([f"--model-repository={model_repository}", f"--model-control-mode={model_control_mode}", *loads])


def setup_fastapi_app(tokenizer: str | None, server: _Servers, **_: Any) -> _Forwarding:
    return _Forwarding(server.start(tokenizer))


class _Forwarding:
    """An ASGI application that passes each request on as it is, and the answer back."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name not in (b"host", b"transfer-encoding")]
        query = scope["query_string"].decode()
        url = self._url + scope["raw_path"].decode() + (f"?{query}" if query else "")
        content = None if scope["method"] == "GET" else _body(receive)
        async with (
            httpx.AsyncClient(timeout=120, trust_env=False) as client,
            client.stream(scope["method"], url, headers=headers, content=content) as answer,
        ):
            await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.headers.raw})
            async for part in answer.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _live(receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _body(receive: Callable[[], Awaitable[Message]]) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        data = message.get("body", b"")
        for at in range(0, len(data), _PIECE_BYTES):
            yield data[at : at + _PIECE_BYTES]
        if not message.get("more_body", False):
            return
