"""The runtime's end of one stub: a batch goes down, its answer comes up, and both are checked and placed.

One thread at a time drives a link: whoever holds its instance. The reactor only reads the control
channel (`runtime.control`) and hands blocks back through queues.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.bytes_tensor import decode_bytes
from moonpool.ipc.conversation import Conversation, Overflow
from moonpool.ipc.errors import CODES, BadTensor, RemoteProtocolError
from moonpool.ipc.memo import Memo
from moonpool.ipc.messages import MAX_PLACES, Kind, Side
from moonpool.runtime.allocator import allocate
from moonpool.runtime.errors import ModelError
from moonpool.runtime.layout import AnswerLayout, RequestLayout, lay_out, read_answer
from moonpool.runtime.loans import Loans
from moonpool.runtime.regions import new_region
from moonpool.runtime.request import Response

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonpool.ipc.channel import Channel
    from moonpool.ipc.memory import Lease
    from moonpool.ipc.region import SharedRegion
    from moonpool.runtime.layout import Output
    from moonpool.runtime.regions import CallerMemory
    from moonpool.runtime.request import InferenceRequest, Outcome, Shapes

_EXECUTE = int(Kind.EXECUTE)
# What is remembered of batches: layouts that are small, so that none of it can take much memory.
_MEMORABLE_REQUESTS = 128
_MEMORABLE_BYTES = 4096
_NO_REMARKS: list[Any] = [None]

Place = tuple[int, int]


class Link(Overflow):
    """Places requests, sends batches, checks answers."""

    def __init__(
        self,
        channel: Channel,
        send_region: Callable[[SharedRegion, Side], None],
        *,
        region_bytes: int,
        region_limit_bytes: int | None,
    ) -> None:
        self.conversation = Conversation(channel, Side.RUNTIME, self)
        self._output_names: list[str] = []
        self._layouts: Memo[tuple[Shapes, ...], RequestLayout] = Memo()
        self._answers: Memo[bytes, AnswerLayout] = Memo()
        self.response_regions: dict[int, SharedRegion] = {}
        # Places in response regions that callers let go of; they ride on the next EXECUTE.
        self.released: deque[object] = deque()
        self._release: Callable[[object], object] = self.released.append
        self._batch = 0
        first = new_region(0, region_bytes, region_limit_bytes)
        self.loans = Loans(send_region, first, region_limit_bytes)
        try:
            answers = new_region(0, region_bytes, region_limit_bytes)
            self.response_regions[answers.id] = answers
            send_region(first, Side.RUNTIME)
            send_region(answers, Side.STUB)
        except BaseException:
            self.close()
            raise

    def serve(self, output_names: list[str], caller_memory: CallerMemory) -> None:
        """From now on, batches are for a model with these outputs."""
        self._output_names = output_names
        self.loans.serve(caller_memory)

    def fileno(self) -> int:
        """Readable when `wait` will not block."""
        return self.conversation.channel.fileno()

    def wait(self) -> None:
        """Block until the answer, or the end of the stub, can be read. Interruptible without loss."""
        self.conversation.channel.wait()

    def is_received(self) -> bool:
        """Whether the answer was taken from the socket, by a `wait` that a signal handler ended."""
        return self.conversation.channel.has_received

    # Down

    def execute(self, requests: Sequence[InferenceRequest]) -> None:
        """Place the inputs of a batch and send it; does not wait for the answer.

        Raises `OutOfMemory` (nothing was sent), `PeerGone`, `RemoteProtocolError`.
        """
        # The first block is for copies; where nothing is copied it is empty, in a region that there is.
        blocks = [[self.loans.first_region, 0, 0]]
        released = self.take_released()
        try:
            elsewhere = self._find_shared(requests, blocks)
            layout = self._lay_out(requests, elsewhere)
            if layout.size_bytes:
                blocks[0] = self._copy(requests, layout)
            details: list[object] | None = [request.details for request in requests]
            if not any(details):  # type: ignore[arg-type]
                details = None
            self._batch += 1
            self.conversation.send(_EXECUTE, self._batch, released, blocks, layout.packed, details)
        except BaseException:
            self.released.extend(released)
            self.loans.end_batch(())
            raise

    def _lay_out(
        self, requests: Sequence[InferenceRequest], elsewhere: dict[tuple[int, int], Place]
    ) -> RequestLayout:
        batch = tuple([request.shapes for request in requests])
        if elsewhere:
            return lay_out(batch, elsewhere)
        layout = self._layouts.get(batch)
        if layout is None:
            layout = lay_out(batch, elsewhere)
            if len(batch) <= _MEMORABLE_REQUESTS and all(shapes.is_shared for shapes in batch):
                self._layouts.keep(batch, layout)
        return layout

    def _copy(self, requests: Sequence[InferenceRequest], layout: RequestLayout) -> list[int]:
        block = self.loans.allocate(layout.size_bytes)
        region, start = block.region, block.offset
        for i, number, offset in layout.copies:
            region.write(start + offset, requests[i].arrays[number])
        return [region.id, start, layout.size_bytes]

    def _find_shared(
        self, requests: Sequence[InferenceRequest], blocks: list[list[int]]
    ) -> dict[tuple[int, int], Place]:
        """The inputs that callers wrote into shared memory themselves; adds the blocks they lie in."""
        found: dict[tuple[int, int], Place] = {}
        for i, request in enumerate(requests):
            if request.has_views:
                for number, array in enumerate(request.arrays):
                    lent = self.loans.lend(array)
                    if lent is not None:
                        found[i, number] = len(blocks), lent[1]
                        blocks.append(lent[0])
        return found

    def take_released(self, most: int = MAX_PLACES) -> list[object]:
        """The places that callers let go of, at most so many of them. From any thread."""
        released: list[object] = []
        try:
            while self.released and len(released) < most:
                released.append(self.released.popleft())
        except IndexError:  # another thread took the last one
            return released
        return released

    # Up

    def finish(self, requests: Sequence[InferenceRequest]) -> list[Outcome]:
        """Read the answer to the batch; one outcome for each of its requests, in order.

        Raises `PeerGone`, and `RemoteProtocolError` for an answer that is not to be believed.
        """
        _, batch, held, released, blocks, packed, remarks = self.conversation.receive()
        layout = self._answers.get(packed)
        if layout is None:
            layout = read_answer(packed, self._output_names)
            if len(packed) <= _MEMORABLE_BYTES:
                self._answers.keep(packed, layout)
        count = len(layout.responses)
        if batch != self._batch or count != len(requests):
            raise RemoteProtocolError(
                f"an answer to batch {batch} with {count} responses; "
                f"batch {self._batch} has {len(requests)} requests"
            )
        leases = [self._open(*block) for block in blocks]
        for block, least_bytes in layout.least_bytes.items():
            if block >= len(leases) or least_bytes > leases[block].size:
                raise RemoteProtocolError(layout.fault([lease.size for lease in leases]))
        if remarks is None:
            remarks = _NO_REMARKS * count
        elif len(remarks) != count:
            raise RemoteProtocolError(f"{len(remarks)} remarks on {count} responses")
        outcomes = [
            self._outcome(request, outputs, remark, leases)
            for request, outputs, remark in zip(requests, layout.responses, remarks, strict=True)
        ]
        self.loans.end_batch(held)
        if released:
            self.loans.take_back(released)
        return outcomes

    def _open(self, region_id: int, offset: int, size_bytes: int) -> Lease:
        """A lease on a block of an answer: in a response region, or passed through from the request."""
        region = self.response_regions.get(region_id)
        if region is not None:
            if offset + size_bytes > region.size_bytes:
                raise RemoteProtocolError(
                    f"a block of {size_bytes} bytes at {offset} in region {region_id}, "
                    f"which has {region.size_bytes}"
                )
            return region.lease(offset, size_bytes, self._release, (region_id, offset))
        return self.loans.open(region_id, offset, size_bytes)

    @staticmethod
    def _outcome(
        request: InferenceRequest,
        outputs: Sequence[Output],
        remark: list[Any] | None,
        leases: Sequence[Lease],
    ) -> Outcome:
        parameters = None
        if remark is not None:
            parameters, error = remark
            if error is not None:
                return ModelError(error[1], CODES[error[0]])
        arrays: dict[str, np.ndarray] = {}
        if request.allocator is not None:
            try:
                arrays = _allocated(request, outputs, leases)
            except Exception as error:  # an allocator may raise anything
                return error
        else:
            for name, _, shape, dtype, block, offset, size_bytes in outputs:
                if dtype is None:
                    raw = leases[block][offset : offset + size_bytes]
                    arrays[name] = _strings(name, raw, shape)
                else:
                    arrays[name] = np.ndarray(shape, dtype, leases[block], offset)
        details = request.details
        return Response(arrays, parameters, "" if details is None else details.request_id)

    # Messages too large for a packet

    def store(self, packet: bytes) -> tuple[int, int, int]:
        block = self.loans.allocate(len(packet))
        memory = block.region.memory()
        memory[block.offset : block.offset + len(packet)] = packet
        return block.region.id, block.offset, len(packet)

    def load(self, region: int, offset: int, size_bytes: int) -> bytes:
        lease = self._open(region, offset, size_bytes)
        return lease.tobytes()

    # Memory that nobody needs for now

    def tidy(self, tell: Callable[[int], None]) -> None:
        """Give up request regions that were not used since the last time; `tell` tells the stub."""
        self.loans.tidy(tell)

    def size_bytes(self) -> int:
        """All shared memory of this stub."""
        answers = sum(region.size_bytes for region in list(self.response_regions.values()))
        return self.loans.size_bytes + answers

    def close(self) -> None:
        """Let go of all regions and of what callers lent; responses that are out stay valid."""
        self.loans.close()
        for region in list(self.response_regions.values()):
            region.close()


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
