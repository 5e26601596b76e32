"""A request as it travels, by each way."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from moonpool.runtime.client.request import Endpoint, Place, Question, QuestionTensor

ENDPOINT = Endpoint("http", "here", 80, "/prefix")
FLOATS = QuestionTensor.of("A", "FP32", np.array([[1.5, -2]], np.float32))
TEXTS = QuestionTensor.of("B", "BYTES", np.array(["ä", "b"], object))


def http(question: Question) -> tuple[list[str], dict[str, object], bytes]:
    """First line and headers, the JSON, what comes after it."""
    head, _, body = question.as_http(ENDPOINT, [("X-Y", "z")]).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.split(": ") for line in lines[1:])
    assert headers["Content-Length"] == str(len(body))
    size = int(headers.get("Inference-Header-Content-Length", len(body)))
    return lines, json.loads(body[:size]), body[size:]


def test_binary_tensors_follow_the_json() -> None:
    lines, found, binary = http(Question("m", "3", [FLOATS, TEXTS]))

    assert lines[0] == "POST /prefix/v2/models/m/versions/3/infer HTTP/1.1"
    assert "X-Y: z" in lines
    assert found["parameters"] == {"binary_data_output": True}
    assert found["inputs"] == [
        {"name": "A", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
        {"name": "B", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 11}},
    ]
    assert binary == FLOATS.data + b"\x02\0\0\0\xc3\xa4\x01\0\0\0b"


def test_tensors_may_be_in_the_json() -> None:
    _, found, binary = http(Question("m", "", [FLOATS, TEXTS], is_json=True))

    assert binary == b""
    assert found == {
        "inputs": [
            {"name": "A", "datatype": "FP32", "shape": [1, 2], "data": [1.5, -2.0]},
            {"name": "B", "datatype": "BYTES", "shape": [2], "data": ["ä", "b"]},
        ]
    }


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_message_has_what_the_json_has(is_stream: bool) -> None:
    question = Question("m", "3", [FLOATS, TEXTS])
    found = service_pb2.ModelInferRequest.FromString(question.as_grpc(is_stream=is_stream))

    assert (found.model_name, found.model_version) == ("m", "3")
    assert [(t.name, t.datatype, list(t.shape)) for t in found.inputs] == [("A", "FP32", [1, 2]), ("B", "BYTES", [2])]
    assert list(found.raw_input_contents) == [FLOATS.data, TEXTS.data]
    assert ("triton_enable_empty_final_response" in found.parameters) == is_stream


def test_a_tensor_in_shared_memory_is_named_and_not_sent() -> None:
    question = Question("m", "", [FLOATS], {"A": Place("in", 4, 8)}, {"OUT": Place("out", 0, 16)})
    place = {"shared_memory_region": "in", "shared_memory_offset": 4, "shared_memory_byte_size": 8}

    _, found, binary = http(question)
    message = service_pb2.ModelInferRequest.FromString(question.as_grpc())

    assert binary == b""
    assert found["inputs"][0]["parameters"] == place  # type: ignore[index]
    assert found["outputs"][0]["name"] == "OUT"  # type: ignore[index]
    parameters = message.inputs[0].parameters
    assert parameters["shared_memory_region"].string_param == "in"
    assert parameters["shared_memory_offset"].int64_param == 4
    assert message.outputs[0].parameters["shared_memory_byte_size"].int64_param == 16
    assert not message.raw_input_contents
