"""The runtime's end of one stub: a batch goes down, its answer comes up, and both are checked and placed.

One thread at a time drives a link: whoever holds its instance. The reactor only reads the control
channel (`runtime.control`) and hands blocks back through queues.
"""

from __future__ import annotations

import contextlib
from collections import deque
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.arena import Arena, Block
from moonpool.ipc.bytes_tensor import decode_bytes
from moonpool.ipc.conversation import Conversation, Overflow
from moonpool.ipc.errors import BadTensor, RemoteProtocolError
from moonpool.ipc.memory import ALIGNMENT, lease_of, offset_in
from moonpool.ipc.messages import Kind, Side
from moonpool.ipc.tensors import BYTES, DTYPES, ITEMSIZE
from moonpool.runtime.allocator import allocate
from moonpool.runtime.errors import CODES, ModelError
from moonpool.runtime.regions import new_region
from moonpool.runtime.request import NO_DETAILS, Response

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonpool.ipc.channel import Channel
    from moonpool.ipc.memory import Lease
    from moonpool.ipc.region import SharedRegion
    from moonpool.runtime.regions import CallerMemory
    from moonpool.runtime.request import InferenceRequest, Outcome, Placement

_EXECUTE = int(Kind.EXECUTE)
_ANSWER = int(Kind.ANSWER)

Place = tuple[int, int]


def _keep(_: object) -> None:
    """For leases that only have to keep their token alive."""


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
        self._send_region = send_region
        self._region_limit_bytes = region_limit_bytes
        self._caller_memory: CallerMemory | None = None
        self._output_names: list[str] = []
        self._arena = Arena(self._grow)
        self._request_regions: dict[int, SharedRegion] = {}
        self._announced: set[int] = set()
        self.response_regions: dict[int, SharedRegion] = {}
        # Places in response regions that callers let go of; they ride on the next EXECUTE.
        self.released: deque[object] = deque()
        self._release: Callable[[object], object] = self.released.append
        # Blocks of ours that were passed through to callers, who have let go of them.
        self._returned: deque[object] = deque()
        self._give_back: Callable[[object], object] = self._returned.append
        # What the model keeps of earlier batches.
        self._held: dict[Place, list[object]] = {}
        self._batch = 0
        self._lent: list[tuple[Place, object]] = []
        self._overflowed: Block | None = None
        self._idle: dict[int, int] = {}
        first = new_region(0, region_bytes, region_limit_bytes)
        self._arena.add(first)
        self._request_regions[first.id] = first
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
        self._caller_memory = caller_memory

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
        if self._returned:
            self._collect()
        released = self.take_released() if self.released else []
        try:
            blocks, rows = self._place(requests)
            self._batch += 1
            self.conversation.send(_EXECUTE, self._batch, released, blocks, rows)
        except BaseException:
            self.released.extend(released)
            self._end_loans(())
            raise

    def _place(
        self, requests: Sequence[InferenceRequest]
    ) -> tuple[list[list[int]], list[list[Any]]]:
        """Blocks and rows for the wire, with the inputs where they say."""
        blocks: list[list[int]] = []
        rows, total, copies = self._lay_out(requests, blocks)
        if total:
            block = self._arena.allocate(total)
            blocks[0] = [block.region.id, block.offset, total]
            self._lent.append(((block.region.id, block.offset), block))
            start, buffer = block.offset, block.region.buffer
            for data, at in copies:
                np.ndarray(data.shape, data.dtype, buffer, start + at)[...] = data
        else:
            blocks[0] = [next(iter(self._request_regions)), 0, 0]
        return blocks, rows

    def _lay_out(
        self, requests: Sequence[InferenceRequest], blocks: list[list[int]]
    ) -> tuple[list[list[Any]], int, list[tuple[np.ndarray, int]]]:
        """Rows for the wire, the size of the block for copies, and what to copy where in it.

        The rows of one input lie back to back across the requests of a batch, so that a model which wants
        them stacked has them stacked.
        """
        rows: list[list[Any]] = []
        for request in requests:
            details = request.details
            rows.append([[], None if details is NO_DETAILS else details])
        copies: list[tuple[np.ndarray, int]] = []
        blocks.append([0, 0, 0])
        total = 0
        for number in range(max(len(request.inputs) for request in requests)):
            total = (total + ALIGNMENT - 1) & -ALIGNMENT
            for request, row in zip(requests, rows, strict=True):
                if number >= len(request.inputs):
                    continue
                placement = request.inputs[number]
                index, datatype, shape, data, size_bytes = placement
                if data.base is not None and self._lies_there(placement, blocks, row[0]):
                    continue
                # Another request may have other inputs at this number.
                total += -total % data.itemsize
                row[0].append([index, datatype, shape, 0, total, size_bytes])
                if size_bytes:
                    copies.append((data, total))
                # A tensor of nothing takes a byte, so that its block is one that was lent.
                total += size_bytes or 1
        return rows, total, copies

    def _lies_there(
        self, placement: Placement, blocks: list[list[int]], rows: list[list[Any]]
    ) -> bool:
        """Whether the caller wrote this input into shared memory itself."""
        lease = lease_of(placement.data)
        if lease is None or self._caller_memory is None:
            return False
        found = self._caller_memory.find(lease)
        if found is None or not placement.data.flags.c_contiguous:
            return False
        region, block = found
        if region.id not in self._announced:
            self._send_region(region, Side.RUNTIME)
            self._announced.add(region.id)
        index, datatype, shape, data, size_bytes = placement
        rows.append([index, datatype, shape, len(blocks), offset_in(lease, data), size_bytes])
        blocks.append([region.id, block.offset, block.size_bytes])
        # The array is kept, and so its memory, until the model has let go of it.
        self._lent.append(((region.id, block.offset), lease))
        return True

    def _grow(self, needed_bytes: int) -> SharedRegion:
        region = new_region(self._arena.size_bytes, needed_bytes, self._region_limit_bytes)
        self._request_regions[region.id] = region
        self._send_region(region, Side.RUNTIME)
        return region

    def take_released(self) -> list[object]:
        """The places that callers let go of since the last time. From any thread."""
        released = []
        with contextlib.suppress(IndexError):
            while True:
                released.append(self.released.popleft())
        return released

    # Up

    def finish(self, requests: Sequence[InferenceRequest]) -> list[Outcome]:
        """Read the answer to the batch; one outcome for each of its requests, in order.

        Raises `PeerGone`, and `RemoteProtocolError` for an answer that is not to be believed.
        """
        message = self.conversation.receive()
        _, batch, held, released, blocks, responses = message
        if message[0] != _ANSWER or batch != self._batch or len(responses) != len(requests):
            raise RemoteProtocolError(
                f"an answer to batch {batch} with {len(responses)} responses; "
                f"batch {self._batch} has {len(requests)} requests"
            )
        leases = [self._open(*block) for block in blocks]
        outcomes = [
            self._outcome(response, leases, request)
            for response, request in zip(responses, requests, strict=True)
        ]
        self._end_loans(held)
        for place in released:
            self._end_loan(tuple(place))
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
        for place, lent in self._lent:
            if place == (region_id, offset):
                if isinstance(lent, Block):
                    if size_bytes > lent.size_bytes:
                        break
                    lent.holds += 1
                    return lent.region.lease(offset, size_bytes, self._give_back, lent)
                if size_bytes <= lent.size:  # type: ignore[attr-defined]
                    region = self._caller_memory.find(lent)[0]  # type: ignore[union-attr, index, arg-type]
                    return region.lease(offset, size_bytes, _keep, lent)
        raise RemoteProtocolError(
            f"a block of {size_bytes} bytes at {offset} in region {region_id}, "
            "which is not the stub's to answer from"
        )

    def _outcome(
        self, response: list[Any], leases: list[Lease], request: InferenceRequest
    ) -> Outcome:
        rows, parameters, error = response
        if error is not None:
            return ModelError(error[1], CODES[error[0]])
        names = self._output_names
        outputs = {}
        for index, datatype, shape, block, offset, size_bytes in rows:
            if index >= len(names) or block >= len(leases):
                raise RemoteProtocolError(f"output {index} in block {block}: there is none such")
            lease = leases[block]
            if offset + size_bytes > lease.size:
                raise RemoteProtocolError(f"output {names[index]!r} reaches beyond its block")
            if request.allocator is not None:
                raw = lease[offset : offset + size_bytes]
                array = allocate(request, names[index], datatype, tuple(shape), raw)
            elif datatype == BYTES:
                try:
                    array = decode_bytes(lease[offset : offset + size_bytes], shape)
                except BadTensor as bad:
                    raise RemoteProtocolError(f"output {names[index]!r}: {bad}") from bad
            else:
                if prod(shape) * ITEMSIZE[datatype] != size_bytes:
                    raise RemoteProtocolError(
                        f"output {names[index]!r} of shape {shape} has {size_bytes} bytes"
                    )
                try:
                    array = np.ndarray(shape, DTYPES[datatype], lease, offset)
                except (TypeError, ValueError) as bad:  # a huge dimension beside an empty one
                    raise RemoteProtocolError(f"output {names[index]!r}: {bad}") from bad
            outputs[names[index]] = array
        if len(outputs) != len(rows):
            raise RemoteProtocolError("an output that is given twice")
        return Response(outputs, parameters, request.details.request_id)

    # What is lent to the stub

    def _end_loans(self, held: Sequence[list[int]]) -> None:
        """The batch is over: its blocks are free, but for those that the model keeps."""
        lent, self._lent = self._lent, []
        kept = [tuple(place) for place in held]
        for place, what in lent:
            if place in kept:
                kept.remove(place)
                self._held.setdefault(place, []).append(what)
            elif type(what) is Block:
                self._arena.release(what)
        if self._overflowed is not None:
            self._arena.release(self._overflowed)
            self._overflowed = None
        if kept:
            raise RemoteProtocolError(f"the stub keeps block {kept[0]}, which it was not given")

    def _end_loan(self, place: Place) -> None:
        kept = self._held.get(place)
        if not kept:
            raise RemoteProtocolError(f"the stub releases block {place}, which it does not hold")
        what = kept.pop()
        if not kept:
            del self._held[place]
        if type(what) is Block:
            self._arena.release(what)

    def _collect(self) -> None:
        while self._returned:
            block: Block = self._returned.popleft()  # type: ignore[assignment]
            self._arena.release(block)

    # Messages too large for a packet

    def store(self, packet: bytes) -> tuple[int, int, int]:
        block = self._overflowed = self._arena.allocate(len(packet))
        memory = block.region.memory()
        memory[block.offset : block.offset + len(packet)] = packet
        return block.region.id, block.offset, len(packet)

    def load(self, region: int, offset: int, size_bytes: int) -> bytes:
        lease = self._open(region, offset, size_bytes)
        return lease.tobytes()

    # Memory that nobody needs for now

    def tidy(self, tell: Callable[[int], None]) -> None:
        """Give up request regions that were not used since the last time; `tell` tells the stub."""
        self._collect()
        idle = self._arena.idle()
        for region_id, uses in idle.items():
            if self._idle.get(region_id) == uses:
                self._arena.retire(region_id)
                tell(region_id)
                self._request_regions.pop(region_id).close()
        self._idle = idle
        memory = self._caller_memory
        gone = [key for key in self._announced if memory is None or key not in memory]
        for region_id in gone:
            self._announced.discard(region_id)
            tell(region_id)

    def size_bytes(self) -> int:
        """All shared memory of this stub."""
        answers = sum(region.size_bytes for region in list(self.response_regions.values()))
        return self._arena.size_bytes + answers

    def close(self) -> None:
        """Let go of all regions; responses that are out stay valid."""
        for region in [*self._request_regions.values(), *self.response_regions.values()]:
            region.close()
