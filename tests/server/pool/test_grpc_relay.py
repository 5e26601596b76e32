"""Calls of gRPC that a front end passes on, also after it has begun to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from tests.server.grpc.asking import add_sub
from tests.server.grpc.serving import TIMEOUT_S, OnLoop, Served, messages
from tests.server.grpc.streaming import Requests, told
from tests.waiting import wait_until
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from moonpool.runtime.errors import ModelNotFound
from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.pool.front_grpc import FrontGrpcServer, _Stream

pytestmark = pytest.mark.promise(
    "Front ends",
    "A front end reads a stream that it passes on only as fast as the main process takes "
    "it. The stream ends when the server begins to end.",
)


@pytest.fixture
def main() -> Iterator[Served]:
    """Run the main process's server."""
    served = Served(["add_sub"], GrpcOptions(port=0))
    yield served
    served.close()


class Front:
    """Run a front end before it, and a client. Its models are those of the main process, as long as they are found."""

    def __init__(self, main: Served) -> None:
        self.models, self.metrics, self.traces = self, main.service.metrics, main.service.traces
        self.capture = main.service.capture
        self.backends = main.service.models.backends
        self._of_main = main.service.models
        self.found = 0
        self.most_found = 10**9
        service: Any = self
        self.server = OnLoop(lambda: FrontGrpcServer(service, GrpcOptions(port=0), main.address))
        self.server.start()
        self._channel = grpc.insecure_channel(
            f"127.0.0.1:{self.server.port}", [("grpc.use_local_subchannel_pool", 1)]
        )
        self.stub = GRPCInferenceServiceStub(self._channel)

    def find(self, name: str, version: int | None = None) -> Any:
        self.found += 1
        if self.found > self.most_found:
            raise ModelNotFound(f"'{name}' is not answered for here")
        return self._of_main.find(name, version)

    def close(self) -> None:
        self._channel.close()
        self.server.close()


@pytest.fixture
def front(main: Served) -> Iterator[Front]:
    front = Front(main)
    yield front
    front.close()


@pytest.mark.promise(
    "Front ends",
    "If a model is unloaded while a front end reads a request for it, the main process "
    "answers the request.",
)
@pytest.mark.parametrize("most_found", [0, 1])
def test_a_model_that_goes_while_it_is_asked_is_asked_of_the_main_process(
    front: Front, most_found: int
) -> None:
    front.most_found = most_found

    answer = front.stub.ModelInfer(add_sub(request_id="a"), timeout=TIMEOUT_S)

    assert answer.id == "a"
    assert len(answer.raw_output_contents) == 2


def test_the_main_process_s_error_about_a_name_reaches_the_client(front: Front) -> None:
    asked = messages.ModelInferRequest(model_name="nope")

    with pytest.raises(grpc.RpcError) as raised:
        front.stub.ModelInfer(asked, timeout=TIMEOUT_S)

    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert raised.value.details() == "Request for unknown model: 'nope' is not found"


@pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "A gRPC message whose fields or …",
)
def test_a_message_of_too_many_fields_is_refused_on_every_way(front: Front) -> None:
    asked = messages.ModelInferRequest(model_name="add_sub")
    strings = [b""] * (2 << 20)
    asked.inputs.add(name="INPUT0", datatype="BYTES").contents.bytes_contents.extend(strings)
    passed_on = messages.ModelInferRequest.FromString(asked.SerializeToString())
    passed_on.parameters["shared_memory_region"].bool_param = True

    for call in (
        lambda: front.stub.ModelInfer(asked, timeout=TIMEOUT_S),
        lambda: front.stub.ModelInfer(passed_on, timeout=TIMEOUT_S),
        lambda: list(front.stub.ModelStreamInfer(iter([asked]), timeout=TIMEOUT_S)),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            call()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "inputs.contents.bytes_contents" in raised.value.details()


def test_a_stream_ends_when_the_front_end_is_to_end(front: Front) -> None:
    requests = Requests(add_sub(request_id="a"))
    call = front.stub.ModelStreamInfer(iter(requests), timeout=6 * TIMEOUT_S)
    assert told(next(call))[1] == "a"

    assert front.server.drain(TIMEOUT_S)

    with pytest.raises(grpc.RpcError) as raised:
        next(call)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert raised.value.details() == "the server is ending"
    requests.close()


def test_a_stream_that_its_client_has_ended_ends_well(front: Front) -> None:
    call = front.stub.ModelStreamInfer(iter([add_sub(request_id="a")]), timeout=TIMEOUT_S)

    assert [told(response)[1] for response in call] == ["a"]
    assert call.code() is grpc.StatusCode.OK
    wait_until(lambda: not front.server.calls)


class Sending:
    """A call whose client always has another message."""

    def __init__(self) -> None:
        self.received = 0

    def receive(self, received: Callable[[bytes], object]) -> None:
        self.received += 1
        received(b"%d" % self.received)


def test_a_client_is_read_as_fast_as_the_main_process_takes_it() -> None:
    call: Any = Sending()
    channel: Any = None
    questions = _Stream(channel, call)._questions()

    for count in range(1, 6):
        assert next(questions) == b"%d" % count
        assert call.received == count
