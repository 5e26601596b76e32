"""Clients of a tritonserver get the answers of models in moonpool's stubs."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.triton.backend.hosting import TIMEOUT_S, Client, HostingServer, tensor
from tests.waiting import wait_until
from tritonclient.utils import InferenceServerException


@pytest.mark.promise(
    "Executing in a tritonserver",
    "Inputs and outputs of any size arrive whole, also empty ones and those for which no region has room yet.",
)
@pytest.mark.parametrize("size", [0, 1, 1000, 3 << 20, 40 << 20, 7])
def test_tensors_of_any_size_arrive_whole(client: Client, size: int) -> None:
    array = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    assert np.array_equal(client.infer("identity", array), array)


def counted(client: Client) -> tuple[int, int]:
    """Rows and executions so far."""
    (stats,) = client.grpc.get_inference_statistics("batched").model_stats
    return stats.inference_count, stats.execution_count


@pytest.mark.promise(
    "Executing in a tritonserver",
    "Requests that the server batches each get their own response. Statistics count rows as the "
    "server's own backends do.",
)
def test_requests_that_are_batched_get_each_its_own(client: Client) -> None:
    def ask(number: int) -> bool:
        array = np.full((1 + number % 2, 100), number, np.uint8)
        return np.array_equal(client.infer("batched", array), array)

    rows, executions = counted(client)
    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(ask, range(100)))
    # The server counts a batch when its requests have been answered.
    wait_until(lambda: counted(client)[0] - rows == 150, TIMEOUT_S, "all to be counted")
    assert counted(client)[1] - executions < 100


@pytest.mark.promise("Executing in a tritonserver", "Requests that the server batches …")
def test_rows_are_counted_as_the_server_counts_them(client: Client) -> None:
    rows, executions = counted(client)
    client.infer("batched", np.zeros((3, 5), np.uint8))
    wait_until(lambda: counted(client) == (rows + 3, executions + 1), TIMEOUT_S, "a count")


@pytest.mark.promise(
    "Executing in a tritonserver",
    "A model's error reaches the client whole and with its code. So does the reason why a model does not load.",
)
def test_an_error_has_its_code_and_its_text(client: Client) -> None:
    with pytest.raises(InferenceServerException, match=r"no$") as refused:
        client.order("refuse")
    assert refused.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(InferenceServerException, match="ValueError: as it was told"):
        client.order("raise")


@pytest.mark.promise("HTTP", "A parameter of a request or …")
def test_a_parameter_that_json_does_not_have_is_refused(client: Client) -> None:
    with pytest.raises(InferenceServerException, match="'score' must be a finite number"):
        client.order("no number")


@pytest.mark.promise("Executing in a tritonserver", "A model's error reaches the …")
def test_a_model_that_does_not_load_says_why(client: Client) -> None:
    with pytest.raises(InferenceServerException, match="ImportError: of no use"):
        client.load("broken")


@pytest.mark.promise(
    "Executing in a tritonserver",
    "A decoupled model's responses come in their order. If nobody waits for a response any "
    "more, the model can see that, while it executes and afterwards.",
)
def test_responses_of_a_stream_come_in_order(client: Client) -> None:
    answers = client.stream()
    for _ in range(3):
        client.count(100)
    came: Counter[int] = Counter()
    for _ in range(300):
        number = answers.get(timeout=TIMEOUT_S)
        came[number] += 1
        # No request is answered before the one that precedes it.
        assert number == 0 or came[number] <= came[number - 1]
    client.grpc.stop_stream()
    assert came == dict.fromkeys(range(100), 3)


@pytest.mark.promise("Executing in a tritonserver", "A decoupled model's responses come …")
def test_a_stream_that_is_left_is_cancelled(client: Client, server: HostingServer) -> None:
    said = server.log().count("was cancelled")
    answers = client.stream()
    client.count(-1)
    assert answers.get(timeout=TIMEOUT_S) == 0
    client.grpc.stop_stream(cancel_requests=True)
    wait_until(lambda: server.log().count("was cancelled") > said, TIMEOUT_S, "the model to hear")


@pytest.mark.promise("Executing in a tritonserver", "A decoupled model's responses come …")
def test_a_request_that_executes_is_cancelled(client: Client, server: HostingServer) -> None:
    said, waited = server.log().count("was cancelled"), server.log().count("waits")
    asked = client.grpc.async_infer("orders", [tensor(np.array(["wait"], object))], lambda *_: None)
    wait_until(lambda: server.log().count("waits") > waited, TIMEOUT_S, "the model to get it")
    asked.cancel()
    wait_until(lambda: server.log().count("was cancelled") > said, TIMEOUT_S, "the model to hear")
    assert client.order("nothing") > 0
