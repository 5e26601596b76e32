"""Lists calls over gRPC: one line a case. A case is a name and its calls, in their order: method and message.

What a case changes in a server, its last calls undo. Streams are a name, the messages and the metadata.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from moonpool.runtime.conformance.http_control import SOURCE, config
from moonpool.runtime.conformance.messages import (
    A,
    B,
    add_sub,
    batched,
    fails,
    load,
    logging,
    output,
    register,
    repeat,
    request,
    shared,
    sums,
    tensor,
    told,
    trace,
    typed,
    unload,
)
from moonpool.runtime.conformance.tensors import ONE_TO_FOUR, ONES
from moonpool.runtime.model.protobuf import service_messages

kserve = service_messages()
Call = tuple[str, Any]
Case = tuple[str, list[Call]]
Stream = tuple[str, list[Any], Sequence[tuple[str, str]]]


def _infer(**messages: Any) -> list[Case]:
    return [(name.replace("_", " "), [("ModelInfer", found)]) for name, found in messages.items()]


WHICH: list[Case] = [
    ("live", [("ServerLive", kserve.ServerLiveRequest())]),
    ("ready", [("ServerReady", kserve.ServerReadyRequest())]),
]
for _name, _version in (
    *(("add_sub", version) for version in ("", "1", "2", "0", "x", "1x", " 1", "-1", "-2", "9" * 20)),
    ("nope", ""), ("", ""), ("broken", ""), ("batched", ""), ("a\nb", ""), ("../x", ""),
):  # fmt: skip
    _of = {"name": _name, "version": _version}
    WHICH += [
        (f"ModelReady {_of}", [("ModelReady", kserve.ModelReadyRequest(**_of))]),
        (f"ModelMetadata {_of}", [("ModelMetadata", kserve.ModelMetadataRequest(**_of))]),
        (f"ModelConfig {_of}", [("ModelConfig", kserve.ModelConfigRequest(**_of))]),
        (f"ModelInfer {_of}", [("ModelInfer", add_sub(model=_name, version=_version))]),
    ]
    if _name != "" and (_name, _version) not in {("add_sub", ""), ("batched", "")}:
        WHICH.append((f"ModelStatistics {_of}", [("ModelStatistics", kserve.ModelStatisticsRequest(**_of))]))

_LONG = typed("fp32_contents", [1] * 5, "INPUT1", shape=[4])
_TYPED = typed("fp32_contents", [1, 2, 3, 4], "INPUT0")
INFERENCE: list[Case] = _infer(
    raw=add_sub(),
    an_id_and_one_output=add_sub(request_id="42", outputs=[output("OUTPUT1")]),
    outputs_the_other_way_round=add_sub(outputs=[output("OUTPUT1"), output("OUTPUT0")]),
    an_output_twice=add_sub(outputs=[output("OUTPUT1"), output("OUTPUT1")]),
    an_unknown_output=add_sub(outputs=[output("NOPE")]),
    an_output_without_a_name=add_sub(outputs=[output("")]),
    typed=add_sub(_TYPED, typed("fp32_contents", [1] * 4, "INPUT1"), []),
    typed_and_raw=add_sub(_TYPED, typed("fp32_contents", [1] * 4, "INPUT1")),
    typed_then_raw=add_sub(_TYPED, B, [ONES]),
    one_raw_of_two=add_sub(raw=[ONE_TO_FOUR]),
    three_raw_of_two=add_sub(raw=[ONE_TO_FOUR, ONES, ONES]),
    no_content=add_sub(raw=[]),
    raw_too_short=add_sub(raw=[ONE_TO_FOUR, ONES[:12]]),
    raw_too_long=add_sub(raw=[ONE_TO_FOUR, ONES + b"1234"]),
    raw_empty=add_sub(raw=[ONE_TO_FOUR, b""]),
    typed_too_short=add_sub(_TYPED, typed("fp32_contents", [1], "INPUT1", shape=[4]), []),
    typed_too_long=add_sub(_TYPED, _LONG, []),
    typed_in_another_field=add_sub(_TYPED, typed("int_contents", [1] * 4, "INPUT1"), []),
    unknown_datatype=add_sub(tensor("INPUT0", "XX")),
    no_datatype=add_sub(tensor("INPUT0", "")),
    another_datatype=add_sub(tensor("INPUT0", "INT32")),
    shape_2_2=add_sub(tensor("INPUT0", shape=[2, 2])),
    shape_5=add_sub(tensor("INPUT0", shape=[5])),
    shape_negative=add_sub(tensor("INPUT0", shape=[-1])),
    shape_zero=add_sub(tensor("INPUT0", shape=[0])),
    no_shape=add_sub(tensor("INPUT0", shape=[])),
    shape_that_overflows=add_sub(tensor("INPUT0", shape=[2**40, 2**40])),
    an_input_missing=request("add_sub", [A], [ONE_TO_FOUR]),
    an_input_twice=add_sub(A, A),
    an_unknown_input=add_sub(tensor("NOPE")),
    an_input_too_many=request("add_sub", [A, B, tensor("NOPE")], [ONE_TO_FOUR, ONES, ONES]),
    an_input_without_a_name=add_sub(tensor("")),
    no_inputs=request("add_sub", []),
    unknown_parameters_of_tensors=add_sub(tensor("INPUT0", x=1), outputs=[output("OUTPUT0", x=1)]),
    a_batch=batched(),
    a_batch_that_may_not_wait=batched(timeout=5),
    a_batch_that_may_wait=batched(timeout=4000000),
    a_batch_too_large=request("batched", [tensor(n, shape=[5, 4]) for n in ("INPUT0", "INPUT1")], [ONES * 5] * 2),
    classes=batched(outputs=[output("OUTPUT0", classification=2)]),
    classes_as_text=batched(outputs=[output("OUTPUT0", classification="1")]),
    a_negative_number_of_classes=batched(outputs=[output("OUTPUT0", classification=-1)]),
    no_classes=batched(outputs=[output("OUTPUT0", classification=0)]),
    half_a_class=batched(outputs=[output("OUTPUT0", classification=1.5)]),
    one_response_of_a_decoupled_model=repeat(1),
    a_sequence_without_an_id=sums(),
    a_sequence_that_did_not_start=sums(sequence_id=5),
)  # fmt: skip
INFERENCE += [
    (f"fails {how}", [("ModelInfer", fails(how, request_id="7"))])
    for how in ("raise", "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED",
        "ALREADY_EXISTS", "CANCELLED")
]  # fmt: skip
_PARAMETERS: list[dict[str, Any]] = [
        {"a": 1, "b": "s", "c": True, "d": 1.5}, {"a": None}, {"a": 2**63}, {"triton_x": 1},
        {"binary_data_output": True},
        *({"sequence_id": value} for value in (1, "abc", -1, True, 2**63 + 5, 1.5, None, "x" * 129)),
        {"sequence_start": True}, {"sequence_start": 1}, {"sequence_end": True}, {"sequence_end": "x"},
        *({"priority": value} for value in (1, "1", -1, 2**63, True)),
        *({"timeout": value} for value in (5000000, "1", -1)),
        {"triton_enable_empty_final_response": True}, {"triton_final_response": True},
]  # fmt: skip
INFERENCE += [(f"parameters {parameters!r}"[:80], [("ModelInfer", told(**parameters))]) for parameters in _PARAMETERS]


def _given(datatype: str, field: str, *values: Any) -> Case:
    name = "IN_STRING" if datatype == "BYTES" else f"IN_{datatype}"
    message = request("every", [typed(field, values, name, datatype)])
    return f"{datatype} {values!r}", [("ModelInfer", message)]


def _raw(datatype: str, data: bytes, count: int) -> Case:
    name = "IN_STRING" if datatype == "BYTES" else f"IN_{datatype}"
    message = request("every", [tensor(name, datatype, [count])], [data])
    return f"{datatype} of {data!r}", [("ModelInfer", message)]


DATATYPES: list[Case] = [
    _given("BOOL", "bool_contents", True, False), _given("INT8", "int_contents", -128, 127),
    _given("INT8", "int_contents", 128),
    _given("INT16", "int_contents", 40000), _given("INT32", "int_contents", -5),
    _given("INT64", "int64_contents", 2**62),
    _given("UINT8", "uint_contents", 255, 256), _given("UINT16", "uint_contents", 7),
    _given("UINT32", "uint_contents", 2**32 - 1),
    _given("UINT64", "uint64_contents", 2**64 - 1), _given("FP32", "fp32_contents", 1.5),
    _given("FP64", "fp64_contents", 0.1),
    _given("BYTES", "bytes_contents", b"a", b"", b"\xff"), _given("FP16", "fp32_contents", 1.5),
    _given("BF16", "fp32_contents", 1.5),
    _given("FP16", "bytes_contents", b"\0\0"), _raw("FP16", struct.pack("<2e", 1.5, -2), 2),
    _raw("BF16", b"\x80\x3f", 1),
    _raw("BYTES", b"\1\0\0\0a\0\0\0\0", 2), _raw("BYTES", b"\1\0\0", 1), _raw("BYTES", b"\2\0\0\0a", 1),
    _raw("BYTES", b"\1\0\0\0a", 2),
    _raw("BYTES", b"\1\0\0\0a\1\0\0\0b", 1), _raw("BOOL", b"\2", 1),
]  # fmt: skip

_LET_GO_OF_X = ("SystemSharedMemoryUnregister", kserve.SystemSharedMemoryUnregisterRequest(name="x"))
_FROM_X = kserve.RepositoryModelLoadRequest(repository_name="x", model_name="add_sub")
_ALL = ("SystemSharedMemoryUnregister", kserve.SystemSharedMemoryUnregisterRequest())
_STATUS = ("SystemSharedMemoryStatus", kserve.SystemSharedMemoryStatusRequest())
_KEPT = ("SystemSharedMemoryRegister", register())


def _registered(title: str, *calls: Call) -> Case:
    return title, [_KEPT, *calls, _ALL]


def _lent(title: str, **change: Any) -> list[Case]:
    wanted = [shared(output, "OUTPUT0", **change)]
    return [
        _registered(f"input: {title}", ("ModelInfer", add_sub(shared(tensor, "INPUT0", **change), B, [ONES]))),
        _registered(f"output: {title}", ("ModelInfer", add_sub(outputs=wanted))),
    ]  # fmt: skip


_OVERRIDES: dict[str, dict[str, Any]] = {
    "a configuration": {"config": config()},
    "a number for the configuration": {"config": 1},
    "an empty configuration": {"config": ""},
    "a file alone": {"file:1/model.py": SOURCE},
    "a text for a file": {"config": config(), "file:1/model.py": "x"},
    "files": {"config": config(), "file:1/model.py": SOURCE},
    "files from a slash on": {"config": config(), "file:/1/model.py": SOURCE},
    "an unknown parameter": {"nonsense": "x"},
}


def _loaded(title: str, parameters: dict[str, Any]) -> Case:
    calls = [("RepositoryModelLoad", load("loadable", **parameters))]
    return f"load with {title}", [*calls, ("RepositoryModelUnload", unload("loadable"))]


CONTROL: list[Case] = [
    ("no regions", [_STATUS]),
    ("an unknown region", [("SystemSharedMemoryStatus", kserve.SystemSharedMemoryStatusRequest(name="nope"))]),
    *[
        (f"register {change!r}", [("SystemSharedMemoryRegister", register(**change)), _ALL])
        for change in ({"key": "/nope"}, {"byte_size": 65}, {"byte_size": 0}, {"offset": 64, "byte_size": 1},
            {"name": ""})
    ],
    _registered("its status", _STATUS),
    _registered("twice", _KEPT),
    _registered("let go of another", _LET_GO_OF_X, _STATUS),
    *_lent("as it should be"),
    *_lent("of nobody", shared_memory_region="x"),
    *_lent("named by a number", shared_memory_region=1),
    *_lent("beyond the end", shared_memory_offset=56),
    *_lent("at the end", shared_memory_offset=64),
    *_lent("before the start", shared_memory_offset=-1),
    *_lent("too small", shared_memory_byte_size=8),
    *_lent("size as text", shared_memory_byte_size="16"),
    *_lent("a negative size", shared_memory_byte_size=-1),
    *_lent("no size", shared_memory_byte_size=None),
    *_lent("with classes", classification=1),
    ("CUDA: none", [("CudaSharedMemoryStatus", kserve.CudaSharedMemoryStatusRequest())]),
    ("CUDA: unknown", [("CudaSharedMemoryStatus", kserve.CudaSharedMemoryStatusRequest(name="x"))]),
    ("index", [("RepositoryIndex", kserve.RepositoryIndexRequest())]),
    ("index of what is ready", [("RepositoryIndex", kserve.RepositoryIndexRequest(ready=True))]),
    ("load what is not there", [("RepositoryModelLoad", load("nope"))]),
    ("load nothing", [("RepositoryModelLoad", load(""))]),
    ("load from another repository", [("RepositoryModelLoad", _FROM_X)]),
    ("load what fails", [("RepositoryModelLoad", load("broken"))]),
    *[_loaded(title, parameters) for title, parameters in _OVERRIDES.items()],
    ("unload what is not there", [("RepositoryModelUnload", unload("nope"))]),
    ("unload with a number", [("RepositoryModelUnload", unload("nope", unload_dependents=1))]),
    ("unload with dependents", [("RepositoryModelUnload", unload("nope", unload_dependents=True))]),
    ("unload with an unknown parameter", [("RepositoryModelUnload", unload("nope", x=1))]),
]  # fmt: skip

_NO_TRACE = ("TraceSetting", trace(trace_level=[], trace_rate=[], trace_count=[], log_frequency=[]))
_USUAL = {"log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0}
_USUAL_LOG = ("LogSettings", logging(**_USUAL, log_format="default"))
CONTROL += [
    (f"trace {message}".replace("\n", " "), [("TraceSetting", message), _NO_TRACE])
    for message in (
        trace(), trace("add_sub"), trace("nope"), trace(trace_rate=["10"]), trace(trace_rate=["x"]),
        trace(trace_rate=["1", "2"]),
        trace(trace_rate=[]), trace(trace_level=["TIMESTAMPS"]), trace(trace_level=["OFF", "TIMESTAMPS"]),
        trace(trace_level=[]),
        trace(trace_count=["-2"]), trace(trace_file=["/x"]), trace(trace_file=[]), trace(nonsense=["1"]),
    )
]  # fmt: skip
CONTROL += [
    (f"log {settings!r}", [("LogSettings", logging(**settings)), _USUAL_LOG])
    for settings in (
        {}, {"log_info": False}, {"log_info": 1}, {"log_verbose_level": 1}, {"log_verbose_level": "1"},
        {"log_format": "ISO8601"},
        {"log_format": "x"}, {"log_file": "x"}, {"nonsense": 1},
    )
]  # fmt: skip

_EMPTY: dict[str, Any] = {"triton_enable_empty_final_response": True}
# No case asks for an error of a stream as its status, because tritonserver dies of it at once or later.
_AS_STATUS = [("triton_grpc_error", "true")]
STREAMS: list[Stream] = [
    ("nothing", [], []),
    ("one response", [add_sub(request_id="b")], []),
    ("one response, and an empty one wanted", [add_sub(request_id="b", triton_enable_empty_final_response=True)], []),
    ("two requests", [add_sub(request_id="1"), add_sub(request_id="2")], []),
    *[
        (f"{count} responses of a decoupled model, fail {fail}, {empty}",
            [repeat(count, fail, request_id="a", **empty)], [])
        for count in (0, 1, 3) for fail in (None, True) for empty in ({}, _EMPTY)
    ],
    ("an empty one wanted by a number", [repeat(1, triton_enable_empty_final_response=1, request_id="a")], []),
    ("an unknown model", [add_sub(model="nope", request_id="3")], []),
    ("an unknown model, then a good request", [add_sub(model="nope", request_id="3"), add_sub(request_id="4")], []),
    ("a wrong shape, then a good request", [add_sub(tensor("INPUT0", shape=[5]), request_id="5"),
        add_sub(request_id="6")], []),
    ("an error of the model", [fails("NOT_FOUND", request_id="7")], []),
    ("a reserved parameter", [add_sub(request_id="9", triton_x=1)], []),
    ("an unknown output", [add_sub(request_id="9", outputs=[output("NOPE")])], []),
    ("no content", [add_sub(raw=[], request_id="9")], []),
    ("a sequence", [sums(sequence_id=6, sequence_start=True), sums(sequence_id=6, sequence_end=True)], []),
    ("as status: one response", [add_sub(request_id="b")], _AS_STATUS),
    ("as status, said otherwise", [fails("NOT_FOUND", request_id="7")], [("triton_grpc_error", "1")]),
]  # fmt: skip
