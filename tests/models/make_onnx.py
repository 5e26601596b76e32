"""Writes ONNX models into the repository that is its argument. A separate program, as onnx is heavy."""

import sys
from pathlib import Path

import onnx
from onnx import TensorProto as T
from onnx import helper as h


def write(name, nodes, inputs, outputs, initializers=(), config=""):
    graph = h.make_graph(
        nodes,
        name,
        [h.make_tensor_value_info(*tensor) for tensor in inputs],
        [h.make_tensor_value_info(*tensor) for tensor in outputs],
        list(initializers),
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    folder = Path(sys.argv[1]) / name
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    if config:
        (folder / "config.pbtxt").write_text(config)


ADD = [h.make_node("Add", ["A", "B"], ["SUM"]), h.make_node("Sub", ["A", "B"], ["DIFFERENCE"])]
ROWS = ["N", 3]
BOTH = ([("A", T.FLOAT, ROWS), ("B", T.FLOAT, ROWS)], [("SUM", T.FLOAT, ROWS), ("DIFFERENCE", T.FLOAT, ROWS)])
# No configuration at all; the graph batches.
write("add_sub", ADD, *BOTH)
write(
    "by_platform",
    ADD,
    *BOTH,
    config='platform: "onnxruntime_onnx" max_batch_size: 16 dynamic_batching { max_queue_delay_microseconds: 2000000 preferred_batch_size: 6 }',
)
write("whole", ADD, *BOTH, config='backend: "onnxruntime" input [ { name: "A" data_type: TYPE_FP32 dims: [ -1, 3 ] } ]')
write("narrow", ADD, *BOTH, config='backend: "onnxruntime" output [ { name: "SUM" } ]')
write(
    "contradicted",
    ADD,
    *BOTH,
    config='backend: "onnxruntime" input [ { name: "A" data_type: TYPE_INT32 dims: [ 3 ] }, { name: "B" } ]',
)
write("misnamed", ADD, *BOTH, config='backend: "onnxruntime" input [ { name: "C" data_type: TYPE_FP32 dims: [ 3 ] } ]')
FIXED = [("X", T.INT64, [2])], [("Y", T.INT64, [2])]
write("fixed", [h.make_node("Neg", ["X"], ["Y"])], *FIXED)
write("fixed_batches", [h.make_node("Neg", ["X"], ["Y"])], *FIXED, config='backend: "onnxruntime" max_batch_size: 2')
write(
    "texts",
    [h.make_node("Identity", ["X"], ["Y"])],
    [("X", T.STRING, [None])],
    [("Y", T.STRING, [None])],
    config='backend: "onnxruntime" input [ { name: "X" data_type: TYPE_STRING dims: [ -1 ] } ]',
)
# The data decides the number of elements; the other output is a scalar.
write(
    "nonzero",
    [h.make_node("NonZero", ["X"], ["Y"]), h.make_node("ReduceSum", ["X"], ["S"], keepdims=0)],
    [("X", T.FLOAT, [4])],
    [("Y", T.INT64, [1, "K"]), ("S", T.FLOAT, [])],
)
write(
    "tuned",
    ADD,
    *BOTH,
    config="""backend: "onnxruntime" optimization { graph { level: 1 } }
parameters [ { key: "intra_op_thread_count" value { string_value: "1" } }, { key: "inter_op_thread_count" value { string_value: "1" } },
             { key: "execution_mode" value { string_value: "1" } }, { key: "enable_mem_arena" value { string_value: "0" } } ]""",
)
write("level", ADD, *BOTH, config='backend: "onnxruntime" optimization { graph { level: 7 } }')
# The server keeps the total of each sequence, and adds START.
write(
    "totals",
    [
        h.make_node("Cast", ["START"], ["starts"], to=T.FLOAT),
        h.make_node("Add", ["X", "TOTAL_IN"], ["TOTAL_OUT"]),
        h.make_node("Add", ["TOTAL_OUT", "starts"], ["Y"]),
    ],
    [("X", T.FLOAT, ["N", 1]), ("TOTAL_IN", T.FLOAT, ["N", 1]), ("START", T.INT32, ["N", 1])],
    [("Y", T.FLOAT, ["N", 1]), ("TOTAL_OUT", T.FLOAT, ["N", 1])],
    config="""backend: "onnxruntime" max_batch_size: 4 sequence_batching {
    control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 100 ] } ] } ]
    state [ { input_name: "TOTAL_IN" output_name: "TOTAL_OUT" data_type: TYPE_FP32 dims: [ 1 ] } ] }""",
)
# A state that grows with each request, in batches of several sequences.
write(
    "history",
    [
        h.make_node("Concat", ["PAST", "X"], ["NOW"], axis=1),
        h.make_node("ReduceSum", ["NOW", "axis"], ["SUM"], keepdims=1),
    ],
    [("X", T.FLOAT, ["N", 1]), ("PAST", T.FLOAT, ["N", "L"])],
    [("SUM", T.FLOAT, ["N", 1]), ("NOW", T.FLOAT, ["N", "M"])],
    [h.make_tensor("axis", T.INT64, [1], [1])],
    config="""backend: "onnxruntime" max_batch_size: 4
    output [ { name: "SUM" }, { name: "NOW" } ]
    sequence_batching { oldest { max_candidate_sequences: 4 }
    state [ { input_name: "PAST" output_name: "NOW" data_type: TYPE_FP32 dims: [ -1 ]
    initial_state { name: "first" data_type: TYPE_FP32 dims: [ 1 ] data_file: "first" } } ] }""",
)
(Path(sys.argv[1]) / "history" / "initial_state").mkdir()
(Path(sys.argv[1]) / "history" / "initial_state" / "first").write_bytes(b"\0\0\x20\x41")
# Requests of different shapes are one flat tensor. SHOWN gives each request all that describes the batch.
BATCH_INPUTS = {
    "COUNT": ("BATCH_ELEMENT_COUNT", T.INT32, ["R"]),
    "SUM": ("BATCH_ACCUMULATED_ELEMENT_COUNT", T.FLOAT, ["R"]),
    "SUM0": ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", T.INT32, ["Z"]),
    "ITEM": ("BATCH_ITEM_SHAPE", T.INT32, ["R", "D"]),
    "FLAT": ("BATCH_ITEM_SHAPE_FLATTEN", T.INT32, ["F"]),
    "MOST": ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", T.INT32, ["M"]),
}
TYPES = {T.INT32: "TYPE_INT32", T.FLOAT: "TYPE_FP32"}
DESCRIBED = "".join(
    f'batch_input {{ kind: {kind} target_name: "{name}" data_type: {TYPES[type]} source_input: "X" }}\n'
    for name, (kind, type, _) in BATCH_INPUTS.items()
)
FLOATS = [h.make_node("Cast", [name], [f"{name}_f"], to=T.FLOAT) for name in BATCH_INPUTS][:-1]
FLATTENED = [h.make_node("Reshape", [f"{name}_f", "any"], [f"{name}_flat"]) for name in BATCH_INPUTS][:-1]
RAGGED = """backend: "onnxruntime" max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1, 2 ] allow_ragged_batch: true } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1, 2 ] }, { name: "SHOWN" data_type: TYPE_FP32 dims: [ -1 ] } ]
batch_output [ { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "Y" source_input: "X" } ]
dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 10000000 }
"""
write(
    "ragged",
    [
        h.make_node("Add", ["X", "X"], ["Y"]),
        *FLOATS,
        *FLATTENED,
        h.make_node("Shape", ["MOST"], ["most"]),
        h.make_node("Cast", ["most"], ["most_f"], to=T.FLOAT),
        h.make_node("Concat", [*(node.output[0] for node in FLATTENED), "most_f"], ["all"], axis=0),
        h.make_node("Unsqueeze", ["all", "first"], ["row"]),
        h.make_node("Unsqueeze", ["COUNT_f", "second"], ["column"]),
        h.make_node("Div", ["column", "column"], ["ones"]),
        h.make_node("MatMul", ["ones", "row"], ["SHOWN"]),
    ],
    [("X", T.FLOAT, ["N"]), *((name, type, shape) for name, (_, type, shape) in BATCH_INPUTS.items())],
    [("Y", T.FLOAT, ["N"]), ("SHOWN", T.FLOAT, ["R", "K"])],
    [
        h.make_tensor("any", T.INT64, [1], [-1]),
        h.make_tensor("first", T.INT64, [1], [0]),
        h.make_tensor("second", T.INT64, [1], [1]),
    ],
    config=RAGGED + DESCRIBED,
)
NEGATED = [h.make_node("Neg", ["X"], ["Y"])]
write(
    "ragged_rows",
    NEGATED,
    [("X", T.FLOAT, ["N", 2])],
    [("Y", T.FLOAT, ["N", 2])],
    config=RAGGED.replace(', { name: "SHOWN" data_type: TYPE_FP32 dims: [ -1 ] }', ""),
)
write(
    "undescribed",
    NEGATED,
    [("X", T.FLOAT, ["N"])],
    [("Y", T.FLOAT, ["N"])],
    config=RAGGED.replace(', { name: "SHOWN" data_type: TYPE_FP32 dims: [ -1 ] }', "") + DESCRIBED,
)
