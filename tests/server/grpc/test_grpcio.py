"""gRPC where there is no nghttp2: grpcio's own server does the same, at more cost."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.server.grpc.asking import add_sub, refused, repeat, text
from tests.server.grpc.serving import TIMEOUT_S, Served, messages
from tests.server.grpc.streaming import Requests, ask_all, told
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.server.clients import AllClients, Clients
from moonpool.runtime.server.grpc import port
from moonpool.runtime.server.grpc.connection import GrpcConnection
from moonpool.runtime.server.grpc.grpcio import GrpcioPort
from moonpool.runtime.server.grpc.options import GrpcOptions

pytestmark = pytest.mark.promise(
    "gRPC",
    "Without nghttp2 or a compiler, grpcio's own server serves the same, and the log says what to install.",
)


def no_library() -> None:
    raise OSError("libnghttp2.so.14: cannot open shared object file")


class Kept(Served):
    """One server for all tests, as grpcio keeps sockets for every loop that it has served in, and its clients."""

    def __init__(self) -> None:
        names = ("add_sub", "repeat", "waits")
        super().__init__(names, GrpcOptions(port=0, max_message_bytes=32 << 20))
        self.one_client = super().client()
        self.one_channel = super().channel()
        assert self.one_client.is_server_live()
        # The loop keeps a descriptor for every stub that it has waited for.
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "asked")
            path.with_suffix(".go").touch()
            asked = [add_sub(), text("waits", "PATH", str(path)), repeat(50)]
            # And memory for as much as it has sent at once.
            assert len(ask_all(self.stub(), *asked, *asked[:1] * 200)) == 252

    def client(self) -> triton.InferenceServerClient:
        return self.one_client

    def channel(self, *_: object) -> grpc.Channel:
        return self.one_channel


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(port, "nghttp2", no_library)
        made = Kept()
    assert isinstance(made.server.server._port, GrpcioPort)
    yield made
    made.close()


def test_requests_are_answered(served: Served) -> None:
    client = served.client()
    tensors = []
    for name in ("INPUT0", "INPUT1"):
        tensors.append(triton.InferInput(name, [4], "FP32"))
        tensors[-1].set_data_from_numpy(np.arange(4, dtype=np.float32))

    for packing in (None, "gzip", "deflate"):
        answer = client.infer("add_sub", tensors, compression_algorithm=packing)
        assert list(answer.as_numpy("OUTPUT0")) == [0, 2, 4, 6]
    assert client.is_server_ready()
    assert client.get_server_metadata().name


def test_errors_have_their_status(served: Served) -> None:
    stub = served.stub()
    assert refused(stub.ModelInfer, messages.ModelInferRequest(model_name="nope"))[0] is (
        grpc.StatusCode.NOT_FOUND
    )
    assert refused(stub.ModelInfer, add_sub(bytes(33 << 20)))[0] is (
        grpc.StatusCode.RESOURCE_EXHAUSTED
    )
    unknown = served.channel().unary_unary("/inference.GRPCInferenceService/Nothing")
    assert refused(unknown, b"")[0] is grpc.StatusCode.UNIMPLEMENTED


def test_streams_are_answered_in_order(served: Served) -> None:
    stub = served.stub()
    answers = ask_all(stub, *(add_sub(request_id=str(number)) for number in range(200)))
    assert [request_id for _, request_id, _, _ in answers] == [str(each) for each in range(200)]

    assert len(ask_all(stub, repeat(50))) == 50


def test_clients_that_leave_or_whose_time_is_over_cancel_their_requests(
    served: Served, tmp_path: Path
) -> None:
    scheduler = served.runtime._models.find("waits").scheduler
    stub = served.stub()
    for name in ("cancelled", "late", "streamed"):
        path = tmp_path / name
        asked = text("waits", "PATH", str(path))
        requests = Requests(asked)
        call = (
            stub.ModelStreamInfer(iter(requests), timeout=6 * TIMEOUT_S)
            if name == "streamed"
            else stub.ModelInfer.future(asked, timeout=0.5 if name == "late" else TIMEOUT_S)
        )
        if name != "late":
            wait_until(lambda path=path: path.with_suffix(".begun").exists())  # type: ignore[misc]
            call.cancel()
        requests.close()
        wait_until(call.done)
        wait_until(lambda: not scheduler.queued and not scheduler.executing)
        wait_until(lambda: not served.server.calls)
        # A request whose time is over may reach the model only now.
        begun, cancelled = path.with_suffix(".begun"), path.with_suffix(".cancelled")
        wait_until(lambda b=begun, c=cancelled: b.exists() == c.exists())  # type: ignore[misc]


def test_a_stream_takes_requests_after_answers(served: Served) -> None:
    requests = Requests(add_sub(request_id="a"))
    call = served.stub().ModelStreamInfer(iter(requests), timeout=TIMEOUT_S)
    assert told(next(call))[1] == "a"
    requests.send(add_sub(request_id="b"))
    assert told(next(call))[1] == "b"
    requests.close()
    assert list(call) == []


def test_a_port_that_is_taken_is_an_error_that_names_it(
    served: Served,
) -> None:
    async def bind() -> None:
        taken = GrpcioPort(served.server.server.calls, GrpcOptions(port=served.server.port))
        await taken.bind()

    with pytest.raises(moonpool.MoonpoolError, match=f"listen on 127.0.0.1:{served.server.port}"):
        served.server.run(bind())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("libnghttp2.so.14: no such file"), "no such file; install it (Debian"),
        (ImportError("no module"), "install a C++ compiler, and moonpool again"),
    ],
)
def test_the_log_says_what_to_install(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    words: str,
) -> None:
    def fail() -> None:
        raise error

    async def make() -> None:
        calls, options = served.server.server.calls, GrpcOptions(port=0)
        clients: Clients[GrpcConnection] = Clients("gRPC", 1, AllClients(), calls.meter)
        made = port.make_port(calls, options, clients, served.server.server._quick)
        assert isinstance(made, GrpcioPort)

    monkeypatch.setattr(port, "nghttp2", fail)
    with caplog.at_level(logging.WARNING, "moonpool"):
        served.server.run(make())

    (said,) = [each for each in caplog.messages if "grpcio" in each]
    assert words in said


# The last one, as it ends the server.
def test_a_drain_finishes_what_is_there_and_ends_streams(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "asked"
    stub = served.stub()
    idle = Requests()
    stream = stub.ModelStreamInfer(iter(idle), timeout=TIMEOUT_S)
    future = stub.ModelInfer.future(text("waits", "PATH", str(path)), timeout=TIMEOUT_S)
    wait_until(lambda: path.with_suffix(".begun").exists())
    wait_until(lambda: len(served.server.calls) == 2)
    path.with_suffix(".go").touch()

    assert served.server.drain(TIMEOUT_S)

    assert future.result().raw_output_contents[0] == b"\2\0\0\0go"
    with pytest.raises(grpc.RpcError) as raised:
        next(stream)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    idle.close()
