"""tritonclient, unmodified: over HTTP, over gRPC, and those of event loops."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from tests.server.clients.arrays import ARRAYS, LEFT, RIGHT, as_sent, is_sum, names_of
from tests.server.running import RunningServer

pytest.importorskip("tritonclient.http")
pytest.importorskip("tritonclient.grpc")

PROTOCOLS = ("http", "grpc")
TIMEOUT_S = 60.0
pytestmark = pytest.mark.promise("gRPC", "Triton's clients, for threads, event loops and streams, work as they are.")


class Client:
    """A client of one protocol, and what its library calls things."""

    def __init__(self, server: RunningServer, protocol: str) -> None:
        self.kind: Any = import_module(f"tritonclient.{protocol}")
        self.address = getattr(server, protocol)
        self.is_http = protocol == "http"
        more = {"concurrency": 4} if self.is_http else {}
        self.client: Any = self.kind.InferenceServerClient(self.address, **more)

    def inputs(self, **more: Any) -> list[Any]:
        return [self.given(name, array, **more) for name, array in (("INPUT0", LEFT), ("INPUT1", RIGHT))]

    def given(self, name: str, array: Any, datatype: str = "FP32", **more: Any) -> Any:
        given = self.kind.InferInput(name, list(array.shape), datatype)
        given.set_data_from_numpy(array, **more)
        return given


@pytest.fixture(scope="module", autouse=True)
def _library(server: RunningServer) -> None:
    """Use the library for HTTP once, as it makes an event loop that lasts as long as the thread."""
    with Client(server, "http").client as client:
        assert client.is_server_live()


@pytest.fixture(params=PROTOCOLS)
def asked(server: RunningServer, request: pytest.FixtureRequest) -> Iterator[Client]:
    made = Client(server, request.param)
    with made.client:
        yield made


@pytest.fixture
def streaming(server: RunningServer) -> Iterator[Client]:
    made = Client(server, "grpc")
    with made.client:
        yield made


def of(message: Any, *names: Any) -> Any:
    """Return a part of an answer, which is a dictionary over HTTP and a message over gRPC."""
    for name in names:
        is_item = isinstance(message, dict) or isinstance(name, int)
        message = message[name] if is_item else getattr(message, name)
    return message


def test_a_client_learns_all_about_a_server(asked: Client) -> None:
    client = asked.client
    assert client.is_server_ready()
    assert client.is_model_ready("add_sub")
    assert not client.is_model_ready("nope")
    assert of(client.get_server_metadata(), "name")
    assert of(client.get_model_metadata("add_sub"), "inputs", 0, "name") == "INPUT0"
    config = client.get_model_config("batched")
    assert of(config if asked.is_http else config.config, "max_batch_size") == 4
    counted = client.get_inference_statistics("add_sub")
    assert of(counted, "model_stats", 0, "name") == "add_sub"
    index = client.get_model_repository_index()
    assert "add_sub" in {of(each, "name") for each in (index if asked.is_http else index.models)}
    traces, log = client.get_trace_settings(), client.get_log_settings()
    if asked.is_http:
        assert (traces["trace_level"], log["log_info"]) == (["OFF"], True)
        assert client.get_cuda_shared_memory_status() == []
    else:
        assert traces.settings["trace_level"].value == ["OFF"]
        assert log.settings["log_info"].bool_param


@pytest.mark.parametrize("datatype", ARRAYS)
def test_every_datatype_goes_and_comes(asked: Client, datatype: str) -> None:
    name, output = names_of(datatype)
    array = ARRAYS[datatype]
    wanted = [asked.kind.InferRequestedOutput(output)]

    result = asked.client.infer("every", [asked.given(name, array, datatype)], outputs=wanted)

    assert result.as_numpy(output).tolist() == as_sent(array)


@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
@pytest.mark.parametrize("is_binary", [True, False])
def test_requests_and_responses_may_be_packed(asked: Client, algorithm: str | None, is_binary: bool) -> None:
    names = ("OUTPUT0", "OUTPUT1")
    if asked.is_http:
        binary = {"binary_data": is_binary}
        options = {
            "outputs": [asked.kind.InferRequestedOutput(name, **binary) for name in names],
            "request_compression_algorithm": algorithm,
            "response_compression_algorithm": algorithm,
        }
    else:
        binary, options = {}, {"compression_algorithm": algorithm}

    result = asked.client.infer("add_sub", asked.inputs(**binary), request_id="one", **options)

    assert is_sum(result)
    assert of(result.get_response(), "id") == "one"


def test_many_requests_run_at_once(asked: Client) -> None:
    if asked.is_http:
        running = [asked.client.async_infer("add_sub", asked.inputs()) for _ in range(50)]
        results = [each.get_result(timeout=TIMEOUT_S) for each in running]
    else:
        answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        for _ in range(50):
            asked.client.async_infer("add_sub", asked.inputs(), lambda result, error: answers.put((result, error)))
        found = [answers.get(timeout=TIMEOUT_S) for _ in range(50)]
        assert {error for _, error in found} == {None}
        results = [result for result, _ in found]
    assert all(map(is_sum, results))


def test_a_sequence_keeps_its_state(asked: Client) -> None:
    given = [asked.given("X", np.array([[5]], np.int32), "INT32")]
    sums = [
        asked.client.infer("sums", given, sequence_id=7, sequence_start=i == 0, sequence_end=i == 2) for i in range(3)
    ]

    assert [int(each.as_numpy("SUM")[0, 0]) for each in sums] == [5, 10, 15]


def test_a_model_s_error_is_the_client_s_exception(asked: Client) -> None:
    given = asked.given("HOW", np.array(["NOT_FOUND"], np.object_), "BYTES")
    text = r"\[404\] on purpose" if asked.is_http else r"NOT_FOUND\] on purpose"

    with pytest.raises(Exception, match=text):
        asked.client.infer("fails", [given])


def test_models_come_and_go(asked: Client) -> None:
    asked.client.load_model("loadable")
    metadata = asked.client.get_model_metadata("loadable")
    assert list(of(metadata, "versions")) == ["1", "3"]

    asked.client.unload_model("loadable")

    assert not asked.client.is_model_ready("loadable")


def test_a_stream_carries_many_requests(streaming: Client) -> None:
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    streaming.client.start_stream(lambda result, error: answers.put((result, error)))
    found: dict[str, list[int]] = {"3": [], "0": [], "2": []}
    for number in found:
        given = [streaming.given("COUNT", np.array([int(number)], np.int32), "INT32")]
        streaming.client.async_stream_infer("repeat", given, request_id=number, enable_empty_final_response=True)

    finals = 0
    while finals < 3:
        result, error = answers.get(timeout=TIMEOUT_S)
        assert error is None
        response = result.get_response()
        if response.parameters["triton_final_response"].bool_param:
            finals += 1
        else:
            found[response.id].append(int(result.as_numpy("INDEX")[0]))
    streaming.client.stop_stream()

    assert found == {"3": [0, 1, 2], "0": [], "2": [0, 1]}


def test_the_client_of_an_event_loop_does_as_well(asked: Client) -> None:
    kind = import_module(f"{asked.kind.__name__}.aio")

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in (2, 1):
            given = [asked.given("COUNT", np.array([number], np.int32), "INT32")]
            yield {"model_name": "repeat", "inputs": given}

    async def ask() -> tuple[list[Any], list[int]]:
        async with kind.InferenceServerClient(asked.address) as client:
            running = (client.infer("add_sub", asked.inputs()) for _ in range(20))
            results = await asyncio.gather(*running)
            streamed = []
            if not asked.is_http:
                async for result, error in client.stream_infer(requests()):
                    assert error is None
                    streamed.append(int(result.as_numpy("INDEX")[0]))
            return results, streamed

    results, streamed = asyncio.run(ask())
    assert all(map(is_sum, results))
    assert sorted(streamed) == ([] if asked.is_http else [0, 0, 1])
