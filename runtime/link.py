"""The runtime's end of one stub: a batch goes down, its answer comes up, and both are checked and placed.

One thread at a time drives a link: whoever holds its instance. The reactor only reads the control
channel (`runtime.control`) and hands blocks back through queues.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.conversation import Conversation, Overflow
from moonpool.ipc.errors import CudaUnavailable, RemoteProtocolError
from moonpool.ipc.memo import Memo
from moonpool.ipc.messages import MAX_PLACES, MAX_STORED_BYTES, OPEN, RESCHEDULED, Kind, Side
from moonpool.ipc.region import SharedRegion
from moonpool.runtime import device_inputs
from moonpool.runtime.answer_reader import AnswerReader
from moonpool.runtime.details import outputs_told
from moonpool.runtime.layout import NOTHING, RequestLayout, lay_out
from moonpool.runtime.loans import Loans
from moonpool.runtime.replies import Replies
from moonpool.runtime.request import AGAIN, LATER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from moonpool.ipc.channel import Channel
    from moonpool.ipc.cuda.region import DeviceRegion
    from moonpool.ipc.memory import Lease
    from moonpool.runtime.allotment import RegionSource
    from moonpool.runtime.config import ModelConfig
    from moonpool.runtime.lanes import Lanes
    from moonpool.runtime.regions import CallerMemory
    from moonpool.runtime.request import Answer, InferenceRequest, Outcome

_EXECUTE = int(Kind.EXECUTE)
# What is remembered of batches: layouts that are small, so that none of it can take much memory.
_MEMORABLE_REQUESTS = 128
_MEMORABLE_BYTES = 4096
_NO_REMARKS: list[Any] = [None]

Place = tuple[int, int]
_DEFERRALS: dict[int, Answer] = {OPEN: LATER, RESCHEDULED: AGAIN}


class Link(Overflow):
    """Places requests, sends batches, checks answers."""

    def __init__(
        self,
        channel: Channel,
        send_region: Callable[[Any, Side], None],
        retire: Callable[[int], None],
        *,
        region_bytes: int,
        requests: RegionSource,
        answers: RegionSource,
        is_private: bool = False,
        is_loaded: bool = False,
        is_shared: bool = False,
        make_lanes: Callable[[], Lanes] | None = None,
    ) -> None:
        """`retire` tells the stub to forget a region. `requests` and `answers` make its regions; both
        are owned from now on. `is_private` says that no other stub may see this one's memory,
        nor this one theirs; and that what its model says of errors is not for everybody.

        `is_loaded`: the stub takes batches from the beginning. `is_shared`: others send it batches, too.
        `make_lanes`, if the stub may handle memory of devices, is called when it first does.
        """
        self.send_region = send_region
        self._make_lanes = make_lanes
        self._opening = threading.Lock()
        # None until memory of devices is handled.
        self.lanes: Lanes | None = None
        # Whether its model is on a GPU, and leaves its outputs there unless it is told otherwise.
        self.is_on_gpu = False
        self._is_shared = is_shared
        after = Kind.LOADED if is_loaded else None
        self.conversation = Conversation(channel, Side.RUNTIME, self, after)
        self._reader = AnswerReader(is_confined=is_private)
        self.replies = Replies()
        self._layouts: Memo[tuple[object, ...], RequestLayout] = Memo()
        self.response_regions: dict[int, SharedRegion] = {}
        # The same on devices.
        self.device_answers: dict[int, DeviceRegion] = {}
        # Places in response regions that callers let go of; they ride on the next EXECUTE.
        self.released: deque[object] = deque()
        self._release: Callable[[object], object] = self.released.append
        # Blocks of requests that the model kept, and let go of while it had nothing to answer. The answer
        # that says that it keeps them may not have been read yet.
        self._let_go: deque[Place] = deque()
        self._batch = 0
        # Rows of EXECUTE: where outputs of the batch go.
        self._targets: list[list[int]] = []
        # The batch that was sent last, and when the stub came to it, as far as it has said so.
        self._begun: tuple[int, int | None] = (0, None)
        self._answers = answers
        first, lanes = requests.region(0, region_bytes), self.open_lanes
        self.loans = Loans(send_region, first, requests, retire, is_private=is_private, lanes=lanes)
        self._send_first(region_bytes)

    def _send_first(self, region_bytes: int) -> None:
        try:
            region = self.new_answers(0, region_bytes)
            self.response_regions[region.id] = region
            # In this order: a stub that has the memory of a request has that for its answer.
            self.send_region(region, Side.STUB)
            self.send_region(self.loans.first, Side.RUNTIME)
        except BaseException:
            self.close()
            raise

    def serve(self, config: ModelConfig, caller_memory: CallerMemory) -> None:
        """From now on, batches are for a model of this configuration."""
        self._reader.serve(config)
        self.loans.serve(caller_memory)

    @property
    def may_have_lanes(self) -> bool:
        """Whether the stub may handle memory of devices."""
        return self._make_lanes is not None

    def open_lanes(self) -> Lanes:
        """Those to this stub, from now on at the latest. Raises `CudaUnavailable`. From any thread."""
        lanes = self.lanes
        if lanes is None:
            if self._make_lanes is None:
                raise CudaUnavailable("this process handles no memory of devices with the stub")
            with self._opening:
                lanes = self.lanes
                if lanes is None:
                    lanes = self._make_lanes()
                    self._reader.has_devices = True
                    self.lanes = lanes
        return lanes

    def new_answers(self, present_bytes: int, needed_bytes: int) -> SharedRegion:
        """Make another region for answers, of which the stub does not know. Raises `OutOfMemory`, `Closed`."""
        region = self._answers.region(present_bytes, needed_bytes)
        region.is_private = self.loans.is_private
        return region

    def retire_answers(self, region_id: int) -> None:
        """Take in a region for answers that the stub no longer uses."""
        self._answers.retire(self.response_regions.pop(region_id))

    def add_answers(self, region: SharedRegion | DeviceRegion) -> None:
        """Let the stub answer from this region, too."""
        if isinstance(region, SharedRegion):
            self.response_regions[region.id] = region
        else:
            self.device_answers[region.id] = region

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
        self._take_back()
        # The first block is for copies; where nothing is copied it is empty, in a region that there is.
        blocks = [[self.loans.first.id, 0, 0]]
        released = self.take_released()
        try:
            elsewhere = self._find_shared(requests, blocks)
            layout = self._lay_out(requests, elsewhere)
            if layout.size_bytes:
                blocks[0] = self._copy(requests, layout)
            details: list[object] | None = [request.details for request in requests]
            if self.is_on_gpu:
                details = [outputs_told(request, self.open_lanes) for request in requests]
            if not any(details):  # type: ignore[arg-type]
                details = None
            self._batch += 1
            self._begun = (self._batch, None)
            self.replies.begin(self._batch, requests)
            packed, targets = layout.packed, self._targets or None
            if self.lanes is not None:
                self.lanes.publish()
            self.conversation.send(
                _EXECUTE, self._batch, released, blocks, packed, details, targets
            )
        except BaseException:
            self.released.extend(released)
            self.loans.end_batch(())
            raise

    def begun(self, batch: int) -> None:
        """The stub has come to this batch. For the reactor."""
        if batch == self._begun[0]:
            self._begun = (batch, time.monotonic_ns())

    def began_ns(self, sent_ns: int) -> int | None:
        """When the stub began with the batch that was sent at that time; None if it is busy with those of others."""
        return self._begun[1] if self._is_shared else sent_ns

    def let_go_of(self, places: Iterable[Sequence[int]]) -> None:
        """The model kept these until now. For the reactor. Raises `RemoteProtocolError` for too many."""
        if self.lanes is not None:
            self.lanes.receive()
        self._let_go.extend((each[0], each[1]) for each in places)
        if len(self._let_go) > self.loans.count:
            raise RemoteProtocolError("the stub releases more blocks than it was given")

    def _take_back(self) -> None:
        places = []
        while self._let_go:
            places.append(self._let_go.popleft())
        if places:
            self.loans.take_back(places)

    def _lay_out(
        self, requests: Sequence[InferenceRequest], elsewhere: dict[tuple[int, int], Place]
    ) -> RequestLayout:
        batch = tuple([request.shapes for request in requests])
        key = (batch, tuple(elsewhere.items())) if elsewhere else batch
        layout = self._layouts.get(key)
        if layout is None:
            layout = lay_out(batch, elsewhere)
            if len(batch) <= _MEMORABLE_REQUESTS and all(shapes.is_shared for shapes in batch):
                self._layouts.keep(key, layout)
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
        """The inputs that callers wrote into shared memory themselves; adds the blocks they lie in.

        Notes which outputs are to be written into such memory, too.
        """
        found: dict[tuple[int, int], Place] = {}
        on_devices: list[Any] = []
        self._targets = []
        for i, request in enumerate(requests):
            if request.has_views:
                for output, lease in request.targets.items():
                    self._targets.append([i, output, *self.loans.lend_target(lease)])
                for number, array in enumerate(request.arrays):
                    if not isinstance(array, np.ndarray):
                        on_devices.append((i, number, array))
                        continue
                    lent = self.loans.lend(array)
                    if lent is not None:
                        found[i, number] = len(blocks), lent[1]
                        blocks.append(lent[0])
        if on_devices:
            device_inputs.place(on_devices, self.loans, blocks, found)
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

    def finish(self, requests: Sequence[InferenceRequest]) -> list[Answer]:
        """Read the answer to the batch; what it says of each of its requests, in order.

        Raises `PeerGone`, and `RemoteProtocolError` for an answer that is not to be believed.
        """
        _, batch, held, released, blocks, packed, remarks, states = self.conversation.receive()
        if self.lanes is not None:
            self.lanes.receive()
            device_inputs.hand_back(requests, self.loans)
        reader = self._reader
        layout = reader.layout(packed, len(requests))
        count = len(layout.responses)
        if batch != self._batch or count != len(requests):
            raise RemoteProtocolError(
                f"an answer to batch {batch} with {count} responses; "
                f"batch {self._batch} has {len(requests)} requests"
            )
        reader.check_blocks(layout, blocks)
        leases = [self.open(*block) for block in blocks]
        reader.check(layout, leases)
        if remarks is None:
            remarks = _NO_REMARKS * count
        elif len(remarks) != count:
            raise RemoteProtocolError(f"{len(remarks)} remarks on {count} responses")
        answers: list[Answer] = [
            reader.outcome(request, outputs, remark, leases)
            for request, outputs, remark in zip(requests, layout.responses, remarks, strict=True)
        ]
        if states is not None:
            answers = _deferred(answers, states)
        self.replies.answered(states)
        self.loans.end_batch(held)
        if released:
            self.loans.take_back(released)
        return answers

    def response(self, row: list[Any]) -> tuple[InferenceRequest, Outcome | None, int]:
        """A response of a request that is executing or open, None where there is only a flag; and the flags.

        For the reactor. Raises `RemoteProtocolError`.
        """
        batch, index, flags, blocks, packed, remark = row
        request = self.replies.find(batch, index, is_last=bool(flags))
        if self.lanes is not None:
            self.lanes.receive()
            device_inputs.hand_back([request], self.loans)
        if packed is None and remark is None:
            if blocks or not flags:
                raise RemoteProtocolError("a response that says nothing")
            return request, None, flags
        layout = NOTHING if packed is None else self._reader.layout(packed, 1)
        if len(layout.responses) != 1:
            raise RemoteProtocolError(f"{len(layout.responses)} responses in the place of one")
        self._reader.check_blocks(layout, blocks)
        leases = [self._answer_lease(*block) for block in blocks]
        self._reader.check(layout, leases)
        outputs = layout.responses[0]
        return request, self._reader.outcome(request, outputs, remark, leases), flags

    def _answer_lease(self, region_id: int, offset: int, size_bytes: int) -> Any:
        region: Any = self.response_regions.get(region_id) or self.device_answers.get(region_id)
        if region is None:
            raise RemoteProtocolError(
                f"a block of {size_bytes} bytes at {offset} in region {region_id}, "
                "which is not the stub's to answer from"
            )
        if offset + size_bytes > region.size_bytes:
            raise RemoteProtocolError(
                f"a block of {size_bytes} bytes at {offset} in region {region_id}, "
                f"which has {region.size_bytes}"
            )
        place = (region_id, offset)
        if self.lanes is not None and region_id in self.device_answers:
            lane = self.lanes.met(region.device.ordinal)
            return region.lease(offset, size_bytes, self._release, place, lane)
        return region.lease(offset, size_bytes, self._release, place)

    def open(self, region_id: int, offset: int, size_bytes: int) -> Lease:
        """A lease on a block of an answer: in a response region, or passed through from the request."""
        if region_id in self.response_regions or region_id in self.device_answers:
            return self._answer_lease(region_id, offset, size_bytes)  # type: ignore[no-any-return]
        return self.loans.open(region_id, offset, size_bytes)

    # Messages too large for a packet

    def store(self, packet: bytes) -> tuple[int, int, int]:
        block = self.loans.allocate(len(packet))
        memory = block.region.memory()
        memory[block.offset : block.offset + len(packet)] = packet
        return block.region.id, block.offset, len(packet)

    def load(self, region: int, offset: int, size_bytes: int) -> bytes:
        lease: Lease = self._answer_lease(region, offset, size_bytes)
        # Before it is copied: a region may be as large as the machine's memory.
        if size_bytes > MAX_STORED_BYTES:
            raise RemoteProtocolError(
                f"a message of {size_bytes} bytes; {MAX_STORED_BYTES} is the most"
            )
        return lease.tobytes()

    # Memory that nobody needs for now

    def tidy(self) -> None:
        """Give up request regions that were not used since the last time. Raises `RemoteProtocolError`."""
        self._take_back()
        self.loans.tidy()
        if self.lanes is not None:
            self.lanes.tidy()

    def size_bytes(self) -> int:
        """All shared memory of this stub."""
        answers = sum(region.size_bytes for region in list(self.response_regions.values()))
        return self.loans.size_bytes + answers

    def close(self) -> None:
        """Let go of all regions and of what callers lent; responses that are out stay valid."""
        self.loans.close()
        self.replies.close()
        for region in [*self.response_regions.values(), *self.device_answers.values()]:
            region.close()
        self._answers.close()
        self._make_lanes = None
        if self.lanes is not None:
            self.lanes.close()


def _deferred(answers: list[Answer], states: Sequence[int]) -> list[Answer]:
    """With what is said of the requests that are not answered yet."""
    if len(states) != len(answers):
        raise RemoteProtocolError(f"{len(states)} states of {len(answers)} requests")
    return [_DEFERRALS.get(state, answer) for answer, state in zip(answers, states, strict=True)]
