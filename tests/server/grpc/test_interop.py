"""The cases of gRPC's interoperability tests that a server of any service can answer, with grpcio's client.

The names are those of grpc/doc/interop-test-descriptions.md. Cases about compression, TLS and tokens have tests of
their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.e2e.hosting import ECHO
from tests.e2e.hosting import MODELS as HOSTED
from tests.inside import hosted_in
from tests.server.grpc.asking import add_sub, repeat, text
from tests.server.grpc.serving import TIMEOUT_S, Served, messages
from tests.server.grpc.streaming import Requests, ask_all, told
from tests.waiting import wait_until
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from moonpool.runtime.server.grpc.options import GrpcOptions

pytestmark = pytest.mark.promise(
    "gRPC",
    "gRPC's interoperability cases hold: empty and large messages, streams of either side and of both, cancellation "
    "before and after the first response, deadlines, statuses with any text, missing methods and services, metadata.",
)
SERVICE = "inference.GRPCInferenceService"
LARGE_BYTES = 271_828


class Kept(Served):
    """One server and one channel for all tests, as grpcio keeps sockets for every client."""

    def __init__(self, folder: Path) -> None:
        names = ("add_sub", "repeat", "waits", "told", "fails")
        super().__init__(names, GrpcOptions(port=0, header_forward_pattern="x-.*"))
        self.runtime.load("echo", HOSTED / "echo.py", config=ECHO)
        self.one_channel = super().channel()
        self.methods = GRPCInferenceServiceStub(self.one_channel)
        # The loop keeps a descriptor for every stub that it has waited for.
        path = folder / "warm"
        path.with_suffix(".go").touch()
        several = [
            add_sub(),
            repeat(50, size=LARGE_BYTES // 4),
            text("waits", "PATH", str(path)),
            large(LARGE_BYTES),
            asks_told(),
        ]
        ask_all(self.methods, *several, text("fails", "HOW", "INTERNAL"), *several[:1] * 100)
        for asked in (several[0], *several[2:]):
            self.methods.ModelInfer(asked, timeout=TIMEOUT_S)

    def channel(self, *_: object) -> grpc.Channel:
        return self.one_channel


def large(size: int) -> Any:
    asked = messages.ModelInferRequest(model_name="echo")
    asked.inputs.add(name="X", datatype="FP32", shape=[size // 4])
    asked.raw_input_contents.append(bytes(range(256)) * (size // 256) + bytes(size % 256))
    return asked


def asks_told() -> Any:
    asked = messages.ModelInferRequest(model_name="told")
    asked.inputs.add(name="X", datatype="FP32", shape=[1])
    asked.raw_input_contents.append(bytes(4))
    return asked


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    made = Kept(tmp_path_factory.mktemp("warm"))
    yield made
    made.close()


def test_empty_unary(served: Kept) -> None:
    assert served.methods.ServerLive(messages.ServerLiveRequest(), timeout=TIMEOUT_S).live


def test_large_unary(served: Kept) -> None:
    asked = large(LARGE_BYTES)
    answer = served.methods.ModelInfer(asked, timeout=TIMEOUT_S)
    assert list(answer.raw_output_contents) == list(asked.raw_input_contents)


def test_client_streaming(served: Kept) -> None:
    answers = ask_all(served.methods, *(add_sub(request_id=str(each)) for each in range(4)))
    assert [(error, each) for error, each, _, _ in answers] == [("", each) for each in "0123"]


def test_server_streaming(served: Kept) -> None:
    answers = ask_all(served.methods, repeat(4, size=LARGE_BYTES // 4))
    assert [bool(data) for _, _, _, data in answers] == [True] * 4


def test_ping_pong(served: Kept) -> None:
    asked = Requests()
    answers = served.methods.ModelStreamInfer(iter(asked), timeout=TIMEOUT_S)
    for number, size in enumerate((27_184, 8, 1_828, 45_904)):
        one = large(size)
        one.id = str(number)
        asked.send(one)
        error, request_id, _, (data,) = told(next(answers))
        assert (error, request_id, len(data)) == ("", str(number), size)
    asked.close()
    assert list(answers) == []
    assert answers.code() is grpc.StatusCode.OK


def test_empty_stream(served: Kept) -> None:
    answers = served.methods.ModelStreamInfer(iter(()), timeout=TIMEOUT_S)
    assert list(answers) == []
    assert answers.code() is grpc.StatusCode.OK


def test_custom_metadata(served: Kept) -> None:
    """Metadata reaches the model, and bytes that are no text do no harm."""
    metadata = (("x-custom", "initial_metadata_value"), ("x-custom-bin", b"\xab\xab\xab"))
    asked = asks_told()
    answer = served.methods.ModelInfer(asked, metadata=metadata[:1], timeout=TIMEOUT_S)
    (data,) = answer.raw_output_contents
    assert json.loads(data[4:])["parameters"]["x-custom"] == "initial_metadata_value"
    assert served.methods.ModelInfer(add_sub(), metadata=metadata[1:], timeout=TIMEOUT_S)


def test_status_code_and_message(served: Kept) -> None:
    asked = text("fails", "HOW", "ALREADY_EXISTS")
    with pytest.raises(grpc.RpcError) as raised:
        served.methods.ModelInfer(asked, timeout=TIMEOUT_S)
    found = raised.value.code(), raised.value.details()
    assert found == (grpc.StatusCode.ALREADY_EXISTS, "on purpose")
    # In a stream the error is a response, unless the client asks for a status.
    (answer,) = ask_all(served.methods, asked)
    assert answer[0] == "on purpose"
    with pytest.raises(grpc.RpcError) as raised:
        ask_all(served.methods, asked, metadata=(("triton_grpc_error", "true"),))
    found = raised.value.code(), raised.value.details()
    assert found == (grpc.StatusCode.ALREADY_EXISTS, "on purpose")


def test_special_status_message(served: Kept) -> None:
    name = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈 and %41\t\n"
    with pytest.raises(grpc.RpcError) as raised:
        served.methods.ModelInfer(messages.ModelInferRequest(model_name=name), timeout=TIMEOUT_S)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert raised.value.details() == f"Request for unknown model: '{name}' is not found"


@pytest.mark.parametrize("path", [f"/{SERVICE}/UnimplementedCall", "/nope.Unimplemented/Call"])
def test_unimplemented_method_and_service(served: Kept, path: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        served.one_channel.unary_unary(path)(b"", timeout=TIMEOUT_S)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_cancel_after_begin(served: Kept) -> None:
    asked = Requests()
    answers = served.methods.ModelStreamInfer(iter(asked), timeout=TIMEOUT_S)
    answers.cancel()
    asked.close()
    assert answers.code() is grpc.StatusCode.CANCELLED
    wait_until(lambda: not served.server.calls)


def test_cancel_after_first_response(served: Kept, tmp_path: Path) -> None:
    path = tmp_path / "asked"
    asked = Requests(add_sub())
    answers = served.methods.ModelStreamInfer(iter(asked), timeout=TIMEOUT_S)
    assert told(next(answers))[0] == ""
    asked.send(text("waits", "PATH", str(path)))
    wait_until(lambda: path.with_suffix(".begun").exists())
    answers.cancel()
    asked.close()
    with pytest.raises(grpc.RpcError):
        next(answers)
    assert answers.code() is grpc.StatusCode.CANCELLED
    wait_until(lambda: path.with_suffix(".cancelled").exists())
    wait_until(lambda: not served.server.calls)


def test_timeout_on_sleeping_server(served: Kept, tmp_path: Path) -> None:
    asked = Requests(text("waits", "PATH", str(tmp_path / "asked")))
    answers = served.methods.ModelStreamInfer(iter(asked), timeout=0.2)
    with pytest.raises(grpc.RpcError):
        next(answers)
    asked.close()
    assert answers.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: not served.server.calls)
    wait_until(lambda: not hosted_in(served.runtime, "waits").scheduler.executing)


def test_a_result_is_what_was_computed(served: Kept) -> None:
    answer = served.methods.ModelInfer(add_sub(), timeout=TIMEOUT_S)
    assert list(np.frombuffer(answer.raw_output_contents[0], np.float32)) == [0, 2, 4, 6]
