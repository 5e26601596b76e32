"""The responses of one batch on their way into shared memory and onto the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.memory import ALIGNMENT, lease_of, offset_in

if TYPE_CHECKING:
    from typing import Any

    from moonpool.stub.batch import Batch
    from moonpool.stub.regions import Regions
    from moonpool.stub.request import InferenceRequest
    from moonpool.stub.response import InferenceResponse
    from moonpool.stub.tensor import Tensor

INTERNAL, INVALID_ARG, UNAVAILABLE = 1, 3, 4


class Answer:
    """Collects what the model returned for one batch; used again for the next."""

    __slots__ = ("_batch", "_blocks", "_indices", "_model", "_regions", "_responses")

    def __init__(self, regions: Regions, batch: Batch, start: dict[str, Any]) -> None:
        self._regions = regions
        self._batch = batch
        self._model: str = start["args"]["model_name"]
        self._indices = {name: index for index, name in enumerate(start["outputs"])}
        self._blocks: list[list[int]] = []
        self._responses: list[list[Any]] = []

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
                outputs = self._wanted(request, response._outputs)
                try:
                    row = [self._place(outputs), response._parameters or None, None]
                    self._responses.append(row)
                except MoonpoolError as error:
                    self._fail(_CODES.get(error.code, INTERNAL), str(error))

    def fail(self, count: int, message: str) -> None:
        """The same error for all requests of the batch."""
        self._blocks.clear()
        self._responses.clear()
        for _ in range(count):
            self._fail(INTERNAL, message)

    def give(self) -> tuple[list[list[int]], list[list[Any]]]:
        """Blocks and responses for the wire; the next batch begins with none."""
        blocks, responses = self._blocks, self._responses
        self._blocks, self._responses = [], []
        return blocks, responses

    def _fail(self, code: int, message: str) -> None:
        clean = message[:65536].encode("utf-8", "replace").decode()
        self._responses.append([[], None, [code, clean]])

    def _wanted(self, request: InferenceRequest, outputs: list[Tensor]) -> list[Tensor]:
        wanted = request._requested_output_names
        if len(wanted) == len(self._indices):
            return outputs
        return [tensor for tensor in outputs if tensor._name in wanted]

    def _place(self, outputs: list[Tensor]) -> list[list[Any]]:
        rows = []
        copies: list[tuple[list[Any], np.ndarray, int]] = []
        total = 0
        for tensor in outputs:
            index = self._indices.get(tensor._name)
            if index is None:
                raise UnexpectedOutput(
                    f"unexpected inference output '{tensor._name}' for model '{self._model}'"
                )
            data: np.ndarray = tensor._array if tensor._wire is None else tensor._wire  # type: ignore[assignment]
            size_bytes = data.nbytes
            row = [index, tensor._datatype, list(tensor._shape), 0, 0, size_bytes]
            if data.base is None or not self._lies_there(data, row):
                copies.append((row, data, total))
                total += (size_bytes + ALIGNMENT - 1) & -ALIGNMENT
            rows.append(row)
        if copies:
            self._copy(copies, total)
        return rows

    def _copy(self, copies: list[tuple[list[Any], np.ndarray, int]], size_bytes: int) -> None:
        block = self._regions.allocate(size_bytes)
        number = len(self._blocks)
        self._blocks.append([block.region.id, block.offset, size_bytes])
        buffer = block.region.buffer
        for row, data, at in copies:
            row[3] = number
            row[4] = at
            np.ndarray(data.shape, data.dtype, buffer, block.offset + at)[...] = data

    def _lies_there(self, data: np.ndarray, row: list[Any]) -> bool:
        """Whether the bytes are in a region already: an input of this batch, or `empty`'s memory."""
        lease = lease_of(data)
        if lease is None:
            return False
        place: tuple[int, int] = lease.token  # type: ignore[assignment]
        if place not in self._batch.places:
            block = self._regions.arena.find(*place)
            if block is None or lease.give_back is not self._regions.give_back:
                return False  # an input that the model kept from an earlier batch
            block.holds += 1
        row[3] = len(self._blocks)
        row[4] = offset_in(lease, data)
        self._blocks.append([*place, lease.size])
        return True


class UnexpectedOutput(MoonpoolError):
    """The model returned an output that its configuration does not have."""


_CODES = {"INTERNAL": INTERNAL, "INVALID_ARG": INVALID_ARG, "UNAVAILABLE": UNAVAILABLE}
_NO_RESPONSE = (
    "the model returned None instead of a response for this request, "
    "and response senders are not offered yet"
)
