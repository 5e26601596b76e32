"""Reflection: what services and messages there are, for a client that has no description of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tests.server.grpc.asking import add_sub
from tests.server.grpc.serving import TIMEOUT_S, Served
from tests.server.grpc.streaming import Requests
from tests.waiting import wait_until
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from moonpool.runtime.server.grpc.options import GrpcOptions

pytestmark = pytest.mark.promise(
    "gRPC",
    "With `--grpc-reflection=true` a client without the service's description finds it, in both versions of gRPC's "
    "reflection.",
)
SERVICES = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "inference.GRPCInferenceService",
]
Question = reflection_pb2.ServerReflectionRequest
Answer = reflection_pb2.ServerReflectionResponse
VERSIONS = ("v1", "v1alpha")


class Kept(Served):
    """One server with one channel for all tests, as grpcio keeps sockets for every client."""

    def __init__(self) -> None:
        super().__init__(["add_sub"], GrpcOptions(port=0, reflection=True))
        self.one_client, self.one_channel = super().client(), super().channel()
        assert self.one_client.is_server_live()
        # The loop keeps a descriptor for every stub that it has waited for.
        assert GRPCInferenceServiceStub(self.one_channel).ModelInfer(add_sub(), timeout=TIMEOUT_S)
        (answer,) = reflect(self.one_channel, "v1")(iter([Question()]), timeout=TIMEOUT_S)
        assert answer.error_response.error_code

    def client(self) -> triton.InferenceServerClient:
        return self.one_client

    def channel(self, *_: object) -> grpc.Channel:
        return self.one_channel


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Kept()
    yield made
    made.close()


def reflect(channel: grpc.Channel, version: str) -> Any:
    """Return the method as a function that takes any questions, or bytes in their place."""
    return channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        lambda asked: asked if isinstance(asked, bytes) else asked.SerializeToString(),
        Answer.FromString,
    )


def test_a_client_calls_a_method_that_it_knows_by_reflection_alone(served: Served) -> None:
    channel = served.channel()
    found = ProtoReflectionDescriptorDatabase(channel)
    pool = DescriptorPool(found)

    assert list(found.get_services()) == SERVICES
    (metadata,) = (
        method
        for method in pool.FindServiceByName("inference.GRPCInferenceService").methods
        if method.name == "ModelMetadata"
    )
    assert not metadata.server_streaming
    asked = GetMessageClass(metadata.input_type)(name="add_sub")
    call = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelMetadata",
        GetMessageClass(metadata.input_type).SerializeToString,
        GetMessageClass(metadata.output_type).FromString,
    )
    answer = call(asked, timeout=TIMEOUT_S)
    assert [each.name for each in answer.inputs] == ["INPUT0", "INPUT1"]


def test_every_service_and_its_messages_are_described(served: Served) -> None:
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(served.channel()))

    assert all(pool.FindServiceByName(name).full_name == name for name in SERVICES)
    assert pool.FindEnumTypeByName("inference.DataType").values_by_name["TYPE_FP32"].number == 11
    config = pool.FindMessageTypeByName("inference.ModelConfigResponse").fields_by_name["config"]
    assert config.message_type.full_name == "inference.ModelConfig"
    status = pool.FindMessageTypeByName("grpc.health.v1.HealthCheckResponse").enum_types[0]
    assert [each.name for each in status.values][1:3] == ["SERVING", "NOT_SERVING"]
    for version in VERSIONS:
        name = f"grpc.reflection.{version}.ServerReflectionRequest"
        ours, theirs = pool.FindMessageTypeByName(name), Question.DESCRIPTOR
        assert [(each.name, each.number, each.type) for each in ours.fields] == [
            (each.name, each.number, each.type) for each in theirs.fields
        ]
        assert [each.name for each in ours.oneofs] == [each.name for each in theirs.oneofs]
        name = f"grpc.reflection.{version}.ServerReflectionResponse"
        ours, theirs = pool.FindMessageTypeByName(name), Answer.DESCRIPTOR
        assert [(each.name, each.number) for each in ours.fields] == [
            (each.name, each.number) for each in theirs.fields
        ]


@pytest.mark.parametrize("version", VERSIONS)
def test_questions_of_one_stream_are_answered_in_order(served: Served, version: str) -> None:
    asked = [
        Question(host="x", list_services="*"),
        Question(file_by_filename="grpc_service.proto"),
        Question(file_by_filename="nope.proto"),
        Question(file_containing_symbol="inference.ModelInferRequest.InferInputTensor"),
        Question(file_containing_symbol="nope" * 1000),
        Question(all_extension_numbers_of_type="inference.ModelConfig"),
        Question(all_extension_numbers_of_type="inference.Nope"),
        Question(file_containing_extension=reflection_pb2.ExtensionRequest(containing_type="x")),
        Question(),
    ]
    answers = list(reflect(served.channel(), version)(iter(asked), timeout=TIMEOUT_S))

    assert [each.original_request for each in answers] == asked
    assert answers[0].valid_host == "x"
    assert [len(each.file_descriptor_response.file_descriptor_proto) for each in answers] == [
        *(0, 2, 0, 2, 0, 0, 0, 0, 0)
    ]
    assert answers[5].all_extension_numbers_response.base_type_name == "inference.ModelConfig"
    codes = [each.error_response.error_code for each in answers]
    assert codes == [0, 0, 5, 0, 5, 0, 5, 5, 3]


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (b"\xff", grpc.StatusCode.INTERNAL),
        (b"\x1a\x02\xff\xfe", grpc.StatusCode.INTERNAL),
        (Question(file_by_filename="x" * (65 << 10)).SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_what_is_no_question_ends_the_stream(served: Served, asked: bytes, code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        list(reflect(served.channel(), "v1")(iter([asked]), timeout=TIMEOUT_S))
    assert raised.value.code() is code


def test_triton_s_client_is_not_affected(served: Served) -> None:
    tensors = []
    for name in ("INPUT0", "INPUT1"):
        tensors.append(triton.InferInput(name, [4], "FP32"))
        tensors[-1].set_data_from_numpy(np.arange(4, dtype=np.float32))
    answer = served.client().infer("add_sub", tensors)
    assert list(answer.as_numpy("OUTPUT0")) == [0, 2, 4, 6]


def test_a_stream_ends_with_the_server(serve: Callable[..., Served]) -> None:
    served = serve(reflection=True)
    asked = Requests(Question(list_services=""))
    answers = reflect(served.channel(), "v1")(iter(asked), timeout=TIMEOUT_S)
    next(answers)
    wait_until(lambda: served.server.calls)
    served.server.drain(TIMEOUT_S)
    with pytest.raises(grpc.RpcError) as raised:
        next(answers)
    asked.close()
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.promise("gRPC", "Reflection is off unless it is asked for, as Triton has none.")
@pytest.mark.parametrize("version", VERSIONS)
def test_reflection_is_off_unless_it_is_asked_for(serve: Callable[..., Served], version: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        list(reflect(serve().channel(), version)(iter([Question()]), timeout=TIMEOUT_S))
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_reflection_is_restricted_with_the_metadata(serve: Callable[..., Served]) -> None:
    served = serve(reflection=True, restricted={"metadata": ("key", "secret")})
    call = reflect(served.channel(), "v1")
    with pytest.raises(grpc.RpcError) as raised:
        list(call(iter([Question(list_services="")]), timeout=TIMEOUT_S))
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    told = (("triton-grpc-protocol-key", "secret"),)
    (answer,) = call(iter([Question(list_services="")]), metadata=told, timeout=TIMEOUT_S)
    assert len(answer.list_services_response.service) == len(SERVICES)
