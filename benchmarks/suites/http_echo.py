"""The costs of HTTP itself: of our connection, of a route in its table, and of uvicorn, all with the same echo."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import resource
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import moonpool
from moonpool.benchmarks.generator.http import HttpWire
from moonpool.benchmarks.suites.hosted import MODELS
from moonpool.benchmarks.suites.peer.served import EchoProcess, report_echoes
from moonpool.benchmarks.suites.report import Report, main
from moonpool.runtime.server.http.connection import HttpExchange, HttpPort
from moonpool.runtime.server.http.head import BadHttpMessage, Head, Headers
from moonpool.runtime.server.http.options import HttpLimits, HttpOptions
from moonpool.runtime.server.http.routes import Route, RouteReply, RouteRequest, RouteTable

_MODULE = "moonpool.benchmarks.suites.http_echo"
BODY = b"0123456789abcdef"


class Echo:
    """Answers with the body of the request."""

    def handle(self, exchange: HttpExchange) -> None:
        exchange.respond(200, (), (bytes(exchange.body),))

    def failure(self, _: Head, __: int, text: str, headers: Headers) -> tuple[Headers, bytes]:
        return headers, text.encode()

    def refuse(self, _: Head) -> BadHttpMessage | None:
        return None

    def memory_for(self, _: Head, __: int) -> memoryview | None:
        return None


class Routed(Echo):
    """Answers through a table of routes, which makes a task for each request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        async def echo(request: RouteRequest) -> RouteReply:
            return RouteReply(200, (), bytes(request.exchange.body))

        self._table = RouteTable(loop, ThreadPoolExecutor(1), [Route("/echo", {"POST": echo})])

    def handle(self, exchange: HttpExchange) -> None:
        self._table.handle(exchange)


async def raw_echo(scope: Any, receive: Any, send: Any) -> None:
    """Echo through ASGI without a framework."""
    if scope["type"] != "http":
        return
    message = await receive()
    body = message["body"]
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


# Servers, each in a process of its own


async def _serve(make_handler: Callable[[asyncio.AbstractEventLoop], Any]) -> None:
    loop = asyncio.get_running_loop()
    port = HttpPort(loop, make_handler(loop), HttpLimits())
    server = await loop.create_server(port, "127.0.0.1", 0)
    _say(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _serve_inference() -> None:
    from moonpool.runtime.server.http.server import HttpServer
    from moonpool.runtime.server.service import Service

    with ExitStack() as stack:
        runtime = stack.enter_context(moonpool.Runtime())
        runtime.load("add_sub", MODELS / "add_sub")
        server = HttpServer(Service(runtime), HttpOptions(port=0, metrics_port=None))
        await server.start()
        _say(server.ports["http"])
        with ThreadPoolExecutor(1) as pool:
            await asyncio.get_running_loop().run_in_executor(pool, sys.stdin.read)
        await server.drain(1.0)


def _serve_uvicorn(application: Any) -> None:
    import uvicorn  # only compared with

    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = uvicorn.Config(application, loop="uvloop", http="httptools", log_level="error", access_log=False)
    _say(listening.getsockname()[1])
    uvicorn.Server(config).run([listening])


def _say(number: int) -> None:
    print(number, flush=True)


def serve(kind: str) -> None:
    """Serve until the process is killed."""
    import uvloop

    if kind == "connection":
        uvloop.run(_serve(lambda _: Echo()))
    elif kind == "route":
        uvloop.run(_serve(Routed))
    elif kind == "inference":
        uvloop.run(_serve_inference())
    else:
        _serve_uvicorn(raw_echo)


# The client


def _echo_request() -> bytes:
    head = f"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n\r\n"
    return head.encode() + BODY


def _inference_request() -> bytes:
    parameters = {"binary_data_size": 16}
    inputs = [
        {"name": name, "datatype": "FP32", "shape": [1, 4], "parameters": parameters} for name in ("INPUT0", "INPUT1")
    ]
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    head = (
        "POST /v2/models/add_sub/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\nContent-Length: {len(text) + 32}\r\n\r\n"
    )
    return head.encode() + text + bytes(32)


def _wire(request: bytes, _: str) -> HttpWire:
    return HttpWire(request)


def measure(report: Report, quick: bool) -> None:
    """All servers in turns."""
    kinds = ["connection", "route"]
    if importlib.util.find_spec("uvicorn") is None:
        report.note("uvicorn is not installed here, so it was not measured.")
    else:
        kinds.append("uvicorn")
    kinds.append("inference")
    what = dict.fromkeys(kinds, "echo of 16 bytes") | {"inference": "add_sub of 4 floats"}
    with ExitStack() as stack:
        clients = {}
        for kind in kinds:
            request = _inference_request() if kind == "inference" else _echo_request()
            clients[kind] = EchoProcess(_MODULE, kind, partial(_wire, request))
            stack.callback(clients[kind].close)
        report_echoes(report, clients, what, quick)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        serve(sys.argv[2])
    else:
        main("http_echo", "What does HTTP itself cost, and what a request for inference over it?", measure)
