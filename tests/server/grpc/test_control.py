"""Everything but inference, with Triton's own client where it has a method for it."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from tests.server.grpc.asking import add_sub, refused
from tests.server.grpc.serving import TIMEOUT_S, Served, messages

pytestmark = pytest.mark.promise(
    "gRPC", "All other methods of the service, and gRPC's own health service, answer like Triton's."
)

Serve = Callable[..., Served]


def test_there_is_no_cuda_memory_and_the_server_says_so(serve: Serve) -> None:
    stub = serve().stub()

    assert not stub.CudaSharedMemoryStatus(messages.CudaSharedMemoryStatusRequest()).regions
    code, words = refused(stub.CudaSharedMemoryRegister, messages.CudaSharedMemoryRegisterRequest(name="r"))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "'r'" in words
    stub.CudaSharedMemoryUnregister(messages.CudaSharedMemoryUnregisterRequest(name="r"))


@pytest.mark.promise("HTTP", "A request is refused if it …")
@pytest.mark.promise("gRPC", "APIs may require a header, and requests that change the server may require a token.")
def test_apis_may_ask_for_a_header_and_changes_for_a_token(serve: Serve) -> None:
    served = serve("add_sub", restricted={"inference": ("key", "value")}, control_token="secret")
    client, stub = served.client(), served.stub()

    assert refused(stub.ModelInfer, add_sub()) == (
        grpc.StatusCode.UNAVAILABLE,
        "This protocol is restricted, expecting header 'triton-grpc-protocol-key'",
    )
    header = (("triton-grpc-protocol-key", "value"),)
    for twice in ((*header, (header[0][0], "other")), ((header[0][0], "other"), *header)):
        with pytest.raises(grpc.RpcError, match="This protocol is restricted"):
            stub.ModelInfer(add_sub(), timeout=TIMEOUT_S, metadata=twice)
    assert stub.ModelInfer(add_sub(), timeout=TIMEOUT_S, metadata=header).model_name == "add_sub"
    unload = messages.RepositoryModelUnloadRequest(model_name="add_sub")
    code, _ = refused(stub.RepositoryModelUnload, unload)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert client.is_model_ready("add_sub")
    client.unload_model("add_sub", headers={"authorization": "Bearer secret"})
    assert not client.is_model_ready("add_sub")
