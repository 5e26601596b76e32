"""The responses of one batch on their way into shared memory and onto the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.codec import encode
from moonpool.ipc.errors import CODES, LocalProtocolError, MoonpoolError
from moonpool.ipc.memo import Memo
from moonpool.ipc.memory import ALIGNMENT, lease_of, offset_in
from moonpool.ipc.messages import MAX_PARAMETERS
from moonpool.ipc.tensors import MAX_DIMS

if TYPE_CHECKING:
    from typing import Any

    from moonpool.ipc.arena import Block
    from moonpool.ipc.memory import Lease
    from moonpool.stub.batch import Batch
    from moonpool.stub.regions import Regions
    from moonpool.stub.request import InferenceRequest
    from moonpool.stub.response import InferenceResponse
    from moonpool.stub.tensor import Tensor

INTERNAL, UNAVAILABLE = CODES.index("INTERNAL"), CODES.index("UNAVAILABLE")
_MEMORABLE_BYTES = 4096


class _Plan:
    """How the outputs of one response are sent. One object for all of the same names and shapes."""

    __slots__ = ("block_count", "is_shared", "offsets", "rows", "size_bytes")

    def __init__(self, rows: list[list[Any]], block_count: int, *, is_shared: bool) -> None:
        # As they travel, but with the block's number among those of the response.
        self.rows = rows
        self.block_count = block_count
        self.is_shared = is_shared
        # Of the block that outputs are copied to, and where in it each goes.
        self.size_bytes = 0
        self.offsets: list[int] = []


class Answer:
    """Collects what the model returned for one batch; used again for the next."""

    __slots__ = (
        "_batch",
        "_blocks",
        "_has_remarks",
        "_indices",
        "_layouts",
        "_model",
        "_plans",
        "_regions",
        "_remarks",
        "_responses",
    )

    def __init__(self, regions: Regions, batch: Batch, start: dict[str, Any]) -> None:
        self._regions = regions
        self._batch = batch
        self._model: str = start["args"]["model_name"]
        self._indices = {name: index for index, name in enumerate(start["outputs"])}
        self._plans: Memo[tuple[object, ...], _Plan] = Memo()
        self._layouts: Memo[tuple[_Plan, ...], bytes] = Memo()
        self._blocks: list[list[int]] = []
        self._responses: list[_Plan] = []
        self._remarks: list[list[Any] | None] = []
        self._has_remarks = False

    def take(
        self, requests: list[InferenceRequest], responses: list[InferenceResponse | None]
    ) -> None:
        """Place the outputs of each response; one that cannot be placed becomes an error."""
        for request, response in zip(requests, responses):
            if response is None:
                self._fail(UNAVAILABLE, _NO_RESPONSE)
            elif response._error is not None:
                self._fail(int(response._error.code()), response._error.message())
            else:
                try:
                    if response._parameters:
                        _check_parameters(response._parameters)
                    plan = self._place(self._wanted(request, response._outputs))
                except MoonpoolError as error:
                    self._fail(CODES.index(error.code), str(error))
                else:
                    self._add(plan, [response._parameters, None] if response._parameters else None)

    def fail(self, count: int, message: str) -> None:
        """The same error for all requests of the batch."""
        for _ in range(count):
            self._fail(INTERNAL, message)

    def give(self) -> tuple[list[list[int]], bytes, list[list[Any] | None] | None]:
        """Blocks, layout and remarks for the wire; the next batch begins with none."""
        blocks, responses = self._blocks, tuple(self._responses)
        remarks = self._remarks if self._has_remarks else None
        self._blocks, self._responses, self._remarks = [], [], []
        self._has_remarks = False
        layout = self._layouts.get(responses)
        if layout is None:
            layout = _packed(responses)
            if len(layout) <= _MEMORABLE_BYTES and all(plan.is_shared for plan in responses):
                self._layouts.keep(responses, layout)
        return blocks, layout, remarks

    def _fail(self, code: int, message: str) -> None:
        clean = message[:65536].encode("utf-8", "replace").decode()
        self._add(_NO_OUTPUTS, [None, [code, clean]])

    def _add(self, plan: _Plan, remark: list[Any] | None) -> None:
        self._responses.append(plan)
        self._remarks.append(remark)
        if remark is not None:
            self._has_remarks = True

    def _wanted(self, request: InferenceRequest, outputs: list[Tensor]) -> list[Tensor]:
        wanted = request._requested_output_names
        if len(wanted) == len(self._indices):
            return outputs
        return [tensor for tensor in outputs if tensor._name in wanted]

    def _place(self, outputs: list[Tensor]) -> _Plan:
        """Put the outputs where the runtime can read them."""
        key: list[object] = []
        arrays: list[np.ndarray] = []
        for tensor in outputs:
            array = tensor._array
            # Strings have no fixed size, and what lies in shared memory already is not copied.
            if array is None or (array.base is not None and lease_of(array) is not None):
                return self._place_apart(outputs)
            arrays.append(array)
            key.append((tensor._name, tensor._datatype, tensor._shape))
        known = tuple(key)
        plan = self._plans.get(known)
        if plan is None:
            rows = [self._row(tensor, array) for tensor, array in zip(outputs, arrays)]
            _check_names(outputs)
            plan = _Plan(rows, 1 if rows else 0, is_shared=True)
            _lay_out(plan, rows, 0)
            self._plans.keep(known, plan)
        if arrays:
            self._copy(arrays, plan)
        return plan

    def _place_apart(self, outputs: list[Tensor]) -> _Plan:
        """As `_place`, for outputs of which some may lie in a region already."""
        rows: list[list[Any]] = []
        copied: list[list[Any]] = []
        arrays: list[np.ndarray] = []
        blocks: list[list[int]] = []
        passed_on: list[Block] = []
        for tensor in outputs:
            data: np.ndarray = tensor._array if tensor._wire is None else tensor._wire  # type: ignore[assignment]
            row = self._row(tensor, data)
            rows.append(row)
            lease = self._shared(data, passed_on)
            if lease is None:
                copied.append(row)
                arrays.append(data)
            else:
                row[3:5] = len(blocks), offset_in(lease, data)
                blocks.append([*lease.token, lease.size])  # type: ignore[misc]
        _check_names(outputs)
        plan = _Plan(rows, len(blocks) + (1 if copied else 0), is_shared=False)
        _lay_out(plan, copied, len(blocks))
        # Where there is no room for the copies, nothing has been done yet.
        block = self._regions.allocate(plan.size_bytes) if copied else None
        for each in passed_on:
            each.holds += 1
        self._blocks += blocks
        if block is not None:
            self._fill(block, arrays, plan)
        return plan

    def _row(self, tensor: Tensor, data: np.ndarray) -> list[Any]:
        index = self._indices.get(tensor._name)
        if index is None:
            raise BadResponse(
                f"unexpected inference output '{tensor._name}' for model '{self._model}'"
            )
        if len(tensor._shape) > MAX_DIMS:
            raise BadResponse(
                f"output '{tensor._name}' has {len(tensor._shape)} dimensions, and {MAX_DIMS} is "
                "the most"
            )
        return [index, tensor._datatype, list(tensor._shape), 0, 0, data.nbytes]

    def _copy(self, arrays: list[np.ndarray], plan: _Plan) -> None:
        self._fill(self._regions.allocate(plan.size_bytes), arrays, plan)

    def _fill(self, block: Block, arrays: list[np.ndarray], plan: _Plan) -> None:
        region, start = block.region, block.offset
        self._blocks.append([region.id, start, plan.size_bytes])
        for data, offset in zip(arrays, plan.offsets):
            region.write(start + offset, data)

    def _shared(self, data: np.ndarray, passed_on: list[Block]) -> Lease | None:
        """The lease that an array lies in: an input of this batch, or memory that `empty` gave.

        Blocks of ours are added to `passed_on`: the runtime is going to hold them, too.
        """
        lease = lease_of(data)
        if lease is None:
            return None
        place: tuple[int, int] = lease.token  # type: ignore[assignment]
        if place not in self._batch.places:
            block = self._regions.arena.find(*place)
            if block is None or lease.give_back is not self._regions.give_back:
                return None  # an input that the model kept from an earlier batch
            passed_on.append(block)
        return lease


def _lay_out(plan: _Plan, rows: list[list[Any]], block: int) -> None:
    """Let these rows of a plan lie one behind another in its block of that number."""
    for row in rows:
        row[3:5] = block, plan.size_bytes
        plan.offsets.append(plan.size_bytes)
        plan.size_bytes += (row[5] + ALIGNMENT - 1) & -ALIGNMENT


def _packed(responses: tuple[_Plan, ...]) -> bytes:
    """The layout of an answer: the blocks of each response are behind those of the one before."""
    layout = []
    first = 0
    for plan in responses:
        layout.append([[*row[:3], first + row[3], *row[4:]] for row in plan.rows])
        first += plan.block_count
    return encode(*layout)


def _check_names(outputs: list[Tensor]) -> None:
    names = {tensor._name for tensor in outputs}
    if len(names) != len(outputs):
        given = [tensor._name for tensor in outputs]
        twice = next(name for name in given if given.count(name) > 1)
        raise BadResponse(f"output '{twice}' is given twice")


def _check_parameters(parameters: dict[str, Any]) -> None:
    if len(parameters) > MAX_PARAMETERS:
        raise BadResponse(
            f"the response has {len(parameters)} parameters, and {MAX_PARAMETERS} is the most"
        )
    try:
        encode(parameters)
    except LocalProtocolError as error:
        raise BadResponse(f"the parameters of the response: {error}") from error


class BadResponse(MoonpoolError):
    """The model returned what its configuration, or no message to the runtime, has room for."""


_NO_OUTPUTS = _Plan([], 0, is_shared=True)
_NO_RESPONSE = (
    "the model returned None instead of a response for this request, "
    "and response senders are not offered yet"
)
