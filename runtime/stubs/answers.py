"""Makes outcomes of what a stub answered, and finds the requests that its responses are for.

Theory of operation. `AnswerReader` belongs to one stub. The driver of a batch uses it for ANSWER and the reactor's
thread for RESPONSES, at the same time. It has no lock: it only reads what `serve` has set before the first batch, and
its `Memo` of layouts may be used by many threads. An answer is checked in this order: the layout by itself, the number
of blocks, each block when it is opened, and then if each block holds what the layout says. Nothing is copied, and no
array is made, before that.

`Replies` is where the driver and the reactor meet, so it has a lock. Responses to a request may come before the answer
to its batch and after it. Before it, the batch in `executing` has the request, and `ended` notes those that had their
last response. The answer then moves the requests that stay open to `_open`. A request that had its last response
before must be OPEN in the answer, since an outcome there would be a second one. Nothing is called under the lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moonpool.ipc.errors import CODES, BadTensor, RemoteProtocolError
from moonpool.ipc.memo import Memo
from moonpool.ipc.memory import Lease
from moonpool.ipc.messages import ANSWERED, OPEN
from moonpool.ipc.port import ExecutingBatch
from moonpool.ipc.tensors import BYTES, decode_bytes
from moonpool.ipc.tensors import CODES as DATATYPES
from moonpool.runtime.errors import ModelError
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import Details, InferenceRequest, Outcome, Response, WireTensor, allocate
from moonpool.runtime.model.reshaping import Reshaping, of_outputs
from moonpool.runtime.stubs.layout import AnswerLayout, OutputLayout, read_answer
from moonpool.runtime.stubs.start_message import output_names

# Only small layouts are remembered, so that they cannot take much memory.
_MEMORABLE_BYTES = 4096
_array = np.ndarray
_BYTE = np.dtype("u1")


class AnswerReader:
    """Reads the answers of one stub. Any thread may call any method."""

    def __init__(self, *, is_confined: bool = False) -> None:
        """`is_confined`: the texts of the model's errors are not for clients."""
        self._is_confined = is_confined
        self.output_names: list[str] = []
        # The outputs that clients get in another shape, by name.
        self._reshaped: dict[str, Reshaping] = {}
        # True once a block may lie on a device.
        self.has_devices = False
        self._layouts: Memo[bytes, AnswerLayout] = Memo()

    def serve(self, config: ModelConfig) -> None:
        """Set the configuration of the model before the first answer."""
        self.output_names = output_names(config)
        self._reshaped = of_outputs(config)

    @property
    def is_plain(self) -> bool:
        """True if responses are made of an answer as it is."""
        return not (self._reshaped or self.has_devices)

    def layout(self, packed: bytes, count: int) -> AnswerLayout:
        """Read a layout of at most `count` responses. Raises `RemoteProtocolError` for tensors that no block could
        hold.

        The caller checks the number of responses.
        """
        layout = self._layouts.get(packed)
        if layout is None:
            layout = read_answer(packed, self.output_names, count)
            if self._reshaped:
                reshaped = [[self._reshape(each) for each in row] for row in layout.responses]
                layout = AnswerLayout(reshaped, layout.least_bytes)
            if len(packed) <= _MEMORABLE_BYTES:
                self._layouts.keep(packed, layout)
        return layout

    def _reshape(self, output: OutputLayout) -> OutputLayout:
        reshaping = self._reshaped.get(output.name)
        if reshaping is None:
            return output
        return output._replace(shape=tuple(reshaping.of(output.shape)))

    @staticmethod
    def check_blocks(layout: AnswerLayout, blocks: Sequence[object]) -> None:
        """Raise `RemoteProtocolError` for blocks that no output lies in. To be called before they are opened."""
        if len(blocks) > len(layout.least_bytes):
            raise RemoteProtocolError(f"{len(blocks)} blocks for outputs that lie in {len(layout.least_bytes)}")

    @staticmethod
    def check(layout: AnswerLayout, leases: Sequence[Lease]) -> None:
        """Raise `RemoteProtocolError` unless these blocks hold what the layout says."""
        for block, least_bytes in layout.least_bytes.items():
            if block >= len(leases) or least_bytes > leases[block].size:
                raise RemoteProtocolError(layout.fault([lease.size for lease in leases]))

    def outcome(
        self,
        request: InferenceRequest,
        outputs: Sequence[OutputLayout],
        remark: list[Any] | None,
        leases: Sequence[Lease],
    ) -> Outcome:
        """Make a response with views of the leases, or return the error that the model gave instead."""
        parameters = None
        if remark is not None:
            parameters, error = remark
            if error is not None:
                failure = ModelError(error[1], CODES[error[0]])
                failure.is_confined = self._is_confined
                return failure
        if self.has_devices and request.is_for_host:
            leases = [self._on_host(lease) for lease in leases]
        if request.allocator is not None:
            try:
                arrays = _allocated(request, outputs, leases)
            except Exception as error:  # an allocator may raise anything
                return error
        elif self.has_devices:
            arrays = _view_anywhere(outputs, leases, wants_wire=request.wants_wire)
        else:
            arrays = _view(outputs, leases, wants_wire=request.wants_wire)
        details = request.details
        return Response(arrays, parameters, "" if details is None else details.request_id)

    def _on_host(self, lease: Any) -> Any:
        """Return the bytes of a block in ordinary memory, copied if the block lies on a device.

        The copy waits for the stub's work on the device, and a hostile stub could let it wait for ever. So an answer of
        a contained model that was asked for ordinary memory and lies on a device is refused with `RemoteProtocolError`.
        """
        if isinstance(lease, np.ndarray):
            return lease
        if self._is_confined:
            raise RemoteProtocolError("an output on a device, where ordinary memory was asked for")
        from moonpool.ipc.cuda.array import DeviceArray

        return DeviceArray.over(lease, 0, DATATYPES["UINT8"], (lease.size,)).to_host()


def _view(outputs: Sequence[OutputLayout], leases: Sequence[Lease], *, wants_wire: bool) -> dict[str, Any]:
    """Return the outputs as views on the leases."""
    arrays: dict[str, Any] = {}
    for name, datatype, shape, dtype, block, offset, size_bytes in outputs:
        if dtype is None or wants_wire:
            # No slice, which would be a `Lease` without a block.
            raw = _array((size_bytes,), _BYTE, leases[block], offset)
            if wants_wire:
                arrays[name] = WireTensor(datatype, shape, raw)
            else:
                arrays[name] = _strings(name, raw, shape)
        else:
            arrays[name] = _array(shape, dtype, leases[block], offset)
    return arrays


def _view_anywhere(outputs: Sequence[OutputLayout], leases: Sequence[Any], *, wants_wire: bool) -> dict[str, Any]:
    """Return the outputs as `_view` does. Some leases may be of devices."""
    from moonpool.ipc.cuda.array import DeviceArray

    arrays: dict[str, Any] = {}
    for output in outputs:
        name, datatype, shape, _, block, offset, _ = output
        lease = leases[block]
        if isinstance(lease, np.ndarray):
            arrays.update(_view([output], leases, wants_wire=wants_wire))
        elif datatype == BYTES:
            raise RemoteProtocolError(f"output {name!r} is BYTES and lies on a device")
        else:
            arrays[name] = DeviceArray.over(lease, offset, datatype, shape)
    return arrays


def _strings(name: str, raw: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    try:
        return decode_bytes(raw, shape)  # type: ignore[arg-type]
    except BadTensor as bad:
        raise RemoteProtocolError(f"output {name!r}: {bad}") from bad


def _allocated(
    request: InferenceRequest, outputs: Sequence[OutputLayout], leases: Sequence[Lease]
) -> dict[str, np.ndarray]:
    """Copy the outputs into memory of the request's allocator. Raises what the allocator raises."""
    if request.allocator is not None:
        request.allocator.start(request.userp)
    arrays: dict[str, Any] = {}
    for name, datatype, shape, _, block, offset, size_bytes in outputs:
        raw = leases[block][offset : offset + size_bytes]
        if request.states is not None and name in request.states.hidden:
            # The runtime takes it; the caller has no memory for it.
            arrays[name] = WireTensor(datatype, shape, raw)
        else:
            arrays[name] = allocate(request, name, datatype, shape, raw)
    return arrays


Key = tuple[int, int]
_NO_BATCH: tuple[int, Sequence[InferenceRequest]] = (0, ())


class Replies(ExecutingBatch):
    """Finds the request that a response is for. Any thread may call any method."""

    executing: tuple[int, Sequence[InferenceRequest]]

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Key, InferenceRequest] = {}
        self._keys: dict[InferenceRequest, Key] = {}

    def begin(self, batch: int, requests: Sequence[InferenceRequest]) -> None:
        """Note the batch that is about to be sent."""
        self.executing = (batch, requests)

    def answered(self, states: Sequence[int] | None) -> None:
        """Note the answer to the batch. `states` has one state for each request, None if all are answered.

        Raises `RemoteProtocolError` if a request was answered twice.
        """
        with self.lock:
            batch, requests = self.executing
            self.executing = _NO_BATCH
            if states is None and not self.ended:
                return
            ended, self.ended = self.ended, set()
            for index, request in enumerate(requests):
                state = ANSWERED if states is None else states[index]
                if state == OPEN and index not in ended:
                    self._open[batch, index] = request
                    self._keys[request] = (batch, index)
                elif state != OPEN and index in ended:
                    raise RemoteProtocolError(f"request {index} was answered twice")

    def find(self, batch: int, index: int, *, is_last: bool) -> InferenceRequest:
        """Return the request that a response is for. `is_last`: no response may follow for it.

        Raises `RemoteProtocolError` if no such request waits for a response.
        """
        with self.lock:
            request = self._open.get((batch, index))
            if request is not None:
                if is_last:
                    del self._open[batch, index], self._keys[request]
                return request
            executing, requests = self.executing
            if batch != executing or index >= len(requests) or index in self.ended:
                raise RemoteProtocolError(f"a response to request {index} of batch {batch}, which waits for none")
            if is_last:
                self.ended.add(index)
            return requests[index]

    @property
    def batch(self) -> int:
        """The number of the batch that is executing, 0 for none."""
        return self.executing[0]

    @property
    def deserted(self) -> int:
        """The number of the batch that is executing if the callers of all requests here have left, else 0."""
        with self.lock:
            batch, requests = self.executing
            some_wait = any(not each.left for each in (*requests, *self._open.values()))
            return 0 if some_wait else batch

    def key_of(self, request: InferenceRequest) -> Key | None:
        """Return batch and index of a request that is executing or open, None for any other."""
        with self.lock:
            batch, requests = self.executing
            for index, each in enumerate(requests):
                if each is request and index not in self.ended:
                    return batch, index
            return self._keys.get(request)

    def watch(self, asked: InferenceRequest, model: Model, details: Details) -> None:
        """Trace `asked`, a request that the model in the stub made to `model`, if it was made for a traced request.

        `details` carry the context of the trace that the model hands on.
        """
        with self.lock:
            here = [*self.executing[1], *self._open.values()]
        for request in here:
            if request.trace is not None and request.trace.context == details.trace:
                request.trace.child(model, details.request_id).follow(asked)
                return

    def close(self) -> None:
        """Forget the requests. Their arrays may be large, and belong to their callers."""
        with self.lock:
            self.executing = _NO_BATCH
            self._open.clear()
            self._keys.clear()
