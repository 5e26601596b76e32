"""ModelInfer: requests, responses and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from tests.server.grpc.asking import add_sub, packed, refused
from tests.server.grpc.serving import MODELS, TIMEOUT_S, Served, messages

Serve = Callable[..., Served]
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def floats(data: bytes) -> list[float]:
    return list(np.frombuffer(data, np.float32))


VALUES: dict[str, tuple[bytes, int, str, list[Any]]] = {
    "BOOL": (b"\1\0", 2, "bool_contents", [True, False]),
    "UINT8": (bytes([0, 255]), 2, "uint_contents", [0, 255]),
    "UINT16": (np.array([0, 65535], "<u2").tobytes(), 2, "uint_contents", [0, 65535]),
    "UINT32": (np.array([0, 2**32 - 1], "<u4").tobytes(), 2, "uint_contents", [0, 2**32 - 1]),
    "UINT64": (np.array([0, 2**64 - 1], "<u8").tobytes(), 2, "uint64_contents", [0, 2**64 - 1]),
    "INT8": (np.array([-128, 127], "i1").tobytes(), 2, "int_contents", [-128, 127]),
    "INT16": (np.array([-32768, 7], "<i2").tobytes(), 2, "int_contents", [-32768, 7]),
    "INT32": (np.array([-(2**31), 7], "<i4").tobytes(), 2, "int_contents", [-(2**31), 7]),
    "INT64": (np.array([-(2**63), 7], "<i8").tobytes(), 2, "int64_contents", [-(2**63), 7]),
    "FP16": (np.array([1.5, -2], "<f2").tobytes(), 2, "", []),
    "BF16": (b"\x80\x3f\x00\x40", 2, "", []),
    "FP32": (np.array([1.5, -2], "<f4").tobytes(), 2, "fp32_contents", [1.5, -2]),
    "FP64": (np.array([1.5, -2], "<f8").tobytes(), 2, "fp64_contents", [1.5, -2]),
    "BYTES": (packed([b"a\0\xff", b""]), 2, "bytes_contents", [b"a\0\xff", b""]),
}


def every(datatype: str) -> Any:
    asked = messages.ModelInferRequest(model_name="every")
    name = datatype.replace("BYTES", "STRING")
    asked.inputs.add(name=f"IN_{name}", datatype=datatype, shape=[VALUES[datatype][1]])
    return asked


@pytest.mark.promise(
    "gRPC",
    "Requests over gRPC are answered as Triton answers them, with every datatype, raw or "
    "typed, and refused with its texts.",
)
def test_every_datatype_comes_back_as_it_was_sent(serve: Serve) -> None:
    stub = serve("every").stub()
    for datatype, (data, _, field, values) in VALUES.items():
        raw, typed = every(datatype), every(datatype)
        raw.raw_input_contents.append(data)
        # The values may also be in the message itself, if there is a field for them.
        if field:
            getattr(typed.inputs[0].contents, field).extend(values)
        for asked in (raw, typed) if field else (raw,):
            answer = stub.ModelInfer(asked, timeout=TIMEOUT_S)

            assert [each.datatype for each in answer.outputs] == [datatype]
            assert list(answer.raw_output_contents) == [data]


def test_a_tensor_of_many_megabytes_comes_back(serve: Serve) -> None:
    stub = serve("every").stub()
    data = np.random.default_rng(1).integers(0, 255, 3 << 20, np.uint8).tobytes()
    asked = every("UINT8")
    asked.inputs[0].shape[0] = len(data)
    asked.raw_input_contents.append(data)

    assert list(stub.ModelInfer(asked, timeout=TIMEOUT_S).raw_output_contents) == [data]


@pytest.mark.promise("HTTP", "A parameter of a request or …")
def test_a_parameter_that_json_does_not_have_is_refused(serve: Serve) -> None:
    stub = serve("told").stub()
    for value in (float("nan"), float("inf")):
        asked = messages.ModelInferRequest(model_name="told")
        asked.inputs.add(name="X", datatype="FP32", shape=[1])
        asked.raw_input_contents.append(bytes(4))
        asked.parameters["p"].double_param = value
        with pytest.raises(grpc.RpcError, match="parameter 'p' must be a finite number"):
            stub.ModelInfer(asked, timeout=TIMEOUT_S)


def test_a_forwarded_header_has_no_reserved_name(serve: Serve) -> None:
    stub = serve("told", header_forward_pattern="PRIO").stub()
    asked = messages.ModelInferRequest(model_name="told")
    asked.inputs.add(name="X", datatype="FP32", shape=[1])
    asked.raw_input_contents.append(bytes(4))

    text = "Header 'priority' is reserved for Triton usage and cannot be forwarded."
    with pytest.raises(grpc.RpcError, match=text) as caught:
        stub.ModelInfer(asked, timeout=TIMEOUT_S, metadata=(("priority", "5"),))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    metadata = (("priority", "5"),)
    (answer,) = stub.ModelStreamInfer(iter([asked]), timeout=TIMEOUT_S, metadata=metadata)
    assert answer.error_message == text


def test_a_model_is_told_what_came_with_the_request(serve: Serve) -> None:
    stub = serve("told", header_forward_pattern="my-.*").stub()
    asked = messages.ModelInferRequest(model_name="told", id="seven")
    asked.inputs.add(name="X", datatype="FP32", shape=[1])
    asked.raw_input_contents.append(bytes(4))
    for name, kind, value in (
        ("sequence_id", "int64_param", 5),
        ("sequence_start", "bool_param", True),
        ("sequence_end", "bool_param", True),
        ("timeout", "int64_param", 10**9),
        ("count", "int64_param", -3),
        ("huge", "uint64_param", 2**64 - 1),
        ("share", "double_param", 0.5),
        ("flag", "bool_param", False),
        ("text", "string_param", "ü"),
    ):
        setattr(asked.parameters[name], kind, value)
    metadata = (("my-header", "value"), ("your-header", "value"))

    for _ in range(2):  # the server remembers the second request
        answer = stub.ModelInfer(asked, timeout=TIMEOUT_S, metadata=metadata)
        told = json.loads(answer.raw_output_contents[0][4:])

        assert told == {
            "id": "seven",
            "correlation_id": 5,
            "flags": 3,
            "timeout": 10**9,
            "parameters": {
                "count": -3,
                "huge": 2**64 - 1,
                "share": 0.5,
                "flag": False,
                "text": "ü",
                "my-header": "value",
            },
        }


def test_a_thousand_requests_at_once_get_their_own_answers(serve: Serve) -> None:
    served = serve("add_sub")
    stub = served.stub()
    asked = [add_sub(np.full(4, n, np.float32).tobytes(), request_id=str(n)) for n in range(1000)]
    futures = [stub.ModelInfer.future(each, timeout=60) for each in asked]

    for number, future in enumerate(futures):
        answer = future.result()
        assert answer.id == str(number)
        assert floats(answer.raw_output_contents[0]) == [number, number + 1, number + 2, number + 3]
    wanted = 'moonpool_frontend_requests_total{protocol="grpc",status="OK"}'
    assert wanted in served.service.metrics.text()


@pytest.mark.promise("gRPC", "A request like an earlier one is checked only where it differs.")
def test_a_request_like_one_before_is_checked_where_it_differs(serve: Serve) -> None:
    served = serve("add_sub", "told")
    stub = served.stub()
    for number in range(3):
        answer = stub.ModelInfer(
            add_sub(np.full(4, number, np.float32).tobytes(), request_id=str(number)), timeout=TIMEOUT_S
        )
        assert (answer.id, floats(answer.raw_output_contents[1])[0]) == (str(number), number)
        code, words = refused(stub.ModelInfer, add_sub(bytes(12)))
        assert (code, "Expected 16, got 12" in words) == (INVALID, True)
    # The inputs may come in any order.
    turned = add_sub(request_id="turned")
    turned.inputs.reverse()
    for left in (1.0, 2.0):
        turned.raw_input_contents[1] = np.full(4, left, np.float32).tobytes()
        turned.raw_input_contents[0] = bytes(16)
        answer = stub.ModelInfer(turned, timeout=TIMEOUT_S)
        assert floats(answer.raw_output_contents[1])[0] == left
    served.runtime.unload("add_sub")
    served.runtime.load("add_sub", MODELS / "told")
    assert refused(stub.ModelInfer, add_sub())[0] is INVALID
