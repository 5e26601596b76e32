"""Takes usual calls through the runtime: `ask` and `request` for INFER, `reply` for REPLY.

Theory of operation. A call is usual if it is an INFER that has come before, with other values: the same model, the same inputs in one
block of the asking stub's own memory, small enough to be copied, no strings, no details. Nearly all calls are. What was worked out for the
first one is kept (`AskPlan`), by the bytes of the message, and used as long as the model of that name is the same one. A reply is usual if its
outputs are small, and of names, datatypes and shapes that were met before (`ReplyPlan`).

`ask` and `reply` find out that a call is not usual before they have changed anything. Then the layers (`requests.py`) do all of that step.
What a stub may change between two calls is checked each time, before a byte is read: the number and the lists (`KnownCalls`), that the
block lies in a region in which this stub answers, and that it is as large as the inputs. What the model's operator may change is
looked up each time: whether the model is there, and whether the stub may ask for it.

Threads. `ask`, `request` and `learn` are for the reactor's thread. `reply` and `learn_reply` may be called by the thread that has an outcome; the plans of
replies are a `Memo`, which any thread may use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moonpool.ipc.codec import KnownCalls, packed
from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.memo import Memo
from moonpool.ipc.memory import SHARED_BYTES
from moonpool.ipc.messages import Kind
from moonpool.ipc.port import Shapes
from moonpool.ipc.tensors import BYTES, CODES, DTYPES
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import Details, InferenceRequest, Response, WireTensor
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.stubs.calls.requests import Callee, Callees
from moonpool.runtime.stubs.link import Link

_ndarray = np.ndarray
# Only responses with few outputs are remembered, so that they cannot take much memory.
_MOST_OUTPUTS = 64


class AskPlan(NamedTuple):
    """Keeps what INFERs of one kind say, and what was made of the first one for one model."""

    model: str
    version: int | None
    signature: Signature
    shapes: Shapes
    # The outputs that are wanted, if not all are.
    details: Details | None
    # The shape, the dtype and the offset of each input, in the order of the model's inputs.
    inputs: list[tuple[tuple[int, ...], Any, int]]
    # The least size of the block.
    size_bytes: int
    # False if the outputs may come as typed arrays, since none can be of strings or lie on a device.
    wants_wire: bool


class ReplyPlan(NamedTuple):
    """Describes how the outputs of a response are sent if all are copied into one block."""

    # The rows of REPLY.
    rows: list[list[Any]]
    offsets: list[int]
    size_bytes: int
    # The bytes of REPLY behind the blocks: the rows, no parameters and no error.
    tail: bytes


class UsualAsk(NamedTuple):
    """Keeps a usual INFER: the number of the call, the released places, the block of the inputs, the model, and the plan."""

    number: int
    released: list[list[int]]
    block: list[int]
    hosted: Callee
    plan: AskPlan


class UsualCalls:
    """The usual calls of one stub. See the theory of operation."""

    def __init__(self, link: Link, models: Callees) -> None:
        self._link = link
        self._models = models
        self._asks: KnownCalls[AskPlan] = KnownCalls(Kind.INFER)
        self._allocate = link.borrowed_blocks.allocate
        self._replies: Memo[tuple[object, ...], ReplyPlan] = Memo(64)

    def ask(self, packet: bytes) -> UsualAsk | None:
        """Read a usual INFER, and do nothing. Returns None for any other packet. Raises `RemoteProtocolError`."""
        known = self._asks.find(packet)
        if known is None:
            return None
        number, released, blocks, plan = known
        link = self._link
        if link.lanes is not None or len(blocks) != 1:
            return None
        region_id, offset, size_bytes = blocks[0]
        region = link.response_regions.get(region_id)
        if (
            region is None
            or offset + size_bytes > region.size_bytes
            or size_bytes < plan.size_bytes
        ):
            return None
        try:
            hosted = self._models.find(plan.model, plan.version)
        except MoonpoolError:  # the layers answer with it
            return None
        if hosted.signature is not plan.signature:
            return None
        return UsualAsk(number, released, blocks[0], hosted, plan)

    def request(self, block: list[int], plan: AskPlan) -> InferenceRequest:
        """Make the request. Its inputs are views of the block."""
        lease = self._link.open(*block)
        arrays = [_ndarray(shape, dtype, lease, at) for shape, dtype, at in plan.inputs]
        # None of these arrays may be lent: they are small, and in no memory of callers.
        request = InferenceRequest(arrays, plan.shapes, plan.details, has_views=False)
        request.wants_wire = plan.wants_wire
        request.takes_devices = self._link.may_have_lanes
        return request

    def learn(
        self,
        packet: bytes,
        fields: list[Any],
        hosted: Callee,
        inputs: dict[str, Any],
        request: InferenceRequest,
    ) -> None:
        """Remember what was made of an INFER, which has passed all checks, if calls like it are usual."""
        _, _, model, version, decoupled, timeout_us, _, blocks, rows, _, details = fields
        is_plain = details is None and not timeout_us and not decoupled and len(blocks) == 1
        if not is_plain or self._link.lanes is not None or not request.shapes.is_shared:
            return
        found = {id(inputs[row[0]]): row for row in rows}
        described = []
        end = 0
        for array in request.arrays:
            row = found.get(id(array))
            if row is None or row[1] >= BYTES or not 0 < row[5] < SHARED_BYTES:
                return
            described.append((tuple(row[2]), DTYPES[row[1]], row[4]))
            end = max(end, row[4] + row[5])
        plan = AskPlan(
            model,
            None if version == -1 else version,
            hosted.signature,
            request.shapes,
            request.details,
            described,
            end,
            _wants_wire(hosted.model.config),
        )
        self._asks.learn(packet, fields, plan)

    def reply(self, response: Response) -> tuple[list[list[int]], list[list[Any]]] | None:
        """Copy the outputs of a usual response into a block, which the stub borrows. Returns blocks and rows as REPLY has them.

        Returns None, and has done nothing, for any other response. Raises `OutOfMemory`.
        """
        key, arrays = _described(response.outputs)
        plan = self._replies.get(key)
        if plan is None:
            return None
        block = self._allocate(plan.size_bytes, keep=True)
        region, start = block.region, block.offset
        write = region.write
        for array, offset in zip(arrays, plan.offsets, strict=True):
            write(start + offset, array)
        return [[region.id, start, plan.size_bytes]], plan.rows

    def learn_reply(
        self, response: Response, blocks: Sequence[list[int]], rows: list[list[Any]]
    ) -> None:
        """Remember how the outputs of a response were sent, if all were copied."""
        key, arrays = _described(response.outputs)
        # An array of objects is strings, whose size differs from array to array.
        is_plain = all(
            0 < each.nbytes < SHARED_BYTES and not each.dtype.hasobject for each in arrays
        )
        if arrays and is_plain and len(blocks) == 1 and len(rows) <= _MOST_OUTPUTS:
            tail = packed(rows, None, None)
            plan = ReplyPlan(rows, [row[4] for row in rows], blocks[0][2], tail)
            self._replies.keep(key, plan)


def _wants_wire(config: ModelConfig) -> bool:
    return config.uses_gpu or any(CODES[each.datatype] >= BYTES for each in config.outputs)


def _described(outputs: Mapping[str, Any]) -> tuple[tuple[object, ...], list[Any]]:
    """Return all that a plan depends on, and the arrays. Both are empty if an output cannot just be copied."""
    arrays = []
    key: list[object] = []
    for name, output in outputs.items():
        if type(output) is _ndarray:
            key += (name, output.dtype, output.shape)
            arrays.append(output)
        elif type(output) is WireTensor:
            datatype, shape, raw = output
            key += (name, datatype, shape, raw.nbytes)
            arrays.append(raw)
        else:
            return (), []
    return tuple(key), arrays
