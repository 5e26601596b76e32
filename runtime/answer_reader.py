"""What a stub answered, made into outcomes: described by layouts, lying in leases, both checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.bytes_tensor import decode_bytes
from moonpool.ipc.errors import CODES, BadTensor, RemoteProtocolError
from moonpool.ipc.memo import Memo
from moonpool.ipc.tensors import BYTES
from moonpool.ipc.tensors import CODES as DATATYPES
from moonpool.runtime.allocator import allocate
from moonpool.runtime.errors import ModelError
from moonpool.runtime.layout import AnswerLayout, read_answer
from moonpool.runtime.request import Response, Wire
from moonpool.runtime.reshaping import of_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.ipc.memory import Lease
    from moonpool.runtime.config import ModelConfig
    from moonpool.runtime.layout import Output
    from moonpool.runtime.request import InferenceRequest, Outcome
    from moonpool.runtime.reshaping import Reshaping

# What is remembered of answers: layouts that are small, so that none of it can take much memory.
_MEMORABLE_BYTES = 4096


class AnswerReader:
    """For one stub, whose model has outputs of these names. Any thread may call any method."""

    def __init__(self, *, is_confined: bool = False) -> None:
        """`is_confined`: what the model says of itself is not for everybody."""
        self._is_confined = is_confined
        self.output_names: list[str] = []
        # Of outputs that clients get in another shape.
        self._reshaped: dict[str, Reshaping] = {}
        # Whether any block may be one of a device.
        self.has_devices = False
        self._layouts: Memo[bytes, AnswerLayout] = Memo()

    def serve(self, config: ModelConfig) -> None:
        """From now on, answers are of a model of this configuration."""
        self.output_names = [tensor.name for tensor in config.outputs]
        self._reshaped = of_outputs(config)

    def layout(self, packed: bytes, count: int) -> AnswerLayout:
        """What a layout of so many responses says. Raises `RemoteProtocolError` for what no blocks could hold.

        The caller checks that there are no more and no fewer.
        """
        layout = self._layouts.get(packed)
        if layout is None:
            layout = read_answer(packed, self.output_names, count)
            if self._reshaped:
                layout = layout._replace(
                    responses=[[self._reshape(each) for each in row] for row in layout.responses]
                )
            if len(packed) <= _MEMORABLE_BYTES:
                self._layouts.keep(packed, layout)
        return layout

    def _reshape(self, output: Output) -> Output:
        reshaping = self._reshaped.get(output.name)
        return output if reshaping is None else output._replace(shape=reshaping.of(output.shape))

    @staticmethod
    def check_blocks(layout: AnswerLayout, blocks: Sequence[object]) -> None:
        """Before they are opened: raises `RemoteProtocolError` for blocks that no output lies in."""
        if len(blocks) > len(layout.least_bytes):
            raise RemoteProtocolError(
                f"{len(blocks)} blocks for outputs that lie in {len(layout.least_bytes)}"
            )

    @staticmethod
    def check(layout: AnswerLayout, leases: Sequence[Lease]) -> None:
        """Raises `RemoteProtocolError` unless these blocks hold what the layout says."""
        for block, least_bytes in layout.least_bytes.items():
            if block >= len(leases) or least_bytes > leases[block].size:
                raise RemoteProtocolError(layout.fault([lease.size for lease in leases]))

    def outcome(
        self,
        request: InferenceRequest,
        outputs: Sequence[Output],
        remark: list[Any] | None,
        leases: Sequence[Lease],
    ) -> Outcome:
        """A response with views on the leases, or the error that the model gave instead."""
        parameters = None
        if remark is not None:
            parameters, error = remark
            if error is not None:
                failure = ModelError(error[1], CODES[error[0]])
                failure.is_confined = self._is_confined
                return failure
        arrays: dict[str, Any] = {}
        if self.has_devices and request.is_for_host:
            leases = [self._on_host(lease) for lease in leases]
        if request.allocator is not None:
            try:
                arrays = _allocated(request, outputs, leases)
            except Exception as error:  # an allocator may raise anything
                return error
        elif self.has_devices:
            _view_anywhere(arrays, outputs, leases, wants_wire=request.wants_wire)
        else:
            _view(arrays, outputs, leases, wants_wire=request.wants_wire)
        details = request.details
        return Response(arrays, parameters, "" if details is None else details.request_id)

    def _on_host(self, lease: Any) -> Any:
        """The bytes of a block in ordinary memory, to which they are copied where they lie on a device.

        Stubs on devices were asked for ordinary memory. One that may be hostile is not waited for where it did
        not keep to that. Raises `RemoteProtocolError`.
        """
        if isinstance(lease, np.ndarray):
            return lease
        if self._is_confined:
            raise RemoteProtocolError("an output on a device, where ordinary memory was asked for")
        from moonpool.ipc.cuda.array import DeviceArray

        return DeviceArray.over(lease, 0, DATATYPES["UINT8"], (lease.size,)).to_host()


def _view(
    arrays: dict[str, Any], outputs: Sequence[Output], leases: Sequence[Lease], *, wants_wire: bool
) -> None:
    """Add the outputs as views on the leases."""
    for name, datatype, shape, dtype, block, offset, size_bytes in outputs:
        if wants_wire:
            raw = leases[block][offset : offset + size_bytes]
            arrays[name] = Wire(datatype, tuple(shape), raw)
        elif dtype is None:
            raw = leases[block][offset : offset + size_bytes]
            arrays[name] = _strings(name, raw, shape)
        else:
            arrays[name] = np.ndarray(shape, dtype, leases[block], offset)


def _view_anywhere(
    arrays: dict[str, Any], outputs: Sequence[Output], leases: Sequence[Any], *, wants_wire: bool
) -> None:
    """As `_view`, where some leases may be of devices."""
    from moonpool.ipc.cuda.array import DeviceArray

    for output in outputs:
        name, datatype, shape, _, block, offset, _ = output
        lease = leases[block]
        if isinstance(lease, np.ndarray):
            _view(arrays, [output], leases, wants_wire=wants_wire)
        elif datatype == BYTES:
            raise RemoteProtocolError(f"output {name!r} is BYTES and lies on a device")
        else:
            arrays[name] = DeviceArray.over(lease, offset, datatype, tuple(shape))


def _strings(name: str, raw: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    try:
        return decode_bytes(raw, shape)  # type: ignore[arg-type]
    except BadTensor as bad:
        raise RemoteProtocolError(f"output {name!r}: {bad}") from bad


def _allocated(
    request: InferenceRequest, outputs: Sequence[Output], leases: Sequence[Lease]
) -> dict[str, np.ndarray]:
    """The outputs in memory of the request's allocator. Raises what that raises."""
    if request.allocator is not None:
        request.allocator.start(request.userp)
    arrays = {}
    for name, datatype, shape, _, block, offset, size_bytes in outputs:
        raw = leases[block][offset : offset + size_bytes]
        arrays[name] = allocate(request, name, datatype, tuple(shape), raw)
    return arrays
