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

from moonpool.runtime.model.request import Response
from moonpool.runtime.server.grpc.infer_response import answer
from moonpool.runtime.server.grpc.wire import BadProtobuf, join, length, split, text_field

pytestmark = pytest.mark.promise(
    "gRPC",
    "A message that is taken apart by its tensors is the same message to the protobuf library, "
    "whatever its bytes are.",
)

TEXTS = st.text(max_size=20)


@st.composite
def requests(draw: st.DrawFn) -> Any:
    asked = messages.ModelInferRequest(
        model_name=draw(TEXTS), model_version=draw(TEXTS), id=draw(TEXTS)
    )
    for name in draw(st.lists(TEXTS, max_size=3)):
        asked.inputs.add(name=name, datatype="FP32", shape=draw(st.lists(st.integers(0, 2**40))))
    for name in draw(st.lists(TEXTS, max_size=2)):
        asked.parameters[name].int64_param = draw(st.integers(-(2**63), 2**63 - 1))
    asked.raw_input_contents.extend(draw(st.lists(st.binary(max_size=300), max_size=3)))
    return asked


@given(requests(), requests())
def test_a_request_taken_apart_is_the_request(first: Any, second: Any) -> None:
    # Two messages in a row are one message, whose fields come twice.
    for data in (first.SerializeToString(), first.SerializeToString() + second.SerializeToString()):
        whole = messages.ModelInferRequest.FromString(data)
        parts = split(data)
        tensors = [data[at : at + size] for at, size in parts.tensors]
        head = messages.ModelInferRequest.FromString(parts.head)

        assert tensors == list(whole.raw_input_contents)
        assert parts.request_id.decode() == whole.id
        head.id = whole.id
        head.raw_input_contents.extend(tensors)
        assert head == whole


@given(st.binary(max_size=200))
def test_bytes_that_are_not_a_message_are_refused_by_both_parsers(data: bytes) -> None:
    try:
        parts = split(data)
        head = messages.ModelInferRequest.FromString(parts.head)
        head.id = parts.request_id.decode()
    except (BadProtobuf, DecodeError, UnicodeDecodeError):
        return
    head.raw_input_contents.extend(data[at : at + size] for at, size in parts.tensors)

    assert all(0 <= at <= at + size <= len(data) for at, size in parts.tensors)
    try:
        whole = messages.ModelInferRequest.FromString(data)
    except DecodeError:
        return
    assert head.raw_input_contents == whole.raw_input_contents


@given(requests(), st.data())
def test_a_message_that_is_cut_off_is_none_or_a_smaller_one(
    asked: Any, data: st.DataObject
) -> None:
    whole = asked.SerializeToString()
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    try:
        parts = split(cut)
    except BadProtobuf:
        with pytest.raises(DecodeError):
            messages.ModelInferRequest.FromString(cut)
    else:
        assert len(parts.tensors) <= len(asked.raw_input_contents)


@given(st.integers(0, 2**40))
def test_a_length_is_a_varint(size: int) -> None:
    message = messages.ModelInferRequest()
    message.inputs.add().shape.append(size)

    assert length(size) in message.SerializeToString()


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
        split(b"\x2a\0" * 65_537)
    assert split(b"\x2a\0" * 65_536).tensors == []
