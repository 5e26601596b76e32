"""Clients that break rules, lie, or come in hordes."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server.certificates import self_signed
from tests.server.grpc.asking import add_sub, refused
from tests.server.grpc.serving import TIMEOUT_S, Served, messages
from tests.server.grpc.streaming import Requests, ask_all
from tests.waiting import wait_until
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from moonpool.runtime.model.protobuf import varint

Serve = Callable[..., Served]
METHOD = "/inference.GRPCInferenceService/ModelInfer"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def still_serves(served: Served) -> bool:
    return bool(served.stub().ModelInfer(add_sub(), timeout=TIMEOUT_S).model_name == "add_sub")


@pytest.mark.promise("gRPC", "Whatever bytes a client sends, as …")
def test_bytes_that_are_no_http_2_harm_nobody(serve: Serve) -> None:
    served = serve("add_sub")
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 100,
        PREFACE[:10],
        PREFACE + b"\xff" * 500,
        # The head of a frame of the largest size, without the rest.
        PREFACE + SETTINGS + b"\xff\xff\xff\1\4\0\0\0\1",
        # These are malformed headers, and data for a stream that was never begun.
        PREFACE + SETTINGS + b"\0\0\4\1\5\0\0\0\1\xff\xff\xff\xff",
        PREFACE + SETTINGS + b"\0\0\1\0\0\0\0\0\7x",
    ):
        with socket.create_connection(("127.0.0.1", served.server.port), TIMEOUT_S) as client:
            client.sendall(data)

    assert still_serves(served)


@pytest.mark.promise("gRPC", "Thousands of connections and calls that are dropped harm nobody.")
def test_thousands_of_connections_that_come_and_go_harm_nobody(serve: Serve) -> None:
    served = serve("add_sub")
    for number in range(3000):
        with socket.create_connection(("127.0.0.1", served.server.port), TIMEOUT_S) as client:
            if number % 3:
                # Some connections close before the server accepts them.
                with suppress(ConnectionError):
                    client.sendall(PREFACE if number % 2 else PREFACE + SETTINGS)

    assert still_serves(served)
    wait_until(lambda: not served.server.calls)


@pytest.mark.promise("gRPC", "Connections over the limit are closed before they send anything, with TLS or without.")
@pytest.mark.parametrize("data", [b"", PREFACE, b"\x16\x03\x01"])
@pytest.mark.parametrize("tls", [False, True])
def test_connections_that_stay_have_a_bound_before_they_say_anything(
    serve: Serve, tmp_path: Path, data: bytes, tls: bool
) -> None:
    key, certificate = self_signed(tmp_path)
    files = {"server_key": str(key), "server_cert": str(certificate)} if tls else {}
    served = serve(max_connections=50, use_ssl=tls, **files)

    def held() -> int:
        """Count the descriptors of the server, which is in this process."""
        return len(os.listdir("/proc/self/fd")) - len(clients)

    clients: list[socket.socket] = []
    before = held()
    most = before
    try:
        for number in range(500):
            clients.append(socket.create_connection(("127.0.0.1", served.server.port), TIMEOUT_S))
            with suppress(ConnectionError):
                clients[-1].sendall(data)
            if number % 20 == 0:
                most = max(most, held())
        assert most <= before + 50 + 4
        # Connections over the limit are closed.
        wait_until(lambda: sum(map(_is_closed, clients)) >= 450)
    finally:
        for client in clients:
            client.close()
    clients.clear()
    # The loop keeps one in reserve from the first connection on.
    wait_until(lambda: held() <= before + 1)


def _is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_a_message_that_is_too_large_is_refused(serve: Serve) -> None:
    served = serve("add_sub", max_message_bytes=1000)

    code, words = refused(served.stub().ModelInfer, add_sub(bytes(2000)))

    assert code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL), words
    assert still_serves(served)


def aliased(count: int) -> Any:
    """Return a request for so many outputs of 32 MiB, which are all the same memory."""
    asked = messages.ModelInferRequest(model_name="aliased", id="7")
    asked.inputs.add(name="N", datatype="INT32", shape=[1])
    asked.raw_input_contents.append(count.to_bytes(4, "little"))
    return asked


def most_resident_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.promise(
    "gRPC",
    "An answer that no message of gRPC can hold is refused before its outputs, which may all be "
    "the same memory, are joined.",
)
def test_an_answer_that_no_message_can_hold_is_refused_before_it_is_made(serve: Serve) -> None:
    channel = serve("aliased").channel(("grpc.max_receive_message_length", -1))
    stub = GRPCInferenceServiceStub(channel)
    answer = stub.ModelInfer(aliased(2), timeout=TIMEOUT_S)
    assert [len(each) for each in answer.raw_output_contents] == [32 << 20] * 2
    del answer
    Path("/proc/self/clear_refs").write_text("5")
    before = most_resident_bytes()

    code, words = refused(stub.ModelInfer, aliased(70))
    ((streamed, request_id, _, data),) = ask_all(stub, aliased(70))

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert request_id == "7"
    assert data == []
    for text in (words, streamed):
        assert re.search(r"Response has byte size 23\d{8} which exceeds gRPC's byte size limit 2147483647\.", text)
    assert most_resident_bytes() - before < 256 << 20


def field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(data)) + data


NAMED = field(1, b"add_sub")
WHOLE = 64 << 20
# Each has fields that take many times their size in a protobuf library, and the words of the refusal.
GROWING: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "strings": (lambda: field(5, field(5, b"B\0" * (WHOLE // 2))), "fields", "inputs.contents.bytes_contents"),
    "dimensions": (lambda: field(5, field(3, b"\1" * WHOLE)), "numbers", "inputs.shape"),
    "single dimensions": (lambda: field(5, b"\x18\1" * (WHOLE // 2)), "fields", "inputs.shape"),
    "integers": (lambda: field(5, field(5, field(3, b"\1" * WHOLE))), "numbers", "inputs.contents.int64_contents"),
    "inputs' parameters": (lambda: field(5, b"\x22\0" * (WHOLE // 2)), "fields", "inputs.parameters"),
    "outputs' parameters": (lambda: field(6, b"\x12\0" * (WHOLE // 2)), "fields", "outputs.parameters"),
}


@pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "A gRPC message whose fields or numbers would take many times its size is refused "
    "before they are read: in a stream and by every method. Large "
    "files and tensors are read.",
)
@pytest.mark.parametrize("what", GROWING)
def test_fields_that_would_take_more_memory_than_the_message_are_refused(serve: Serve, what: str) -> None:
    make, counted, where = GROWING[what]
    message = NAMED + make()
    served = serve("add_sub")
    channel = served.channel()
    Path("/proc/self/clear_refs").write_text("5")
    before = most_resident_bytes()

    code, words = refused(channel.unary_unary(METHOD), message)

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert re.fullmatch(
        rf"the ModelInferRequest has more than \d+ {counted}, the last of them in '{where}': "
        "send tensors in raw_input_contents",
        words,
    )
    # This process holds the client's and the server's copies of the bytes.
    assert most_resident_bytes() - before < 6 * len(message)
    assert still_serves(served)


@pytest.mark.promise("What the server bears, and whom it answers like", "A gRPC message whose fields or …")
def test_a_stream_ends_at_fields_that_would_take_more_memory(serve: Serve) -> None:
    served = serve("add_sub")
    call = served.channel().stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    make, _, where = GROWING["strings"]

    with pytest.raises(grpc.RpcError) as raised:
        list(call(iter([NAMED + make()]), timeout=TIMEOUT_S))

    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert where in raised.value.details()
    assert still_serves(served)


@pytest.mark.promise("What the server bears, and whom it answers like", "A gRPC message whose fields or …")
@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("RepositoryModelLoad", "more than 1048576 fields, the last of them in 'parameters'"),
        ("ModelReady", "more than 1048576 fields, the last of them in 'an unknown field'"),
        ("ServerLive", "the ServerLiveRequest has 8388608 bytes, and 1048576 is the most"),
    ],
)
def test_every_method_bounds_its_message(serve: Serve, method: str, words: str) -> None:
    served = serve("add_sub")
    call = served.channel().unary_unary(f"/inference.GRPCInferenceService/{method}")

    code, details = refused(call, b"\x1a\0" * (4 << 20))

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in details
    assert still_serves(served)


@pytest.mark.promise("What the server bears, and whom it answers like", "A gRPC message whose fields or …")
def test_large_files_and_values_in_few_fields_are_read(serve: Serve) -> None:
    stub = serve("add_sub").stub()
    load = messages.RepositoryModelLoadRequest(model_name="nope")
    load.parameters["file:1/model.py"].bytes_param = bytes(32 << 20)
    load.parameters["nope"].bool_param = True
    asked = messages.ModelInferRequest(model_name="add_sub")
    for name in ("INPUT0", "INPUT1"):
        asked.inputs.add(name=name, datatype="FP32", shape=[4]).contents.fp32_contents.extend([1.0] * (2 << 20))

    # Both messages are parsed, and refused for their content.
    assert "unrecognized load parameter 'nope'" in refused(stub.RepositoryModelLoad, load)[1]
    assert "more than" not in refused(stub.ModelInfer, asked)[1]


@pytest.mark.promise("gRPC", "Thousands of connections and calls that …")
def test_calls_that_are_dropped_before_their_message_harm_nobody(serve: Serve) -> None:
    served = serve("add_sub")
    call = served.channel().stream_unary(METHOD)
    requests = [Requests() for _ in range(50)]
    futures = [call.future(iter(each), timeout=6 * TIMEOUT_S) for each in requests]
    wait_until(lambda: len(served.server.calls) == 50)
    for each, future in zip(requests, futures, strict=True):
        future.cancel()
        each.close()

    wait_until(lambda: not served.server.calls)
    assert still_serves(served)


NAMES = ["", "../..", "a/b", "nul\0", "line\nbreak", "ü" * 3000, "%2e%2e", "x" * 10_000]


@pytest.mark.promise("gRPC", "Whatever bytes a client sends, as …")
def test_names_that_lead_elsewhere_are_not_found(serve: Serve) -> None:
    stub = serve("add_sub").stub()
    for name in NAMES:
        asked = add_sub()
        asked.model_name = name
        assert refused(stub.ModelInfer, asked)[0] is grpc.StatusCode.NOT_FOUND
        ready = messages.ModelReadyRequest(name=name)
        assert not stub.ModelReady(ready, timeout=TIMEOUT_S).ready
        load = messages.RepositoryModelLoadRequest(model_name=name)
        assert refused(stub.RepositoryModelLoad, load)[0] is grpc.StatusCode.INTERNAL


KINDS = [name for name in dir(messages) if name.endswith("Request")]
METHODS = [name.removesuffix("Request") for name in KINDS if not name.startswith("ModelInfer")]


@pytest.mark.promise(
    "gRPC",
    "Whatever bytes a client sends, as messages, frames or names, it gets a response or a "
    "status, and the others are served.",
)
def test_any_bytes_get_a_response_or_a_status(serve: Serve) -> None:
    served = serve("add_sub")
    channel = served.channel()
    good = add_sub(request_id="x").SerializeToString()
    quiet = [name for name in METHODS if "Log" not in name]

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(["ModelInfer", *quiet]), st.data())
    def ask(method: str, data: Any) -> None:
        message = data.draw(st.binary(max_size=100))
        if method == "ModelInfer":
            changed = bytearray(good)
            for at in data.draw(st.lists(st.integers(0, len(good) - 1), max_size=4)):
                changed[at] = data.draw(st.integers(0, 255))
            message = bytes(changed[: data.draw(st.integers(0, len(good)))])
        call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        future = call.future(message, timeout=TIMEOUT_S)
        assert future.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        assert "internal error" not in (future.details() or "")

    ask()
    assert still_serves(served)


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, Path]:
    """Make certificates of an authority, and of a server and a client that it vouches for."""
    import subprocess

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=tmp_path)

    def make(name: str) -> None:
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out",
                f"{name}.csr", "-subj", f"/CN={name}")  # fmt: skip
        (tmp_path / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "root.pem", "-CAkey", "root.key",
                "-CAcreateserial", "-out", f"{name}.pem", "-days", "2", "-extfile", "names")  # fmt: skip

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "root.key", "-out",
            "root.pem", "-subj", "/CN=root", "-days", "2")  # fmt: skip
    make("server")
    make("client")
    return {path.name: path for path in tmp_path.iterdir()}


@pytest.mark.promise("gRPC", "With mutual TLS only clients with a certificate of the authority are served.")
def test_clients_without_the_right_certificate_are_not_served(serve: Serve, certificates: dict[str, Path]) -> None:
    served = serve(
        "add_sub",
        use_ssl_mutual=True,
        server_cert=str(certificates["server.pem"]),
        server_key=str(certificates["server.key"]),
        root_cert=str(certificates["root.pem"]),
    )
    root = certificates["root.pem"].read_bytes()
    pair = (certificates["client.key"].read_bytes(), certificates["client.pem"].read_bytes())
    for credentials, is_served in (
        (grpc.ssl_channel_credentials(root, *pair), True),
        (grpc.ssl_channel_credentials(root), False),
    ):
        with grpc.secure_channel(served.address, credentials) as channel:
            call = channel.unary_unary(METHOD)
            if is_served:
                assert call(add_sub().SerializeToString(), timeout=TIMEOUT_S)
            else:
                assert refused(call, b"")[0] is grpc.StatusCode.UNAVAILABLE
    assert refused(served.channel().unary_unary(METHOD), b"")[0] is grpc.StatusCode.UNAVAILABLE
