"""Everything but inference, with Triton's own client where it has a method for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import posix_ipc
import pytest
from tests.server.grpc.asking import FOUR, add_sub, refused
from tests.server.grpc.serving import MODELS, TIMEOUT_S, Served, messages

pytestmark = pytest.mark.promise(
    "gRPC",
    "All other methods of the service, and gRPC's own health service, answer like Triton's.",
)

Serve = Callable[..., Served]
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def test_metadata_configuration_and_statistics(serve: Serve) -> None:
    served = serve("add_sub", "repeat")
    client = served.client()
    served.stub().ModelInfer(add_sub(), timeout=TIMEOUT_S)

    assert "statistics" in client.get_server_metadata().extensions
    described = client.get_model_metadata("add_sub")
    assert [(each.name, each.datatype, list(each.shape)) for each in described.inputs] == [
        ("INPUT0", "FP32", [4]),
        ("INPUT1", "FP32", [4]),
    ]
    config = client.get_model_config("repeat", "1").config
    assert (config.backend, config.model_transaction_policy.decoupled) == ("python", True)
    counted = client.get_inference_statistics("add_sub").model_stats[0]
    assert (counted.inference_count, counted.inference_stats.success.count) == (1, 1)
    assert len(client.get_inference_statistics().model_stats) == 2


def test_missing_names_are_not_found(serve: Serve) -> None:
    stub = serve("add_sub").stub()
    missing = grpc.StatusCode.NOT_FOUND

    for method, kind in (("ModelMetadata", "name"), ("ModelConfig", "name")):
        ask = getattr(messages, f"{method}Request")
        assert refused(getattr(stub, method), ask(**{kind: "nope"})) == (
            missing,
            "Request for unknown model: 'nope' is not found",
        )
    asked = messages.ModelStatisticsRequest(name="nope")
    assert refused(stub.ModelStatistics, asked) == (
        INVALID,
        "requested model 'nope' is not available",
    )


def test_models_are_loaded_with_other_files_and_unloaded(serve: Serve) -> None:
    served = serve()
    client, stub = served.client(), served.stub()
    files = {
        f"file:{path.relative_to(MODELS / 'add_sub')}": path.read_bytes()
        for path in (MODELS / "add_sub").rglob("*")
        if path.is_file()
    }
    config = '{"backend": "python", "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [4]}, {"name": "INPUT1", "data_type": "TYPE_FP32", "dims": [4]}], "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [4]}, {"name": "OUTPUT1", "data_type": "TYPE_FP32", "dims": [4]}]}'
    client.load_model("add_sub", config=config, files=files)

    assert client.is_model_ready("add_sub")
    index = client.get_model_repository_index().models
    assert [(each.name, each.version, each.state) for each in index] == [("add_sub", "1", "READY")]
    assert stub.ModelInfer(add_sub(), timeout=TIMEOUT_S).model_version == "1"
    client.unload_model("add_sub")
    assert not client.is_model_ready("add_sub")


def test_loads_that_make_no_sense_are_refused(serve: Serve) -> None:
    stub = serve().stub()
    load, unload = messages.RepositoryModelLoadRequest, messages.RepositoryModelUnloadRequest
    number, other = load(model_name="m"), load(model_name="m")
    number.parameters["config"].int64_param = 1
    other.parameters["other"].string_param = "x"
    dependents = unload(model_name="m")
    dependents.parameters["unload_dependents"].string_param = "x"

    assert refused(stub.RepositoryModelLoad, load(repository_name="r", model_name="m")) == (
        grpc.StatusCode.UNIMPLEMENTED,
        "'repository_name' specification is not supported",
    )
    assert refused(stub.RepositoryModelLoad, number) == (
        INVALID,
        "invalid value type for load parameter 'config', expected string_param.",
    )
    assert refused(stub.RepositoryModelLoad, other) == (
        INVALID,
        "unrecognized load parameter 'other'.",
    )
    assert refused(stub.RepositoryModelUnload, dependents) == (
        INVALID,
        "invalid value type for 'unload_dependents' parameter, expected bool_param.",
    )


def lend(tensor: Any, region: str, size_bytes: int, offset: int = 0) -> None:
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_byte_size"].int64_param = size_bytes
    if offset:
        tensor.parameters["shared_memory_offset"].int64_param = offset


def test_tensors_in_memory_that_a_client_shares(serve: Serve, tmp_path: Path) -> None:
    served = serve("add_sub")
    client, stub = served.client(), served.stub()
    name = f"moonpool_test_{tmp_path.name}_{served.server.port}"
    memory = posix_ipc.SharedMemory("/" + name, posix_ipc.O_CREX, size=4096)
    try:
        os.pwrite(memory.fd, FOUR.tobytes(), 0)
        client.register_system_shared_memory("region", "/" + name, 4096)
        assert list(client.get_system_shared_memory_status().regions) == ["region"]
        asked = add_sub()
        del asked.raw_input_contents[0]
        lend(asked.inputs[0], "region", 16)
        lend(asked.outputs.add(name="OUTPUT0"), "region", 64, 128)
        asked.outputs.add(name="OUTPUT1")

        answer = stub.ModelInfer(asked, timeout=TIMEOUT_S)

        assert list(answer.raw_output_contents) == [b"", bytes(16)]
        assert list(np.frombuffer(os.pread(memory.fd, 16, 128), np.float32)) == [0, 2, 4, 6]
        lend(asked.inputs[0], "region", 16, 4090)
        assert refused(stub.ModelInfer, asked) == (
            INVALID,
            "Invalid offset + byte size for shared memory region: 'region'",
        )
        client.unregister_system_shared_memory("region")
        assert refused(stub.ModelInfer, asked) == (
            grpc.StatusCode.NOT_FOUND,
            "Unable to find shared memory region: 'region'",
        )
    finally:
        memory.close_fd()
        memory.unlink()


def test_there_is_no_cuda_memory_and_the_server_says_so(serve: Serve) -> None:
    stub = serve().stub()

    assert not stub.CudaSharedMemoryStatus(messages.CudaSharedMemoryStatusRequest()).regions
    code, words = refused(
        stub.CudaSharedMemoryRegister, messages.CudaSharedMemoryRegisterRequest(name="r")
    )
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "'r'" in words
    stub.CudaSharedMemoryUnregister(messages.CudaSharedMemoryUnregisterRequest(name="r"))


def test_traces_and_the_log_have_settings(serve: Serve) -> None:
    served = serve("add_sub")
    client, stub = served.client(), served.stub()

    changed = client.update_trace_settings(settings={"trace_rate": "10"})
    assert list(changed.settings["trace_rate"].value) == ["10"]
    twice = messages.TraceSettingRequest()
    twice.settings["trace_rate"].value.extend(["1", "2"])
    assert refused(stub.TraceSetting, twice) == (INVALID, "expect only 1 value for 'trace_rate'")
    assert client.get_log_settings().settings["log_info"].bool_param
    assert not client.update_log_settings({"log_info": False}).settings["log_info"].bool_param
    wrong = messages.LogSettingsRequest()
    wrong.settings["log_info"].uint32_param = 1
    assert refused(stub.LogSettings, wrong) == (INVALID, "expect boolean for 'log_info'")


@pytest.mark.promise("HTTP", "A request is refused if it …")
@pytest.mark.promise(
    "gRPC", "APIs may require a header, and requests that change the server may require a token."
)
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
