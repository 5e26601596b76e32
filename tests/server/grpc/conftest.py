"""A gRPC server in this process with real models, and clients of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import pytest
from tests.server.grpc.serving import Served

from moonpool.runtime.server.grpc import MissingHttp2, open_nghttp2
from moonpool.runtime.server.grpc.options import GrpcOptions


@pytest.fixture(scope="session", autouse=True)
def _grpc_is_there() -> Iterator[None]:
    """Keep gRPC's core in use, which opens descriptors when it is first used and closes them after its last use."""
    try:
        open_nghttp2()
    except MissingHttp2 as error:
        pytest.fail(f"{error}; python setup.py build_ext --inplace compiles the extension")
    server = grpc.server(None)
    server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        channel.subscribe(lambda _: None)
        yield
    server.stop(None).wait()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Return a function that takes names of models and options, and starts a server with them."""
    started: list[Served] = []

    def start(*models: str, **options: object) -> Served:
        served = Served(models, GrpcOptions(port=0, **options))  # type: ignore[arg-type]
        started.append(served)
        return served

    yield start
    for served in started:
        served.close()
