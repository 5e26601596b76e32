"""ModelInfer: requests, responses and refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tests.server.grpc.asking import FOUR, add_sub, packed, refused, repeat, text
from tests.server.grpc.serving import MODELS, TIMEOUT_S, Served, messages

Serve = Callable[..., Served]
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def floats(data: bytes) -> list[float]:
    return list(np.frombuffer(data, np.float32))


def test_a_request_is_answered_with_its_id(serve: Serve) -> None:
    stub = serve("add_sub").stub()
    answer = stub.ModelInfer(add_sub(request_id="seven"), timeout=TIMEOUT_S)

    assert (answer.model_name, answer.model_version, answer.id) == ("add_sub", "1", "seven")
    assert [(each.name, each.datatype, list(each.shape)) for each in answer.outputs] == [
        ("OUTPUT0", "FP32", [4]),
        ("OUTPUT1", "FP32", [4]),
    ]
    assert [floats(data) for data in answer.raw_output_contents] == [[0, 2, 4, 6], [0, 0, 0, 0]]


@pytest.mark.promise(
    "gRPC",
    "Triton's clients, for threads, event loops and streams, work as they are.",
)
def test_triton_s_client_gets_arrays(serve: Serve) -> None:
    client = serve("add_sub").client()
    inputs = []
    for name in ("INPUT0", "INPUT1"):
        inputs.append(triton.InferInput(name, [4], "FP32"))
        inputs[-1].set_data_from_numpy(FOUR)
    wanted = [triton.InferRequestedOutput("OUTPUT1")]
    for compression in (None, "gzip", "deflate"):
        result = client.infer("add_sub", inputs, outputs=wanted, compression_algorithm=compression)

        assert list(result.as_numpy("OUTPUT1")) == [0, 0, 0, 0]
        assert result.as_numpy("OUTPUT0") is None


async def ask_in_a_loop(address: str) -> Any:
    async with triton_aio.InferenceServerClient(address) as client:
        inputs = []
        for name in ("INPUT0", "INPUT1"):
            inputs.append(triton_aio.InferInput(name, [4], "FP32"))
            inputs[-1].set_data_from_numpy(FOUR)
        return (await client.infer("add_sub", inputs)).as_numpy("OUTPUT0")


@pytest.mark.promise("gRPC", "Triton's clients, for threads, event loops …")
def test_triton_s_client_for_event_loops_gets_arrays(serve: Serve) -> None:
    address = serve("add_sub").address

    assert list(asyncio.run(ask_in_a_loop(address))) == [0, 2, 4, 6]


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


def test_the_best_classes_of_an_output_come_in_its_place(serve: Serve) -> None:
    stub = serve("add_sub").stub()
    asked = add_sub()
    asked.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = 2

    answer = stub.ModelInfer(asked, timeout=TIMEOUT_S)

    assert (answer.outputs[0].datatype, list(answer.outputs[0].shape)) == ("BYTES", [2])
    assert answer.raw_output_contents[0] == packed([b"6.000000:3", b"4.000000:2"])


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


@pytest.mark.promise("gRPC", "Requests over gRPC are answered as …")
def test_an_error_of_a_model_has_its_code(serve: Serve) -> None:
    stub = serve("fails").stub()
    for code in ("UNKNOWN", "INTERNAL", "NOT_FOUND", "UNAVAILABLE", "ALREADY_EXISTS", "CANCELLED"):
        status = refused(stub.ModelInfer, text("fails", "HOW", code))

        assert status == (grpc.StatusCode[code], "on purpose")


def change(asked: Any, what: Callable[[Any], object]) -> Any:
    what(asked)
    return asked


PREFIX = "[request id: <id_unknown>] "
REFUSALS: dict[str, tuple[Callable[[Any], object], str]] = {
    "no data": (
        lambda r: r.ClearField("raw_input_contents"),
        "unable to find data for input tensor 'INPUT0' for model 'add_sub' in request.",
    ),
    "a byte too few": (
        lambda r: r.raw_input_contents.__setitem__(0, bytes(15)),
        PREFIX
        + "input byte size mismatch for input 'INPUT0' for model 'add_sub'. Expected 16, got 15",
    ),
    "another shape": (
        lambda r: r.inputs[0].shape.extend([2]),
        PREFIX
        + "unexpected shape for input 'INPUT0' for model 'add_sub'. Expected [4], got [4,2]. ",
    ),
    "a shape beyond all memory": (
        lambda r: r.inputs[0].shape.extend([2**62, 2**62]),
        PREFIX + "unexpected shape for input 'INPUT0' for model 'add_sub'. Expected [4], got "
        f"[4,{2**62},{2**62}]. ",
    ),
    "a size that is unknown": (
        lambda r: r.inputs[0].shape.__setitem__(0, -1),
        PREFIX + "All input dimensions should be specified for input 'INPUT0' for model "
        "'add_sub', got [-1]",
    ),
    "unknown datatype": (
        lambda r: setattr(r.inputs[0], "datatype", "FLOAT"),
        PREFIX + "inference input 'INPUT0' data-type is '<invalid>', but model 'add_sub' "
        "expects 'FP32'",
    ),
    "another input": (
        lambda r: setattr(r.inputs[0], "name", "X"),
        "unexpected inference input 'X' for model 'add_sub'",
    ),
    "an input twice": (
        lambda r: setattr(r.inputs[1], "name", "INPUT0"),
        PREFIX + "input 'INPUT0' already exists in request",
    ),
    "another output": (
        lambda r: r.outputs.add(name="X"),
        "unexpected inference output 'X' for model 'add_sub'",
    ),
    "data of two kinds": (
        lambda r: r.inputs[0].contents.fp32_contents.append(1),
        "contents field must not be specified when using raw_input_contents for 'INPUT0' for "
        "model 'add_sub'",
    ),
    "a reserved parameter": (
        lambda r: setattr(r.parameters["triton_x"], "int64_param", 1),
        "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following "
        "keys starting with 'triton_' are allowed: triton_enable_empty_final_response",
    ),
    "a parameter of another type": (
        lambda r: setattr(r.parameters["sequence_start"], "int64_param", 1),
        "invalid value type for 'sequence_start' parameter, expected bool_param.",
    ),
    "a parameter without a value": (
        lambda r: r.parameters["x"].SetInParent(),
        "invalid value type for 'x' parameter, expected int64_param, bool_param, or string_param.",
    ),
    "no classes": (
        lambda r: setattr(
            r.outputs.add(name="OUTPUT0").parameters["classification"], "int64_param", 0
        ),
        "invalid value for 'classification' parameter, expected >= 0",
    ),
    "a version that is no number": (
        lambda r: setattr(r, "model_version", "x"),
        "failed to get model version from specified version string 'x' (details: stol), version "
        "should be an integral value > 0",
    ),
}


@pytest.mark.promise("gRPC", "Requests over gRPC are answered as …")
def test_a_request_that_does_not_fit_is_refused_in_triton_s_words(serve: Serve) -> None:
    stub = serve("add_sub").stub()

    assert {
        what: refused(stub.ModelInfer, change(add_sub(), damage))
        for what, (damage, _) in REFUSALS.items()
    } == {what: (INVALID, words) for what, (_, words) in REFUSALS.items()}


def test_models_and_versions_that_are_not_there_are_not_found(serve: Serve) -> None:
    stub = serve("add_sub").stub()
    missing = grpc.StatusCode.NOT_FOUND

    assert refused(stub.ModelInfer, messages.ModelInferRequest(model_name="nope")) == (
        missing,
        "Request for unknown model: 'nope' is not found",
    )
    asked = change(add_sub(), lambda r: setattr(r, "model_version", "2"))
    assert refused(stub.ModelInfer, asked) == (
        missing,
        "Request for unknown model: 'add_sub' version 2 is not found",
    )


def test_a_decoupled_model_wants_a_stream(serve: Serve) -> None:
    stub = serve("repeat").stub()
    assert refused(stub.ModelInfer, repeat(1)) == (
        grpc.StatusCode.UNIMPLEMENTED,
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    )


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


@pytest.mark.promise(
    "gRPC",
    "A request like an earlier one is checked only where it differs.",
)
def test_a_request_like_one_before_is_checked_where_it_differs(serve: Serve) -> None:
    served = serve("add_sub", "told")
    stub = served.stub()
    for number in range(3):
        answer = stub.ModelInfer(
            add_sub(np.full(4, number, np.float32).tobytes(), request_id=str(number)),
            timeout=TIMEOUT_S,
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
