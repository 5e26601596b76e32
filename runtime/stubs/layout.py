"""Layouts say where the tensors of a batch lie in its blocks. They are planned for requests, and read from answers.

Everything here is pure, and the same for all batches of the same shapes. So a layout is worked out once and remembered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moonpool.ipc.codec import encode, unpack_layout
from moonpool.ipc.errors import BadTensor, RemoteProtocolError
from moonpool.ipc.memory import ALIGNMENT
from moonpool.ipc.port import Shapes
from moonpool.ipc.tensors import BYTES, DTYPES, ITEMSIZE, MAX_DIMS, check_tensor

# A row and its six fields, with as many dimensions as there may be.
_VALUES_IN_ROW = 7 + MAX_DIMS


class RequestLayout(NamedTuple):
    """The plan for copying the inputs of a batch into one block."""

    # The field `layout` of EXECUTE.
    packed: bytes
    size_bytes: int
    # (request in the batch, input of the request, its beginning and its end in the block)
    copies: list[tuple[int, int, int, int]]


def lay_out(batch: Sequence[Shapes], elsewhere: Mapping[tuple[int, int], tuple[int, int]]) -> RequestLayout:
    """Plan the first block of a batch. `elsewhere` has the block and offset of inputs that lie in other blocks.

    The rows of one input lie back to back across the requests of a batch, so a model can have them stacked without a
    copy.
    """
    rows: list[list[list[object]]] = [[] for _ in batch]
    copies: list[tuple[int, int, int, int]] = []
    end = 0
    for number in range(max(len(shapes.tensors) for shapes in batch)):
        end = (end + ALIGNMENT - 1) & -ALIGNMENT
        for i, shapes in enumerate(batch):
            if number >= len(shapes.tensors):
                continue
            index, datatype, shape, size_bytes = shapes.tensors[number]
            if (i, number) in elsewhere:
                block, offset = elsewhere[i, number]
                rows[i].append([index, datatype, shape, block, offset, size_bytes])
                continue
            # Another request may have another input at this number, so the datatype may change within a row.
            end += -end % (ITEMSIZE[datatype] or 1)
            rows[i].append([index, datatype, shape, 0, end, size_bytes])
            if size_bytes:
                copies.append((i, number, end, end + size_bytes))
            # An empty tensor takes a byte, so that its block is one that was lent.
            end += size_bytes or 1
    return RequestLayout(encode(*rows), end, copies)


class OutputLayout(NamedTuple):
    """One output of a response, and its place. The dtype is None for BYTES."""

    name: str
    datatype: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic] | None
    block: int
    offset: int
    size_bytes: int


class AnswerLayout(NamedTuple):
    """The outputs of each response, and the least sizes of the blocks that they lie in."""

    responses: list[list[OutputLayout]]
    least_bytes: dict[int, int]

    def fault(self, sizes: Sequence[int]) -> str:
        """Describe what is wrong with the layout if the blocks have these sizes."""
        for output in (output for outputs in self.responses for output in outputs):
            if output.block >= len(sizes):
                return f"output {output.name!r} in block {output.block}: there is no such block"
            if output.offset + output.size_bytes > sizes[output.block]:
                return f"output {output.name!r} reaches beyond its block"
        return "nothing"


# The layout of a response without outputs.
NOTHING = AnswerLayout([[]], {})


def read_answer(packed: bytes, names: Sequence[str], count: int) -> AnswerLayout:
    """Read the layout of at most `count` responses of a model with outputs of these names.

    Raises `RemoteProtocolError` for tensors that no block could hold.
    """
    least_bytes: dict[int, int] = {}
    responses = []
    # One response and one output too many are let through here: the checks for them give a clearer error.
    most = 1 + (count + 1) * (1 + (len(names) + 1) * _VALUES_IN_ROW)
    for rows in unpack_layout(packed, most):
        outputs = [_output(row, names) for row in rows]
        if len({output.name for output in outputs}) != len(outputs):
            raise RemoteProtocolError("an output that is given twice")
        for output in outputs:
            end = output.offset + output.size_bytes
            least_bytes[output.block] = max(end, least_bytes.get(output.block, 0))
        responses.append(outputs)
    return AnswerLayout(responses, least_bytes)


def _output(row: list[Any], names: Sequence[str]) -> OutputLayout:
    index, datatype, shape, block, offset, size_bytes = row
    if index >= len(names):
        raise RemoteProtocolError(f"output {index}: there is no such output")
    name = names[index]
    try:
        check_tensor(datatype, shape, size_bytes)
    except BadTensor as bad:
        raise RemoteProtocolError(f"output {name!r} {bad}") from None
    dtype = None if datatype == BYTES else DTYPES[datatype]
    return OutputLayout(name, datatype, tuple(shape), dtype, block, offset, size_bytes)
