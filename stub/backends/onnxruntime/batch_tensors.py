"""Joins requests of different shapes: ragged inputs, `batch_input` and `batch_output` of a configuration.

A ragged input is one flat tensor with the elements of all requests. The graph learns from further inputs, which
describe the batch, where each request begins. A flat output is cut into the parts of the requests by the shapes of one
of their inputs. All shapes here are those that requests have, with the rows first.

The backends `onnxruntime` and `pytorch` have the same file, so that each folder can be copied alone.
"""

from __future__ import annotations

from math import prod

import numpy as np

DTYPES = {"TYPE_INT32": np.int32, "TYPE_FP32": np.float32}


class BatchTensors:
    """Knows which tensors of a model depend on the shapes of a whole batch."""

    def __init__(self, config: dict) -> None:
        given = config.get("input", [])
        self.ragged = {each["name"] for each in given if each.get("allow_ragged_batch")}
        self.inputs = config.get("batch_input", [])
        # The input by which an output is cut, and the dims of the output.
        self.cuts: dict[str, tuple[str, list[int]]] = {}
        rows = [-1] if config["max_batch_size"] > 0 else []
        dims = {each["name"]: rows + seen(each) for each in config.get("output", [])}
        for each in config.get("batch_output", []):
            for name in each["target_name"]:
                if name in dims:
                    self.cuts[name] = each["source_input"][0], dims[name]

    def input_datatypes(self) -> dict[str, str]:
        """Return the datatype of each input that describes the batch, by name, in the order of the configuration."""
        return {name: each["data_type"] for each in self.inputs for name in each["target_name"]}

    def input_values(self, requests: list) -> dict[str, np.ndarray]:
        """Return the inputs that describe this batch, by name."""
        values = {}
        for each in self.inputs:
            shapes = shapes_of(requests, each["source_input"][0])
            for name in each["target_name"]:
                values[name] = described(each["kind"], DTYPES[each["data_type"]], shapes)
        return values

    def output_shapes(self, name: str, requests: list) -> list[list[int]]:
        """Return the shape that an output of `cuts` has for each request."""
        source, dims = self.cuts[name]
        return [cut_shape(dims, shape) for shape in shapes_of(requests, source)]


def described(kind: str, dtype: type, shapes: list) -> np.ndarray:
    """Return the tensor of a `batch_input` for requests whose source input has these shapes."""
    counts = [prod(shape) for shape in shapes]
    if kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        # The size is the value. The elements mean nothing.
        return np.zeros(max(counts), dtype)
    if kind == "BATCH_ELEMENT_COUNT":
        values = np.array(counts)
    elif kind == "BATCH_ACCUMULATED_ELEMENT_COUNT":
        values = np.cumsum(counts)
    elif kind == "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
        values = np.cumsum([0, *counts])
    elif kind in ("BATCH_ITEM_SHAPE", "BATCH_ITEM_SHAPE_FLATTEN"):
        rows = [list(shape[1:]) for shape in shapes for _ in range(shape[0])]
        values = np.array(rows, np.int64).reshape(len(rows), len(shapes[0]) - 1)
        if kind == "BATCH_ITEM_SHAPE_FLATTEN":
            values = values.reshape(-1)
    else:
        raise ValueError(f"unexpected batch input kind '{kind}'")
    if dtype is np.int32 and values.size and values.max() > np.iinfo(np.int32).max:
        raise ValueError(f"{kind} of this batch is {values.max()}, which is too large for TYPE_INT32")
    return values.astype(dtype)


def cut_shape(dims: list, shape: list) -> list[int]:
    """Return the shape of a request's part of an output: variable dims are those of the source input."""
    return [shape[place] if size == -1 else size for place, size in enumerate(dims)]


def bounds(name: str, size: int, shapes: list) -> list[tuple[int, int]]:
    """Return where the parts of these shapes begin and end in a flat output of so many elements."""
    ends = np.cumsum([0, *(prod(shape) for shape in shapes)]).tolist()
    if ends[-1] != size:
        raise ValueError(f"output '{name}' has {size} elements for a batch whose requests get {ends[-1]}")
    return list(zip(ends, ends[1:]))


def shapes_of(requests: list, name: str) -> list:
    """Return the shape of an input in each request. Raises ValueError if one leaves it out."""
    shapes = [
        next((list(each.shape()) for each in request.inputs() if each.name() == name), None) for request in requests
    ]
    if None in shapes:
        raise ValueError(f"a request has no input '{name}', and the batch is described by it")
    return shapes


def seen(tensor: dict) -> list[int]:
    """Return the dims of a tensor as the model has them."""
    return list(tensor["reshape"]["shape"] if tensor.get("reshape") else tensor["dims"])
