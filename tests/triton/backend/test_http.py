"""Clients over HTTP get outputs of models in moonpool's stubs, in the message and in shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing import resource_tracker

import numpy as np
import pytest
import tritonclient.http as http_client
import tritonclient.utils.shared_memory as shared_memory
from tests.triton.backend.hosting import TIMEOUT_S, HostingServer
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

pytestmark = pytest.mark.promise(
    "Executing in a tritonserver",
    "This holds over HTTP and gRPC, for tensors in the message, as JSON and in memory that the client shares.",
)

SIZE = 1 << 20


def connected(server: HostingServer) -> http_client.InferenceServerClient:
    address = f"127.0.0.1:{server.http_port}"
    return http_client.InferenceServerClient(address, network_timeout=TIMEOUT_S)


@pytest.fixture(scope="module", autouse=True)
def _client_is_there(server: HostingServer) -> None:
    """Use the client's libraries once: they open descriptors at their first use, and keep them."""
    resource_tracker.ensure_running()
    with connected(server) as client:
        client.is_server_live()


@pytest.fixture
def client(server: HostingServer) -> Iterator[http_client.InferenceServerClient]:
    with connected(server) as client:
        yield client


def tensor(array: np.ndarray) -> http_client.InferInput:
    return http_client.InferInput("X", list(array.shape), np_to_triton_dtype(array.dtype))


@pytest.mark.parametrize("is_binary", [True, False])
def test_tensors_arrive_whole(client: http_client.InferenceServerClient, *, is_binary: bool) -> None:
    for size in (0, 1, 3 << 18):
        array = np.random.default_rng(size).integers(0, 255, size, np.uint8)
        asked = tensor(array)
        asked.set_data_from_numpy(array, binary_data=is_binary)
        wanted = http_client.InferRequestedOutput("Y", binary_data=is_binary)
        answer = client.infer("identity", [asked], outputs=[wanted])
        assert np.array_equal(answer.as_numpy("Y"), array)


def test_an_error_has_its_status_and_its_text(client: http_client.InferenceServerClient) -> None:
    for order, status, text in (("refuse", "404", "no$"), ("raise", "500", "as it was told")):
        asked = tensor(array := np.array([order], object))
        asked.set_data_from_numpy(array)
        with pytest.raises(InferenceServerException, match=text) as refused:
            client.infer("orders", [asked])
        assert refused.value.status() == status


def test_tensors_lie_in_the_memory_of_clients(client: http_client.InferenceServerClient) -> None:
    array = np.random.default_rng(1).integers(0, 255, SIZE, np.uint8)
    name = f"moonpool_tests_{os.getpid()}_http"
    region = shared_memory.create_shared_memory_region(name, f"/{name}", 2 * SIZE)
    try:
        client.register_system_shared_memory(name, f"/{name}", 2 * SIZE)
        shared_memory.set_shared_memory_region(region, [array])
        asked, wanted = tensor(array), http_client.InferRequestedOutput("Y")
        asked.set_shared_memory(name, SIZE)
        wanted.set_shared_memory(name, SIZE, offset=SIZE)
        client.infer("identity", [asked], outputs=[wanted])
        answer = shared_memory.get_contents_as_numpy(region, np.uint8, [SIZE], offset=SIZE)
        assert np.array_equal(answer, array)
    finally:
        client.unregister_system_shared_memory(name)
        shared_memory.destroy_shared_memory_region(region)
