"""Lists inference over HTTP: one line a case. A case is a name and the requests that make it, in their order."""

from __future__ import annotations

import gzip
import struct
import zlib
from typing import Any

from moonpool.runtime.conformance.tensors import GOOD, ONE_TO_FOUR, ONES, A, B, batch, lent, output, tensor
from moonpool.runtime.conformance.wire import Http, as_bytes, binary, infer, post

Case = tuple[str, list[Http]]
TEXT = as_bytes(GOOD)
X = tensor("X", [1.0])
INF, NAN = float("inf"), float("nan")


def _bodies(model: str, **bodies: Any) -> list[Case]:
    """Make a case for each body that `model` is sent."""
    return [(name.replace("_", " "), [infer(model, body)]) for name, body in bodies.items()]


def _first(**changes: Any) -> Any:
    """Return a good request but for its first input."""
    return {"inputs": [{**A, **changes}, B]}


def _told(**parameters: Any) -> list[Case]:
    return [
        (f"{name}: {value!r}"[:160], [infer("told", {"inputs": [X], "parameters": {name: value}})])
        for name, values in parameters.items()
        for value in values
    ]


def _typed(datatype: str, *data: list[Any]) -> list[Case]:
    name = "IN_STRING" if datatype in ("BYTES", "STRING") else f"IN_{datatype}"
    return [
        (f"{datatype} {values!r}", [infer("every", {"inputs": [tensor(name, values, datatype)]})]) for values in data
    ]


def _raw(datatype: str, count: int, data: bytes) -> list[Case]:
    """Make cases of a binary tensor given back as JSON, and as it came."""
    name = "STRING" if datatype == "BYTES" else datatype
    inputs = [lent(f"IN_{name}", len(data), datatype, [count])]
    bare = {"inputs": inputs}
    back = {"inputs": inputs, "outputs": [output(f"OUT_{name}", binary_data=True)]}
    return [
        (f"{datatype} {data!r} as JSON", [binary("every", bare, data)]),
        (f"{datatype} {data!r} as it came", [binary("every", back, data)]),
    ]


SUCCESS = _bodies(
    "add_sub",
    plain=GOOD,
    an_id={"id": "42", **GOOD},
    an_empty_id={"id": "", **GOOD},
    one_output={**GOOD, "outputs": [output("OUTPUT1")]},
    outputs_the_other_way_round={**GOOD, "outputs": [output("OUTPUT1"), output("OUTPUT0")]},
    an_output_twice={**GOOD, "outputs": [output("OUTPUT1"), output("OUTPUT1")]},
    no_outputs_named={**GOOD, "outputs": []},
    all_binary={**GOOD, "parameters": {"binary_data_output": True}},
    one_binary={**GOOD, "outputs": [output("OUTPUT0", binary_data=True), output("OUTPUT1")]},
    all_binary_but_one={
        **GOOD,
        "outputs": [output("OUTPUT0", binary_data=False), output("OUTPUT1")],
        "parameters": {"binary_data_output": True},
    },
    inputs_the_other_way_round={"inputs": [B, A]},
    nested_data=_first(data=[[1, 2], [3, 4]]),
    unevenly_nested_data=_first(data=[[1, 2], 3, 4]),
    unknown_keys={**GOOD, "nonsense": 1},
    unknown_parameters_of_tensors={
        "inputs": [{**A, "parameters": {"nonsense": 1}}, B],
        "outputs": [output("OUTPUT0", nonsense=1)],
    },
    a_mark_of_byte_order=b"\xef\xbb\xbf" + TEXT,
    floats=_first(data=[0.1, 1e30, -1e-30, 16777217]),
    infinity={"inputs": [tensor("INPUT0", [3e38, -3e38, 1, 2]), tensor("INPUT1", [3e38, 0, 0, 0])]},
    beyond_FP32=_first(data=[1e300, 1, 2, 3]),
    an_empty_parameter_list_of_an_output={**GOOD, "outputs": [{"name": "OUTPUT0"}]},
)

# No case has inputs or outputs that are not objects, because tritonserver dies of them now and then.
WRONG_JSON = _bodies(
    "add_sub",
    empty=b"",
    no_JSON=b"nonsense",
    truncated=b'{"inputs":[',
    something_behind=TEXT + b"x",
    two_values=b"{}{}",
    NUL_in_front=b"\0{}",
    a_comment=b"/*x*/{}",
    an_array=b"[]",
    a_text=b'"x"',
    null=b"null",
    nothing_in_it=b"{}",
    inputs_object={"inputs": {}},
    inputs_number={"inputs": 1},
    inputs_null={"inputs": None},
    inputs_of_nothing={"inputs": [{}]},
    no_inputs={"inputs": []},
    input_without_data={"inputs": [{"name": "INPUT0", "shape": [4], "datatype": "FP32"}]},
    input_without_name={"inputs": [{"shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]}]},
    input_without_shape={"inputs": [{"name": "INPUT0", "datatype": "FP32", "data": [1]}, B]},
    input_without_datatype={"inputs": [{"name": "INPUT0", "shape": [4], "data": [1]}, B]},
    id_number={**GOOD, "id": 42},
    id_null={**GOOD, "id": None},
    id_object={**GOOD, "id": {}},
    outputs_object={**GOOD, "outputs": {}},
    outputs_of_nothing={**GOOD, "outputs": [{}]},
    output_name_number={**GOOD, "outputs": [{"name": 1}]},
    binary_data_number={**GOOD, "outputs": [output("OUTPUT0", binary_data=1)]},
    binary_data_output_text={**GOOD, "parameters": {"binary_data_output": "true"}},
    parameters_array={**GOOD, "parameters": []},
    parameters_text={**GOOD, "parameters": "x"},
    parameters_null={**GOOD, "parameters": None},
    deep=b'{"inputs":' + b"[" * 200 + b"]" * 200 + b"}",
)

WRONG_TENSORS = _bodies(
    "add_sub",
    datatype_unknown=_first(datatype="XX"),
    datatype_empty=_first(datatype=""),
    datatype_small=_first(datatype="fp32"),
    datatype_of_the_configuration=_first(datatype="TYPE_FP32"),
    datatype_number=_first(datatype=3),
    datatype_other=_first(datatype="INT32"),
    shape_text=_first(shape="4"),
    shape_number=_first(shape=4),
    shape_of_texts=_first(shape=["4"]),
    shape_of_floats=_first(shape=[4.0]),
    shape_negative=_first(shape=[-1]),
    shape_zero=_first(shape=[0], data=[]),
    shape_two_by_two=_first(shape=[2, 2]),
    shape_four_by_one=_first(shape=[4, 1]),
    shape_five=_first(shape=[5], data=[1, 2, 3, 4, 5]),
    shape_too_large_for_64_bits=_first(shape=[99999999999999999999]),
    shape_that_overflows=_first(shape=[2**31, 2**31, 2**31], data=[1]),
    data_short=_first(data=[1, 2, 3]),
    data_long=_first(data=[1, 2, 3, 4, 5]),
    data_of_texts=_first(data=["1", "2", "3", "4"]),
    data_of_null=_first(data=[None, 1, 2, 3]),
    data_of_objects=_first(data=[{}, 1, 2, 3]),
    data_of_bools=_first(data=[True, 1, 2, 3]),
    data_text=_first(data="1234"),
    data_number=_first(data=5),
    data_object=_first(data={}),
    data_null=_first(data=None),
    an_input_missing={"inputs": [A]},
    an_input_twice={"inputs": [A, A]},
    an_input_thrice={"inputs": [A, B, A]},
    an_input_too_many={"inputs": [A, B, tensor("NOPE", [1])]},
    an_unknown_input={"inputs": [{**A, "name": "NOPE"}, B]},
    an_input_without_a_name={"inputs": [{**A, "name": ""}, B]},
    an_unknown_output={**GOOD, "outputs": [output("NOPE")]},
    data_and_binary_size=_first(parameters={"binary_data_size": 16}),
)
WRONG_TENSORS += _bodies(
    "batched",
    a_batch_too_large={"inputs": batch(*[[1, 2, 3, 4]] * 5)},
    no_batch_dimension={"inputs": [A, B]},
    batches_that_differ={"inputs": [batch([1] * 4, [1] * 4)[0], batch([1] * 4)[1]]},
    an_empty_batch={"inputs": batch()},
    rows_of_five={"inputs": [tensor("INPUT0", [1] * 5, shape=[1, 5]), batch([1] * 4)[1]]},
    a_batch_of_two={"inputs": batch([1, 2, 3, 4], [5, 6, 7, 8])},
)


_BOTH = {"inputs": [lent("INPUT0", 16), lent("INPUT1", 16)]}
_DATA = ONE_TO_FOUR + ONES


def _sizes(first: Any, second: Any = 16, data: bytes = _DATA) -> Http:
    header = {"inputs": [lent("INPUT0", first), lent("INPUT1", second)]}
    return binary("add_sub", header, data)


BINARY: list[Case] = [
    ("both binary", [binary("add_sub", _BOTH, _DATA)]),
    ("the first one binary", [binary("add_sub", {"inputs": [lent("INPUT0", 16), B]}, _DATA[:16])]),
    ("the second one binary", [binary("add_sub", {"inputs": [A, lent("INPUT1", 16)]}, ONES)]),
    ("only JSON", [binary("add_sub", GOOD, b"")]),
    ("4 bytes short", [binary("add_sub", _BOTH, _DATA[:-4])]),
    ("16 bytes short", [binary("add_sub", _BOTH, _DATA[:16])]),
    ("4 bytes long", [binary("add_sub", _BOTH, _DATA + b"1234")]),
    ("a size of 12", [_sizes(16, 12, _DATA[:28])]),
    ("a size of 20", [_sizes(16, 20, _DATA + b"1234")]),
    ("a size of 0", [_sizes(0, 16, ONES)]),
    ("a negative size", [_sizes(-1)]),
    ("a size of 2**63", [_sizes(2**63)]),
    ("a size that is a float", [_sizes(16.0)]),
    ("a size that is a text", [_sizes("16")]),
    ("no header length", [infer("add_sub", as_bytes(_BOTH) + _DATA)]),
    *[
        (f"header length {said!r}", [binary("add_sub", _BOTH, _DATA, said)])
        for said in ("1", "-1", "1000000", "99999999999999999999", "10")
    ],
    ("another content type", [binary("add_sub", _BOTH, _DATA, Content_Type="text/html")]),
    ("bytes alone", [binary("told", b"", struct.pack("<3f", 1, 2, 3))]),
    ("bytes alone for a text", [binary("fails", b"", b"NOT_FOUND")]),
    ("bytes alone for two inputs", [binary("add_sub", b"", ONE_TO_FOUR)]),
    ("bytes alone, not whole", [binary("told", b"", b"123")]),
    *_raw("FP16", 2, struct.pack("<2e", 1.5, -2)),
    *_raw("BF16", 2, b"\x80\x3f\x00\x40"),
    *_raw("BOOL", 3, b"\0\1\2"),
    *_raw("BYTES", 3, b"\1\0\0\0a\0\0\0\0\2\0\0\0bc"),
    *_raw("FP64", 1, struct.pack("<d", NAN)),
    *_raw("FP32", 2, struct.pack("<2f", NAN, -INF)),
    *_raw("BYTES", 1, b"\2\0\0\0\xff\xfe"),
    *_raw("BYTES", 1, b"\1\0\0"),
    *_raw("BYTES", 1, b"\2\0\0\0a"),
    *_raw("BYTES", 1, b"\1\0\0\0a\1\0\0\0b"),
    *_raw("BYTES", 2, b"\1\0\0\0a"),
    *_raw("BYTES", 1, b""),
    *_raw("FP16", 2, b"123"),
]

DATATYPES: list[Case] = [
    *_typed("BOOL", [True, False], [1, 0], ["true"]),
    *_typed("UINT8", [0, 255], [256], [-1], [1.5], [True], ["1"]),
    *_typed("UINT16", [65535], [65536]),
    *_typed("UINT32", [4294967295], [4294967296]),
    *_typed("UINT64", [18446744073709551615], [18446744073709551616], [-1]),
    *_typed("INT8", [-128, 127], [128]),
    *_typed("INT16", [-32768], [40000]),
    *_typed("INT32", [-2147483648], [2147483648]),
    *_typed("INT64", [-(2**63), 2**63 - 1], [2**63], [1e3]),
    *_typed("FP16", [1.5], [[1.5]]),
    *_typed("BF16", [1.5]),
    *_typed("FP32", [1.5, -0.0, 1e-45, 3.4e38], [1e39], [True]),
    *_typed("FP64", [0.1, 1e300, 5e-324, 2**53 + 1], [1]),
    *_typed("BYTES", ["a", "", "ü", "\0x", "😀"], [1], [True], [None], [["a"]]),
    *_typed("STRING", ["a"]),
    ("no input of all", [infer("every", {"inputs": []})]),
    (
        "an output that the model does not give",
        [infer("every", {"inputs": [tensor("IN_FP32", [1])], "outputs": [output("OUT_INT8")]})],
    ),
]

_ANY: list[Any] = [{}, [1], None]
PARAMETERS: list[Case] = [
    *_told(a=[1, -1, "s", "ü", True, 1.5, 2**62, 2**63, 2**64, *_ANY]),
    *_told(triton_x=[1], triton_enable_empty_final_response=[True], headers=[1]),
    *_told(sequence_id=[1, 0, "abc", "", 2**64 - 1, "x" * 128, "x" * 129, -1, 1.5, True, None]),
    *_told(sequence_start=[True, 1, "true"], sequence_end=[True, None]),
    *_told(priority=[0, 1, 4, 2**64 - 1, "1", -1, 1.5, None, True]),
    *_told(timeout=[0, 5000000, 2**63, "1", -1, 1.5]),
    ("the id is told", [infer("told", {"id": "7", "inputs": [X]})]),
    *[
        (f"priority {value} of 3", [infer("batched",
            {"inputs": batch([1, 2, 3, 4]), "parameters": {"priority": value}})])
        for value in (0, 3, 4)
    ],
    *[
        (f"timeout {value} of 5000000", [infer("batched",
            {"inputs": batch([1, 2, 3, 4]), "parameters": {"timeout": value}})])
        for value in (0, 5, 4000000, 6000000)
    ],
]  # fmt: skip


def _sum(**parameters: Any) -> Http:
    inputs = [tensor("X", [5], "INT32", [1, 1])]
    return infer("sums", {"inputs": inputs, "parameters": parameters})


SEQUENCES: list[Case] = [
    ("no sequence id", [_sum()]),
    ("a sequence id of 0", [_sum(sequence_id=0, sequence_start=True)]),
    ("a sequence that did not start", [_sum(sequence_id=5)]),
    (
        "a sequence",
        [
            _sum(sequence_id=5, sequence_start=True),
            _sum(sequence_id=5),
            _sum(sequence_id=5, sequence_end=True),
            _sum(sequence_id=5),
        ],
    ),
    (
        "a sequence with a text for its id",
        [_sum(sequence_id="abc", sequence_start=True), _sum(sequence_id="abc", sequence_end=True)],
    ),
]


def _classes(title: str, *outputs: Any, rows: int = 1) -> Case:
    inputs = batch(*[[3, 1, 2, 0]] * rows)
    return title, [infer("batched", {"inputs": inputs, "outputs": list(outputs)})]


def _classes_of(datatype: str, values: list[Any]) -> Case:
    inputs = [tensor(f"IN_{datatype}", values, datatype)]
    body = {"inputs": inputs, "outputs": [output(f"OUT_{datatype}", classification=2)]}
    return f"classes of {datatype} {values!r}", [infer("every", body)]


CLASSES: list[Case] = [
    _classes("the best", output("OUTPUT0", classification=1)),
    _classes("the best three of two rows", output("OUTPUT0", classification=3), rows=2),
    _classes("the best three, binary", output("OUTPUT0", classification=3, binary_data=True)),
    _classes("no labels", output("OUTPUT1", classification=2)),
    _classes("more than there are", output("OUTPUT0", classification=10)),
    *[
        _classes(f"classification {value!r}", output("OUTPUT0", classification=value))
        for value in (0, -1, "1", 1.5, True, None)
    ],
    _classes_of("BOOL", [True, False]),
    _classes_of("INT8", [1, 3, 3]),
    _classes_of("UINT64", [5, 7]),
    _classes_of("INT64", [-5, 2**40]),
    _classes_of("FP64", [0.25, 1e20, -3]),
    _classes_of("FP32", [1, 1, 1]),
]


def _packed(encoding: str, body: bytes, accept: str = "") -> Http:
    headers = {"Accept-Encoding": accept} if accept else {}
    return post("/v2/models/add_sub/infer", body, Content_Encoding=encoding, **headers)


def _accepting(accept: str) -> Case:
    return f"accepting {accept!r}", [infer("add_sub", TEXT, Accept_Encoding=accept)]


COMPRESSION: list[Case] = [
    ("gzip", [_packed("gzip", gzip.compress(TEXT, mtime=0))]),
    ("deflate", [_packed("deflate", zlib.compress(TEXT))]),
    ("gzip under deflate's name", [_packed("deflate", gzip.compress(TEXT, mtime=0))]),
    ("deflate under gzip's name", [_packed("gzip", zlib.compress(TEXT))]),
    ("gzip both ways", [_packed("gzip", gzip.compress(TEXT, mtime=0), "gzip")]),
    ("nothing to unpack", [_packed("gzip", b"")]),
    ("not packed at all", [_packed("identity", TEXT)]),
    *[(f"encoding {name!r}", [_packed(name, TEXT)]) for name in ("br", "x", "GZIP", "gzip, gzip", "gzip,deflate")],
    *map(_accepting, ["gzip", "deflate", "br", "gzip, deflate", "deflate, gzip", "*", "identity", "gzip;q=0"]),
    *map(_accepting, ["deflate;q=0.5, gzip;q=0.2", "br;q=1.0, gzip;q=0.8, *;q=0.1", "GZIP"]),
    ("a wrong request, accepting gzip", [infer("add_sub", b"x", Accept_Encoding="gzip")]),
    (
        "binary tensors, packed",
        [
            infer(
                "add_sub",
                gzip.compress(as_bytes(_BOTH) + _DATA, mtime=0),
                Content_Encoding="gzip",
                Inference_Header_Content_Length=str(len(as_bytes(_BOTH))),
            )
        ],
    ),
]
