"""The port, the thread behind it, and its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.e2e.hosting import ECHO, MODELS, tensor
from tests.refused_threads import refuse_threads
from tests.server.grpc.serving import ROOT, TIMEOUT_S, OnLoop, Served, messages
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.server.grpc.inference import LARGE_BYTES
from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.grpc.reflection import HealthCheckRequest, HealthCheckResponse
from moonpool.runtime.server.grpc.server import GrpcServer

LIMITS = pytest.mark.promise("At the limits", "If no thread can be started …")
Serve = Callable[..., Served]
SERVICE = "/inference.GRPCInferenceService"


def test_the_server_is_alive_and_ready(serve: Serve) -> None:
    client = serve().client()

    assert client.is_server_live()
    assert client.is_server_ready()


def test_a_model_is_ready_once_it_is_loaded(serve: Serve) -> None:
    client = serve("add_sub").client()

    assert client.is_model_ready("add_sub")
    assert client.is_model_ready("add_sub", "1")
    assert not client.is_model_ready("nope")


@pytest.mark.promise("gRPC", "All other methods of the service, …")
def test_probes_ask_the_health_service_of_grpc(serve: Serve) -> None:
    channel = serve().channel()
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
    )

    assert check(HealthCheckRequest(), timeout=TIMEOUT_S).status == 1


@pytest.mark.promise(
    "gRPC",
    "Models that are loading, or do not answer whether they are ready, delay no probe of "
    "the server and no scrape of its metrics.",
)
def test_models_that_keep_a_probe_waiting_keep_no_other_waiting(serve: Serve) -> None:
    served = serve()
    channel, stub = served.channel(), served.stub()
    config = {"input": [tensor("HOW", "STRING", 1)], "output": [tensor("SAID", "STRING", 1)]}
    served.runtime.load("moody", ROOT / "tests" / "models" / "moody.py", config=config)
    served.runtime.infer("moody", {"HOW": np.array([b"hang"], np.object_)})
    of_model = messages.ModelReadyRequest(name="moody")
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
    )

    # Each thread for RPCs other than inference gets one of these.
    asked = [stub.ModelReady.future(of_model, timeout=TIMEOUT_S) for _ in range(5)]

    assert check(HealthCheckRequest(), timeout=TIMEOUT_S).status == 1
    assert stub.ServerReady(messages.ServerReadyRequest(), timeout=TIMEOUT_S).ready
    assert stub.ServerMetadata(messages.ServerMetadataRequest(), timeout=TIMEOUT_S).name
    assert not any(each.done() for each in asked)
    served.runtime.infer("moody", {"HOW": np.array([b"open"], np.object_)})
    assert all(not each.result().ready for each in asked)


def test_a_method_that_is_none_is_refused(serve: Serve) -> None:
    call = serve().channel().unary_unary(f"{SERVICE}/Nothing")

    with pytest.raises(grpc.RpcError) as raised:
        call(b"", timeout=TIMEOUT_S)

    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_bytes_that_are_no_message_are_refused(serve: Serve) -> None:
    channel = serve().channel()

    for method in ("ServerLive", "ModelReady"):
        with pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary(f"{SERVICE}/{method}")(b"\xff" * 9, timeout=TIMEOUT_S)

        assert raised.value.code() is grpc.StatusCode.INTERNAL


def test_a_call_without_a_message_is_refused(serve: Serve) -> None:
    call = serve().channel().stream_unary(f"{SERVICE}/ServerLive")

    with pytest.raises(grpc.RpcError) as raised:
        call(iter(()), timeout=TIMEOUT_S)

    assert raised.value.code() is grpc.StatusCode.INTERNAL


def test_a_port_that_is_taken_is_an_error_that_names_it(serve: Serve) -> None:
    served = serve()

    where = rf"cannot listen at 127\.0\.0\.1, port {served.server.port} \(grpc\): Address already"
    with pytest.raises(moonpool.MoonpoolError, match=where):
        OnLoop(lambda: GrpcServer(served.service, GrpcOptions(port=served.server.port)))


def test_of_two_servers_that_start_at_once_the_second_to_listen_is_refused_the_port(serve: Serve) -> None:
    service = serve().service
    first = OnLoop(lambda: GrpcServer(service, GrpcOptions(port=0)))
    second = OnLoop(lambda: GrpcServer(service, GrpcOptions(port=first.port)))
    try:
        first.start()
        with pytest.raises(moonpool.MoonpoolError, match=rf"port {first.port} \(grpc\): Address already in use"):
            second.start()
    finally:
        second.close()
        first.close()


def test_a_server_that_was_never_started_gives_its_port_back(serve: Serve) -> None:
    service = serve().service
    first = OnLoop(lambda: GrpcServer(service, GrpcOptions(port=0)))
    first.close()
    first.close()

    second = OnLoop(lambda: GrpcServer(service, GrpcOptions(port=first.port)))
    second.close()


@LIMITS
def test_a_call_for_which_there_is_no_thread_is_refused_and_the_next_one_is_not(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = serve().stub()
    with monkeypatch.context() as patch:
        refuse_threads(patch, "moonpool-grpc-control")
        with pytest.raises(grpc.RpcError, match="can't start new thread") as raised:
            stub.ServerMetadata(messages.ServerMetadataRequest(), timeout=TIMEOUT_S)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE

    assert stub.ServerMetadata(messages.ServerMetadataRequest(), timeout=TIMEOUT_S).name


@LIMITS
def test_a_large_request_is_executed_once_whether_there_is_a_thread_to_copy_it_or_not(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    served.runtime.load("echo", MODELS / "echo.py", config=ECHO)
    client = served.client()
    given = np.arange(LARGE_BYTES, dtype=np.float32)
    wanted = triton.InferInput("X", [LARGE_BYTES], "FP32")
    wanted.set_data_from_numpy(given)

    def is_answered() -> bool:
        # What is compressed is copied: it is not received into the memory of the model's stubs.
        found = client.infer("echo", [wanted], compression_algorithm="gzip").as_numpy("OUT_X")
        return bool(np.array_equal(found, given))

    with monkeypatch.context() as patch:
        refused = refuse_threads(patch, "moonpool-grpc-copying")
        assert is_answered()
        assert refused

    # A task that was kept would run as soon as there is a thread.
    assert is_answered()
    served.server.drain(TIMEOUT_S)

    assert served.runtime.statistics("echo")["inference_count"] == 2


def test_a_drained_server_takes_no_calls(serve: Serve) -> None:
    served = serve()
    stub = served.stub()
    stub.ServerLive(messages.ServerLiveRequest(), timeout=TIMEOUT_S)

    assert served.server.drain(TIMEOUT_S)

    with pytest.raises(grpc.RpcError) as raised:
        stub.ServerLive(messages.ServerLiveRequest(), timeout=TIMEOUT_S)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_calls_beyond_the_limit_are_refused(serve: Serve) -> None:
    call = serve(max_calls=2).channel().stream_unary(f"{SERVICE}/ServerLive")
    with Held() as held:
        calls = [call.future(held.requests(), timeout=TIMEOUT_S) for _ in range(3)]
        wait_until(lambda: any(each.done() for each in calls))
        refused = [each for each in calls if each.done()]

        assert [each.code() for each in refused] == [grpc.StatusCode.RESOURCE_EXHAUSTED]


def test_a_drain_waits_for_calls_until_its_time_is_over(serve: Serve) -> None:
    served = serve()
    call = served.channel().stream_unary(f"{SERVICE}/ServerLive")
    with Held() as held:
        waiting = call.future(held.requests(), timeout=TIMEOUT_S)
        wait_until(lambda: served.server.calls)

        assert not served.server.drain(0.05)

        assert waiting.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


class Held:
    """Send no request before the end of the block."""

    def __init__(self) -> None:
        self._is_over = threading.Event()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def requests(self) -> Iterator[bytes]:
        self._is_over.wait(TIMEOUT_S)
        yield from ()
