"""tritonclient over HTTP, unmodified."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tests.server.clients.arrays import ARRAYS, LEFT, RIGHT, as_sent, is_sum, names_of
from tests.server.running import RunningServer

client_of = pytest.importorskip("tritonclient.http")
aio = pytest.importorskip("tritonclient.http.aio")


def _inputs(kind: Any, binary: bool = True) -> list[Any]:
    inputs = [kind.InferInput(name, [4], "FP32") for name in ("INPUT0", "INPUT1")]
    for each, array in zip(inputs, (LEFT, RIGHT), strict=True):
        each.set_data_from_numpy(array, binary_data=binary)
    return inputs


@pytest.fixture(scope="module", autouse=True)
def _library(server: RunningServer) -> None:
    """Use the client's library once, as it makes an event loop that lasts as long as the thread."""
    with client_of.InferenceServerClient(server.http) as found:
        assert found.is_server_live()


@pytest.fixture
def client(server: RunningServer) -> Any:
    with client_of.InferenceServerClient(server.http, concurrency=4) as found:
        yield found


def test_a_client_learns_all_about_a_server(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add_sub")
    assert not client.is_model_ready("nope")
    assert client.get_server_metadata()["name"]
    assert client.get_model_metadata("add_sub")["inputs"][0]["name"] == "INPUT0"
    assert client.get_model_config("batched")["max_batch_size"] == 4
    assert client.get_inference_statistics("add_sub")["model_stats"][0]["name"] == "add_sub"
    assert {
        "name": "add_sub",
        "version": "1",
        "state": "READY",
    } in client.get_model_repository_index()
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.get_log_settings()["log_format"]
    assert client.get_cuda_shared_memory_status() == []


@pytest.mark.parametrize("datatype", ARRAYS)
def test_every_datatype_goes_and_comes(client: Any, datatype: str) -> None:
    name, output = names_of(datatype)
    array = ARRAYS[datatype]
    given = client_of.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)

    result = client.infer("every", [given], outputs=[client_of.InferRequestedOutput(output)])

    assert result.as_numpy(output).tolist() == as_sent(array)


@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_requests_and_responses_may_be_packed(
    client: Any, algorithm: str | None, binary: bool
) -> None:
    outputs = [
        client_of.InferRequestedOutput(f"OUTPUT{index}", binary_data=binary) for index in (0, 1)
    ]

    result = client.infer(
        "add_sub",
        _inputs(client_of, binary),
        outputs=outputs,
        request_id="one",
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )

    assert is_sum(result)
    assert result.get_response()["id"] == "one"


def test_many_requests_run_at_once(client: Any) -> None:
    asked = [client.async_infer("add_sub", _inputs(client_of)) for _ in range(50)]

    assert all(is_sum(each.get_result(timeout=60)) for each in asked)


def test_a_sequence_keeps_its_state(client: Any) -> None:
    given = client_of.InferInput("X", [1, 1], "INT32")
    given.set_data_from_numpy(np.array([[5]], np.int32))

    sums = [
        client.infer("sums", [given], sequence_id=7, sequence_start=i == 0, sequence_end=i == 2)
        for i in range(3)
    ]

    assert [int(each.as_numpy("SUM")[0, 0]) for each in sums] == [5, 10, 15]


def test_a_model_s_error_is_the_client_s_exception(client: Any) -> None:
    given = client_of.InferInput("HOW", [1], "BYTES")
    given.set_data_from_numpy(np.array(["NOT_FOUND"], np.object_))

    with pytest.raises(Exception, match=r"\[404\] on purpose"):
        client.infer("fails", [given])


def test_models_come_and_go(client: Any) -> None:
    client.load_model("loadable")
    assert client.get_model_metadata("loadable")["versions"] == ["1", "3"]

    client.unload_model("loadable")

    assert not client.is_model_ready("loadable")


def test_the_client_of_an_event_loop_does_as_well(server: RunningServer) -> None:
    async def ask() -> list[Any]:
        async with aio.InferenceServerClient(server.http) as client:
            assert await client.is_server_live()
            asked = [client.infer("add_sub", _inputs(aio)) for _ in range(20)]
            return await asyncio.gather(*asked)

    assert all(map(is_sum, asyncio.run(ask())))
