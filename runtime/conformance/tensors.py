"""Makes the JSON of tensors, as short as a table of requests needs it."""

from __future__ import annotations

import struct
from typing import Any

Json = dict[str, Any]

# The shared memory that requests speak of: its key, and its size.
KEY = "/moonpool_conformance"
KEY_BYTES = 64
ONE_TO_FOUR = struct.pack("<4f", 1, 2, 3, 4)
ONES = struct.pack("<4f", 1, 1, 1, 1.5)


def tensor(name: str, data: Any, datatype: str = "FP32", shape: Any = None, **more: Any) -> Json:
    """Make an input with its data in JSON."""
    described = {"name": name, "shape": [len(data)] if shape is None else shape}
    return {**described, "datatype": datatype, "data": data, **more}


def lent(name: str, size: Any, datatype: str = "FP32", shape: Any = (4,), **more: Any) -> Json:
    """Make an input whose data is elsewhere: behind the JSON, as `size` bytes."""
    return {"name": name, "shape": list(shape), "datatype": datatype, "parameters": {"binary_data_size": size, **more}}


def shared(name: str, **parameters: Any) -> Json:
    """Make an input of 16 bytes in the shared memory `r`."""
    found = {"shared_memory_region": "r", "shared_memory_byte_size": 16, **parameters}
    return {"name": name, "shape": [4], "datatype": "FP32", "parameters": found}


def output(name: str, **parameters: Any) -> Json:
    """Make an output that is asked for."""
    return {"name": name, "parameters": parameters}


A = tensor("INPUT0", [1, 2, 3, 4])
B = tensor("INPUT1", [1, 1, 1, 1.5])
GOOD: Json = {"inputs": [A, B]}


def batch(*rows: Any) -> list[Json]:
    """Make both inputs of the model `batched`, the second one all ones."""
    flat = [value for row in rows for value in row]
    shape = [len(rows), 4]
    ones = [1] * len(flat)
    return [tensor("INPUT0", flat, shape=shape), tensor("INPUT1", ones, shape=shape)]
