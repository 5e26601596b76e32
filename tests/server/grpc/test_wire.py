"""Messages taken apart and put together are the same messages to the protobuf library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tests.server.grpc.serving import messages

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.model.protobuf import BadProtobuf, read_varint, varint
from moonpool.runtime.model.request import Response
from moonpool.runtime.server.grpc.infer_request import GrpcRequestPlan, InferMessage
from moonpool.runtime.server.grpc.infer_response import answer
from moonpool.runtime.server.grpc.wire import join, text_field

pytestmark = pytest.mark.promise(
    "gRPC",
    "A message that is taken apart by its tensors is the same message to the protobuf library, whatever its bytes are.",
)

TEXTS = st.text(max_size=20)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
# Parameters of a tensor, most of which say where it lies in memory of a client.
PARAMETERS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["shared_memory_byte_size", "shared_memory_offset"]), st.just("int64_param"), NUMBERS
        ),
        st.tuples(st.just("shared_memory_offset"), st.just("string_param"), st.just("1")),
        st.tuples(st.sampled_from(["shared_memory_region", "any"]), st.just("bool_param"), st.just(True)),
    ),
    max_size=4,
)
DATATYPES = st.sampled_from(["FP32", "BYTES", "INT64", "", "any"])


@st.composite
def fields(draw: st.DrawFn) -> list[Any]:
    """Draw messages of which each has one field."""
    make = messages.ModelInferRequest
    kinds: list[Any] = [
        make(model_name=draw(TEXTS)),
        make(model_version=draw(TEXTS)),
        make(id=draw(TEXTS)),
        make(raw_input_contents=[draw(st.binary(max_size=300))]),
    ]
    shape = draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40))
    for has_place, has_contents in ((False, False), (True, False), (False, True)):
        asked = make()
        tensor = asked.inputs.add(name=draw(TEXTS), datatype=draw(DATATYPES), shape=shape)
        output = make()
        wanted = output.outputs.add(name=draw(TEXTS))
        if has_place:
            for each in (tensor, wanted):
                each.parameters["shared_memory_region"].string_param = "r"
                each.parameters["shared_memory_byte_size"].int64_param = draw(NUMBERS)
                for name, kind, value in draw(PARAMETERS):
                    setattr(each.parameters[name], kind, value)
        if has_contents:
            tensor.contents.fp32_contents.append(1.0)
            wanted.parameters["classification"].int64_param = draw(NUMBERS)
        kinds += [asked, output]
    parameters = make()
    parameters.parameters[draw(TEXTS)].int64_param = draw(NUMBERS)
    parameters.parameters["sequence_end"].bool_param = True
    final = make()
    final.parameters["triton_enable_empty_final_response"].bool_param = draw(st.booleans())
    wrong = make()
    wrong.parameters["triton_enable_empty_final_response"].int64_param = 1
    kinds += [parameters, final, final, wrong, b"\x82\x01\x02ab", b"\x08\x01"]
    return draw(st.lists(st.sampled_from(kinds), max_size=12))


def planned(message: InferMessage, plan: GrpcRequestPlan) -> Any:
    """Return all that was read of a message, or the error."""
    contents = {at: each.SerializeToString() for at, each in plan.contents.items()}
    parameters, details = plan.parameters, plan.details_of(message.request_id, None)
    wanted = plan.outputs, plan.classes, plan.places, plan.has_classes
    return plan.inputs, contents, parameters, details, wanted, plan.is_large


def by_the_library(data: bytes) -> Any:
    """Do what `read` does, with the library for all."""
    whole = messages.ModelInferRequest.FromString(data)
    message = InferMessage(b"")
    message.request_id = whole.id
    named = whole.model_name, whole.model_version, whole.id, list(whole.raw_input_contents)
    try:
        plan = GrpcRequestPlan([None] * len(whole.inputs), [None] * len(whole.outputs), {}, whole)
        return *named, planned(message, plan)
    except MoonpoolError as error:
        return *named, str(error)


def read(data: bytes) -> Any:
    message = InferMessage(data)
    tensors = [data[at : at + size] for at, size in message.tensors]
    named = message.model, message.version, message.request_id, tensors
    try:
        return *named, planned(message, message.read())
    except MoonpoolError as error:
        return *named, str(error)


@given(fields())
def test_a_request_is_read_as_the_library_reads_it(drawn: list[Any]) -> None:
    # A row of messages is one message with the fields of all.
    data = b"".join(each if isinstance(each, bytes) else each.SerializeToString() for each in drawn)
    assert read(data) == by_the_library(data)


@given(st.binary(max_size=200))
def test_bytes_that_are_not_a_message_are_refused_by_both_parsers(data: bytes) -> None:
    try:
        found = read(data)
    except BadProtobuf:
        return
    assert found == by_the_library(data)


@given(fields(), st.data())
def test_a_message_that_is_cut_off_is_none_or_a_smaller_one(drawn: list[Any], data: st.DataObject) -> None:
    whole = b"".join(each if isinstance(each, bytes) else each.SerializeToString() for each in drawn)
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    try:
        found = read(cut)
    except BadProtobuf:
        with pytest.raises(DecodeError):
            messages.ModelInferRequest.FromString(cut)
    else:
        assert found == by_the_library(cut)


@given(st.integers(0, 2**40))
def test_a_length_is_a_varint(size: int) -> None:
    message = messages.ModelInferRequest()
    message.inputs.add().shape.append(size)

    assert varint(size) in message.SerializeToString()
    assert read_varint(b"." + varint(size), 1) == (size, 1 + len(varint(size)))


@given(TEXTS, st.lists(st.binary(max_size=300), max_size=3))
def test_a_response_put_together_is_the_response(request_id: str, tensors: list[bytes]) -> None:
    head = messages.ModelInferResponse(model_name="m", model_version="1")
    data = join(
        head.SerializeToString() + text_field(3, request_id.encode()),
        [np.frombuffer(each, np.uint8).data for each in tensors],
    )
    answer = messages.ModelInferResponse.FromString(b"".join(data))

    assert (answer.model_name, answer.id) == ("m", request_id)
    assert list(answer.raw_output_contents) == tensors


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, 2**63, 2**64 - 1])
def test_whole_numbers_of_a_response_are_told_whatever_their_size(value: int) -> None:
    model: Any = SimpleNamespace(name="m", version=1)
    plan: Any = SimpleNamespace(classes={}, places={})
    service: Any = None

    told = answer(service, model, plan, "", Response({}, {"n": value}))

    parameter = messages.ModelInferResponse.FromString(told).parameters["n"]
    assert getattr(parameter, parameter.WhichOneof("parameter_choice")) == value


@pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "A message with more fields than any request has is refused before they are read.",
)
def test_a_message_has_not_any_number_of_fields() -> None:
    # Empty inputs take two bytes each, and a hundred times that once they are read.
    with pytest.raises(BadProtobuf, match="more than 65536 fields"):
        InferMessage(b"\x2a\0" * 65_537)
    assert InferMessage(b"\x2a\0" * 65_536).tensors == []
