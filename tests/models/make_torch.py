"""Writes PyTorch models into the repository that is its argument. A separate program, as torch is heavy."""

import sys
from pathlib import Path
from typing import Dict, List, Tuple

import torch
from torch import Tensor


def tensor(name, datatype, dims, more=""):
    return f'{{ name: "{name}" data_type: TYPE_{datatype} dims: [ {dims} ] {more} }}'


def config(inputs, outputs, more=""):
    sides = {"input": inputs, "output": outputs}
    text = "".join(f"{k} [ {', '.join(tensor(*t) for t in v)} ]\n" for k, v in sides.items())
    return f'backend: "pytorch"\n{text}{more}'


def folder(name, text):
    path = Path(sys.argv[1]) / name / "1"
    path.mkdir(parents=True)
    (path.parent / "config.pbtxt").write_text(text)
    return path


def script(name, module, *args, **kwargs):
    torch.jit.script(module.eval()).save(folder(name, config(*args, **kwargs)) / "model.pt")


class AddSub(torch.nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tuple[Tensor, Tensor]:
        return a + b, a - b


class Named(torch.nn.Module):
    def forward(self, tensors: Dict[str, Tensor]) -> Dict[str, Tensor]:
        return {"SUM": tensors["A"] + tensors["B"], "PRODUCT": tensors["A"] * tensors["B"]}


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(self.layer.weight, 2.0)
        torch.nn.init.constant_(self.layer.bias, 1.0)

    def forward(self, x):
        return self.layer(x)


class Mode(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        return torch.full_like(x, float(y.is_inference()))


class Misbehaves(torch.nn.Module):
    """Does what its input says."""

    def forward(self, x: Tensor) -> List[Tensor]:
        what = int(x[0, 0])
        assert what != 1, "one is too many"
        if what == 2:
            return []
        if what == 3:
            return [x.to(torch.int64)]
        if what == 4:
            return [x.sum().reshape(1)]
        return [x]


class Totals(torch.nn.Module):
    def forward(self, x: Tensor, total: Tensor, start: Tensor) -> Tuple[Tensor, Tensor]:
        after = x + total
        return after + start, after


class Ragged(torch.nn.Module):
    """Sums the requests in a flat tensor."""

    def forward(self, x: Tensor, ends: Tensor, counts: Tensor) -> Tuple[Tensor, Tensor]:
        sums: List[Tensor] = []
        for index in range(ends.size(0)):
            end = int(ends[index])
            sums.append(x[end - int(counts[index]) : end].sum())
        return x * 2, torch.stack(sums).reshape(-1, 1)


class History(torch.nn.Module):
    """Appends each value to a state, and to another one of BF16."""

    def forward(self, x: Tensor, past: Tensor, half: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        now = torch.cat([past, x], 1)
        return now.sum(1, keepdim=True), now, half + x.to(torch.bfloat16)


class Twice(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def one(name, module, inputs, outputs, more=""):
    script(name, module, inputs, outputs, more)


F3 = ("FP32", "3")
INDEXED = [("INPUT__1", *F3), ("INPUT__0", *F3)], [("OUTPUT__1", *F3), ("OUTPUT__0", *F3)]
BATCH = "max_batch_size: 8 dynamic_batching { preferred_batch_size: 6 max_queue_delay_microseconds: 2000000 }"
THREADS = 'parameters [ { key: "INTRA_OP_THREAD_COUNT" value { string_value: "1" } }, { key: "INTER_OP_THREAD_COUNT" value { string_value: "1" } }, { key: "DISABLE_OPTIMIZED_EXECUTION" value { string_value: "true" } } ]'
one("indexed", AddSub(), *INDEXED, BATCH)
one("by_argument", AddSub(), [("b", *F3), ("a", *F3)], [("SUM", *F3), ("DIFFERENCE", *F3)], THREADS)
one("too_many", AddSub(), [(f"INPUT__{i}", *F3) for i in range(3)], [("OUTPUT__0", *F3)])
one("dicts", Named(), [("A", *F3), ("B", *F3)], [("PRODUCT", *F3), ("SUM", *F3)], "max_batch_size: 4")
one("half", Twice(), [("x", "BF16", "-1")], [("y", "BF16", "-1")])
one("in_place", Twice(), [("x", "FP32", "-1")], [("y", "FP32", "-1")])
one("texts", Twice(), [("x", "STRING", "-1")], [("y", "FP32", "-1")])
STATE = """max_batch_size: 4 sequence_batching {
    control_input [ { name: "start" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 100 ] } ] } ]
    state [ { input_name: "total" output_name: "after" data_type: TYPE_FP32 dims: [ 1 ] } ] }"""
one("totals", Totals(), [("x", "FP32", "1")], [("y", "FP32", "1")], STATE)
HISTORY = """max_batch_size: 4 sequence_batching { oldest { max_candidate_sequences: 4 }
    state [ { input_name: "past" output_name: "now" data_type: TYPE_FP32 dims: [ -1 ] },
            { input_name: "half" output_name: "more" data_type: TYPE_BF16 dims: [ 1 ] } ] }"""
one(
    "history",
    History(),
    [("x", "FP32", "1")],
    [("sum", "FP32", "1"), ("now", "FP32", "-1"), ("more", "BF16", "1")],
    HISTORY,
)
RAGGED = """batch_input [
    { kind: BATCH_ELEMENT_COUNT target_name: "counts" data_type: TYPE_FP32 source_input: "x" },
    { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_INT32 source_input: "x" } ]
batch_output [ { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "y" source_input: "x" } ]
max_batch_size: 8 dynamic_batching { preferred_batch_size: 3 max_queue_delay_microseconds: 10000000 }"""
one(
    "ragged",
    Ragged(),
    [("x", "FP32", "-1", "allow_ragged_batch: true")],
    [("y", "FP32", "-1"), ("sum", "FP32", "1")],
    RAGGED,
)
one("mode", Mode(), [("x", *F3)], [("y", *F3)])
one("misbehaves", Misbehaves(), [("x", *F3)], [("y", *F3)], "max_batch_size: 4")
traced = torch.jit.trace(Linear().eval(), torch.ones(1, 3))
traced.save(
    folder(
        "linear",
        config([("x", *F3)], [("y", "FP32", "2")], "max_batch_size: 8").replace(
            'backend: "pytorch"', 'platform: "pytorch_libtorch"'
        ),
    )
    / "model.pt"
)

batch = torch.export.Dim("batch", min=1, max=8)
program = torch.export.export(Linear().eval(), (torch.ones(2, 3),), dynamic_shapes={"x": {0: batch}})
torch.export.save(
    program, folder("exported", config([("x", *F3)], [("y", "FP32", "2")], "max_batch_size: 8")) / "model.pt2"
)
program = torch.export.export(AddSub(), (torch.ones(3), torch.ones(3)))
# The configuration names no backend, because the file is enough.
torch.export.save(
    program,
    folder(
        "exported_two",
        config([("b", *F3), ("a", *F3)], [("OUTPUT__0", *F3), ("OUTPUT__1", *F3)]).replace('backend: "pytorch"', ""),
    )
    / "model.pt2",
)
program = torch.export.export(Named(), ({"A": torch.ones(3), "B": torch.ones(3)},))
torch.export.save(program, folder("exported_dicts", config([("A", *F3), ("B", *F3)], [("SUM", *F3)])) / "model.pt2")
