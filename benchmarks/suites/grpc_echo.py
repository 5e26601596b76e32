"""Cost of gRPC itself: its library's servers and our own, all with the same echo."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import moonpool
from moonpool.benchmarks.generator.grpc import GrpcWire
from moonpool.benchmarks.suites.hosted import MODELS
from moonpool.benchmarks.suites.peer.served import EchoProcess, report_echoes
from moonpool.benchmarks.suites.report import Report, main

METHOD = "/inference.GRPCInferenceService/ModelInfer"
_MODULE = "moonpool.benchmarks.suites.grpc_echo"
KINDS = {
    "nghttp2": "nghttp2",
    "grpcio's pool of 16 threads": "threads",
    "grpcio's asyncio on uvloop": "asyncio",
    "inference": "inference",
}


def messages() -> Any:
    from tritonclient.grpc import service_pb2

    return service_pb2


def request(batch: bool) -> bytes:
    """Two tensors of four floats; with a batch dimension for the model."""
    asked = messages().ModelInferRequest(model_name="add_sub")
    for name in ("INPUT0", "INPUT1"):
        asked.inputs.add(name=name, datatype="FP32", shape=[1, 4] if batch else [4])
        asked.raw_input_contents.append(bytes(16))
    data: bytes = asked.SerializeToString()
    return data


def echo(data: bytes) -> bytes:
    """Read the request and make a response with two tensors of four floats."""
    asked = messages().ModelInferRequest.FromString(data)
    answer = messages().ModelInferResponse(model_name=asked.model_name, model_version="1")
    for name, raw in zip(("OUTPUT0", "OUTPUT1"), asked.raw_input_contents, strict=True):
        answer.outputs.add(name=name, datatype="FP32", shape=[4])
        answer.raw_output_contents.append(raw)
    response: bytes = answer.SerializeToString()
    return response


# Servers: each has a process of its own, prints its port, and ends with its input


async def _serve_here(port: Any) -> None:
    await port.bind()
    await port.start()
    _say(port.port)
    await asyncio.to_thread(sys.stdin.read)
    await port.drain(1.0)
    port.close()


def serve_echo() -> None:
    from moonpool.runtime.process.event_loop import run
    from moonpool.runtime.process.threads import TaskPool
    from moonpool.runtime.server.clients import AllClients, Clients
    from moonpool.runtime.server.grpc.call import GrpcCall, Method, OpenCalls
    from moonpool.runtime.server.grpc.connection import GrpcConnection
    from moonpool.runtime.server.grpc.options import GrpcOptions
    from moonpool.runtime.server.grpc.server import GrpcPort
    from moonpool.runtime.server.metrics import Meter

    def handle(call: GrpcCall) -> None:
        call.receive(lambda data: call.reply(echo(data or b"")))

    async def serve() -> None:
        methods = {METHOD.encode(): Method(handle, "inference")}
        options, meter = GrpcOptions(port=0), Meter()
        calls = OpenCalls(asyncio.get_running_loop(), methods, options, meter)
        clients: Clients[GrpcConnection] = Clients("gRPC", 100, AllClients(), meter)
        await _serve_here(GrpcPort(calls, options, clients, TaskPool(1, "echo")))

    run(serve())


def serve_threads() -> None:
    import grpc

    server = grpc.server(ThreadPoolExecutor(16))
    handler = grpc.unary_unary_rpc_method_handler(lambda data, _: echo(data))
    service, method = METHOD.strip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _say(port)
    sys.stdin.read()
    server.stop(1.0).wait()


def serve_asyncio() -> None:
    import grpc
    import uvloop

    async def answer(data: bytes, _: object) -> bytes:
        return echo(data)

    async def serve() -> None:
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(answer)
        service, method = METHOD.strip("/").split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        _say(port)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(1.0)

    uvloop.run(serve())


def serve_inference() -> None:
    from moonpool.runtime.process.event_loop import run
    from moonpool.runtime.server.grpc.options import GrpcOptions
    from moonpool.runtime.server.grpc.server import GrpcServer
    from moonpool.runtime.server.service import Service

    async def serve(service: Service) -> None:
        await _serve_here(GrpcServer(service, GrpcOptions(port=0)))

    with moonpool.Runtime() as runtime:
        runtime.load("add_sub", MODELS / "add_sub")
        run(serve(Service(runtime)))


def _say(number: int) -> None:
    print(number, flush=True)


def _wire(asked: bytes, address: str) -> GrpcWire:
    return GrpcWire(address, METHOD, asked)


def measure(report: Report, quick: bool) -> None:
    """All servers in turns."""
    what = dict.fromkeys(KINDS, "echo of 4 floats") | {"inference": "add_sub of 4 floats"}
    with ExitStack() as stack:
        clients = {}
        for kind, served in KINDS.items():
            asked = request(batch=kind == "inference")
            clients[kind] = EchoProcess(_MODULE, served, partial(_wire, asked))
            stack.callback(clients[kind].close)
        report_echoes(report, clients, what, quick)


SERVERS: dict[str, Callable[[], None]] = {
    "nghttp2": serve_echo,
    "threads": serve_threads,
    "asyncio": serve_asyncio,
    "inference": serve_inference,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        SERVERS[sys.argv[2]]()
    else:
        main("grpc_echo", "What does gRPC itself cost, and what a request for inference over it?", measure)
