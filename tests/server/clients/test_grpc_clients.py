"""tritonclient over gRPC, unmodified."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from tests.server.clients.arrays import ARRAYS, LEFT, RIGHT, as_sent, is_sum, names_of
from tests.server.running import RunningServer

client_of = pytest.importorskip("tritonclient.grpc")
aio = pytest.importorskip("tritonclient.grpc.aio")
TIMEOUT_S = 60.0


def _inputs() -> list[Any]:
    inputs = [client_of.InferInput(name, [4], "FP32") for name in ("INPUT0", "INPUT1")]
    for each, array in zip(inputs, (LEFT, RIGHT), strict=True):
        each.set_data_from_numpy(array)
    return inputs


def _count(number: int) -> list[Any]:
    given = client_of.InferInput("COUNT", [1], "INT32")
    given.set_data_from_numpy(np.array([number], np.int32))
    return [given]


@pytest.fixture
def client(server: RunningServer) -> Any:
    with client_of.InferenceServerClient(server.grpc) as found:
        yield found


def test_a_client_learns_all_about_a_server(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add_sub")
    assert not client.is_model_ready("nope")
    assert client.get_server_metadata().name
    assert client.get_model_metadata("add_sub").inputs[0].name == "INPUT0"
    assert client.get_model_config("batched").config.max_batch_size == 4
    assert client.get_inference_statistics("add_sub").model_stats[0].name == "add_sub"
    assert "add_sub" in {each.name for each in client.get_model_repository_index().models}
    assert client.get_trace_settings().settings["trace_level"].value == ["OFF"]
    assert client.get_log_settings().settings["log_info"].bool_param


@pytest.mark.parametrize("datatype", ARRAYS)
def test_every_datatype_goes_and_comes(client: Any, datatype: str) -> None:
    name, output = names_of(datatype)
    array = ARRAYS[datatype]
    given = client_of.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)

    result = client.infer("every", [given])

    assert result.as_numpy(output).tolist() == as_sent(array)


@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
def test_messages_may_be_packed(client: Any, algorithm: str | None) -> None:
    assert is_sum(client.infer("add_sub", _inputs(), compression_algorithm=algorithm))


def test_many_requests_run_at_once(client: Any) -> None:
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    for _ in range(50):
        client.async_infer("add_sub", _inputs(), lambda result, error: answers.put((result, error)))

    for _ in range(50):
        result, error = answers.get(timeout=TIMEOUT_S)
        assert error is None
        assert is_sum(result)


def test_a_stream_carries_many_requests(client: Any) -> None:
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number in (3, 0, 2):
        client.async_stream_infer(
            "repeat", _count(number), request_id=str(number), enable_empty_final_response=True
        )

    found: dict[str, list[int]] = {"3": [], "0": [], "2": []}
    finals = 0
    while finals < 3:
        result, error = answers.get(timeout=TIMEOUT_S)
        assert error is None
        response = result.get_response()
        if response.parameters["triton_final_response"].bool_param:
            finals += 1
        else:
            found[response.id].append(int(result.as_numpy("INDEX")[0]))
    client.stop_stream()

    assert found == {"3": [0, 1, 2], "0": [], "2": [0, 1]}


def test_the_client_of_an_event_loop_does_as_well(server: RunningServer) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in (2, 1):
            yield {"model_name": "repeat", "inputs": _count(number)}

    async def ask() -> tuple[list[Any], list[int]]:
        async with aio.InferenceServerClient(server.grpc) as client:
            results = await asyncio.gather(*(client.infer("add_sub", _inputs()) for _ in range(20)))
            streamed = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                streamed.append(int(result.as_numpy("INDEX")[0]))
            return results, streamed

    results, streamed = asyncio.run(ask())
    assert all(map(is_sum, results))
    assert sorted(streamed) == [0, 0, 1]
