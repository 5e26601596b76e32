"""The link to one stub: places requests in memory, sends batches, and checks their answers.

Theory of operation. One thread at a time drives a link: the thread that holds its instance. Holders change only through
the scheduler, so `execute`, `wait`, `finish` and `tidy` need no lock against each other. Other threads meet the driver
at these places:

- `released` and `_given_back` are deques, whose `append` and `popleft` are atomic. Callers drop their arrays on any
  thread, perhaps in the garbage collector, where no lock may be taken. So a lease only appends its place, and the next
  EXECUTE, or a RELEASE, carries it to the stub. The reactor appends to `_given_back` what RELEASE of the stub names.
- `replies` has a lock, since responses come on the reactor's thread, before and after the answer to their batch.
- `borrowed_blocks` has a lock, since answers to calls are lent by the thread that has them.
- `_opening` guards the first use of devices, which may come from any thread. `lanes` never changes after that.

The driver's work channel and the reactor's control channel are not ordered with each other. A stub may drop a block and
send RELEASE before the driver has read the ANSWER that lists it as held. So the reactor only notes such places, and the
driver takes them back before the next batch, when it has read that ANSWER.

The work channel is a socket, or memory (`ipc/slots`) from `use` on. What watches its descriptor asks `is_ready` before
it reads: a stub may ring the bell of a channel in memory for nothing.

Lost answers. `wait` takes the answer, and a signal handler may then end it by an exception. The answer stays in the
channel: `is_received` is True, and the next `finish` reads it, although the descriptor is not readable again. If
`execute` raises, nothing was sent, and what the batch would have borrowed is free again. Only a signal handler may
raise after the batch was sent; the scheduler then gives the stub up (`Scheduler._send`). If `finish` raises, the stub
broke the protocol or is gone, and its process is ended; nothing that was lent to it may be reused before that.

Order of closing. The link is closed on the reactor's thread when the stub is given up, or by the constructor if it
fails. The channel is closed before that, so a driver that still waits has woken up and finds it closed. Memory that
callers still look at stays mapped for as long as they do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.channel import Channel
from moonpool.ipc.conversation import Conversation, Overflow
from moonpool.ipc.errors import CudaUnavailable, PeerGone, RemoteProtocolError
from moonpool.ipc.memo import Memo
from moonpool.ipc.memory import Lease
from moonpool.ipc.messages import (
    ANY_MEMORY,
    DEVICE_MEMORY,
    MAX_PLACES,
    MAX_STORED_BYTES,
    NO_CORE,
    OPEN,
    ORDINARY_MEMORY,
    RESCHEDULED,
    Kind,
    Side,
)
from moonpool.ipc.port import PythonPort, RuntimePort, Shapes
from moonpool.ipc.region import SharedRegion
from moonpool.ipc.slots import SlotChannel
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.config.options import look_us, spares_contained
from moonpool.runtime.model.request import AGAIN, LATER, Answer, Details, InferenceRequest, Outcome
from moonpool.runtime.stubs.allotment import Allotment
from moonpool.runtime.stubs.answers import AnswerReader, Replies
from moonpool.runtime.stubs.borrowed_blocks import BorrowedBlocks, hand_back, place
from moonpool.runtime.stubs.layout import NOTHING, RequestLayout, lay_out
from moonpool.runtime.stubs.regions import CallerMemory

if TYPE_CHECKING:
    from moonpool.ipc.cuda.region import DeviceRegion
    from moonpool.runtime.stubs.devices import Lanes


_EXECUTE = int(Kind.EXECUTE)
# Only layouts of small batches are remembered, so that they cannot take much memory.
_MEMORABLE_REQUESTS = 128
_NO_BLOCK = [0, 0, 0]
_NOWHERE: Mapping[tuple[int, int], tuple[int, int]] = {}

Place = tuple[int, int]
_DEFERRALS: dict[int, Answer] = {OPEN: LATER, RESCHEDULED: AGAIN}


class Link(Overflow):
    """The runtime's end of the work channel of one stub. The head of this file says which thread may do what."""

    def __init__(
        self,
        channel: Channel,
        send_region: Callable[[Any, Side], None],
        retire: Callable[[int], None],
        *,
        region_bytes: int,
        requests: Allotment,
        answers: Allotment,
        is_private: bool = False,
        make_lanes: Callable[[], Lanes] | None = None,
    ) -> None:
        """Own `channel`, and `requests` and `answers`, which make the regions.

        `send_region` announces a region to the stub, and `retire` makes the stub forget one. `is_private`: this stub
        and others must not see each other's memory, and the texts of its errors are not for clients. `make_lanes` is
        called when the stub first handles memory of devices, and is None if it must not. Raises `OutOfMemory`.
        """
        # It raises for a wrong value, so before there is any memory.
        port = PythonPort if is_private and spares_contained() else RuntimePort
        self.send_region = send_region
        self._make_lanes = make_lanes
        self._opening = threading.Lock()
        # None until memory of devices is handled.
        self.lanes: Lanes | None = None
        self._is_on_gpu = False
        self.conversation = Conversation(channel, Side.RUNTIME, self)
        self._reader = AnswerReader(is_confined=is_private)
        self.replies = Replies()
        self._layouts: Memo[tuple[object, ...], RequestLayout] = Memo()
        self.response_regions: dict[int, SharedRegion] = {}
        # The same on devices.
        self.device_answers: dict[int, DeviceRegion] = {}
        # Places in response regions that callers have dropped. The next EXECUTE carries them to the stub.
        self.released: deque[object] = deque()
        self._release: Callable[[object], object] = self.released.append
        # Blocks of requests that the model kept and dropped between batches. The ANSWER that lists them as held may not
        # have been read yet.
        self._given_back: deque[Place] = deque()
        # True once the runtime ends the process: that has had its time, whether or not it took the batch.
        self.is_given_up = False
        # Rows of EXECUTE: where outputs of the batch go.
        self._targets: list[list[int]] = []
        self._answers = answers
        first, lanes = requests.region(0, region_bytes), self.open_lanes
        self.borrowed_blocks = BorrowedBlocks(send_region, first, requests, retire, is_private=is_private, lanes=lanes)
        blocks, regions = self.borrowed_blocks, self.response_regions
        self.port = port(self.conversation, blocks, self.replies, self.released, self._given_back, regions)
        self.port.link = self
        self._send_first(region_bytes)

    def _send_first(self, region_bytes: int) -> None:
        try:
            region = self.new_answers(0, region_bytes)
            self.response_regions[region.id] = region
            # In this order: a stub that has the memory of a request then also has the memory for its answer.
            self.send_region(region, Side.STUB)
            self.send_region(self.borrowed_blocks.first, Side.RUNTIME)
        except BaseException:
            self.close()
            raise

    def serve(self, config: ModelConfig, caller_memory: CallerMemory) -> None:
        """Set the configuration of the model before the first batch."""
        self._reader.serve(config)
        self.borrowed_blocks.serve(caller_memory)
        self.port.serve(self._reader.output_names, look_us() * 1000)
        self._choose_way()

    def _choose_way(self) -> None:
        """Let usual batches go the port's way, if there is no more to say of them than their callers do."""
        is_compiled = type(self.port) is not PythonPort
        self.port.is_plain = is_compiled and self._reader.is_plain and not self._is_on_gpu

    @property
    def usual_port(self) -> RuntimePort | None:
        """The port, which takes usual batches; None if it is one in Python, which takes none."""
        return None if type(self.port) is PythonPort else self.port

    @property
    def is_on_gpu(self) -> bool:
        """True if the model is on a GPU and leaves its outputs there, unless the request wants them elsewhere."""
        return self._is_on_gpu

    @is_on_gpu.setter
    def is_on_gpu(self, value: bool) -> None:
        self._is_on_gpu = value
        self._choose_way()

    @property
    def may_have_lanes(self) -> bool:
        """True if the stub may handle memory of devices."""
        return self._make_lanes is not None

    def open_lanes(self) -> Lanes:
        """Return the lanes to this stub, and make them at the first call. From any thread. Raises `CudaUnavailable`."""
        lanes = self.lanes
        if lanes is None:
            if self._make_lanes is None:
                raise CudaUnavailable("this process handles no memory of devices with the stub")
            with self._opening:
                lanes = self.lanes
                if lanes is None:
                    lanes = self._make_lanes()
                    self._reader.has_devices = True
                    self._choose_way()
                    self.lanes = lanes
        return lanes

    def new_answers(self, present_bytes: int, needed_bytes: int) -> SharedRegion:
        """Make another region for answers, which the caller announces. Raises `OutOfMemory`, `Closed`."""
        region = self._answers.region(present_bytes, needed_bytes)
        region.is_private = self.borrowed_blocks.is_private
        return region

    def retire_answers(self, region_id: int) -> None:
        """Give up a region for answers that the stub no longer uses."""
        self._answers.retire(self.response_regions.pop(region_id))

    def add_answers(self, region: SharedRegion | DeviceRegion) -> None:
        """Accept answers from this region, too."""
        if isinstance(region, SharedRegion):
            self.response_regions[region.id] = region
        else:
            self.device_answers[region.id] = region

    def use(self, slots: SlotChannel) -> None:
        """Talk to the stub in memory from now on. Nobody may wait at the socket, which is closed."""
        socket, self.conversation.channel = self.conversation.channel, slots
        self.port.use(slots)
        socket.close()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `wait` does not block."""
        return self.conversation.channel.fileno()

    def is_ready(self) -> bool:
        """Return True if `wait` would not block, when the descriptor was readable: a stub may ring for nothing."""
        return self.conversation.channel.is_ready()

    def is_received(self) -> bool:
        """Return True if a `wait` that a signal handler ended has already taken the answer from the socket."""
        return self.conversation.channel.has_received

    # Down

    def execute(self, requests: Sequence[InferenceRequest]) -> None:
        """Place the inputs of a batch and send it. Does not wait for the answer.

        Raises `OutOfMemory` (nothing was sent), `PeerGone`, `RemoteProtocolError`.
        """
        if self._given_back:
            self._take_back()
        if self.port.put(requests):
            return
        # The first block is for copies.
        blocks = [_NO_BLOCK]
        released = self.take_released() if self.released else []
        try:
            elsewhere, details, targets = _NOWHERE, None, None
            for request in requests:
                if request.has_views or request.details is not None or self.is_on_gpu:
                    elsewhere = self._find_shared(requests, blocks)
                    details, targets = self._details(requests), self._targets or None
                    break
            layout = self._lay_out(requests, elsewhere)
            blocks[0] = self._copy(requests, layout)
            self.port.batch = batch = self.port.batch + 1
            self.replies.begin(batch, requests)
            if self.lanes is not None:
                self.lanes.publish()
            self.conversation.send(_EXECUTE, batch, NO_CORE, released, blocks, layout.packed, details, targets)
        except BaseException:
            self.released.extend(released)
            self.borrowed_blocks.end_batch(())
            raise

    def _details(self, requests: Sequence[InferenceRequest]) -> list[Details | None] | None:
        details = [request.details for request in requests]
        if self.is_on_gpu:
            details = [_details_on_gpu(request, self.open_lanes) for request in requests]
        return details if any(details) else None

    def release(self, places: Iterable[Sequence[int]]) -> None:
        """Note blocks that the model kept and has dropped. For the reactor. Raises `RemoteProtocolError` for too
        many.
        """
        if self.lanes is not None:
            self.lanes.receive()
        self._given_back.extend((each[0], each[1]) for each in places)
        if len(self._given_back) > self.borrowed_blocks.count:
            raise RemoteProtocolError("the stub releases more blocks than it was given")

    def _take_back(self) -> None:
        places = []
        while self._given_back:
            places.append(self._given_back.popleft())
        if places:
            self.borrowed_blocks.take_back(places)

    def _lay_out(
        self, requests: Sequence[InferenceRequest], elsewhere: Mapping[tuple[int, int], Place]
    ) -> RequestLayout:
        if len(requests) == 1:
            batch: tuple[Shapes, ...] = (requests[0].shapes,)
        else:
            batch = tuple([request.shapes for request in requests])
        key = (batch, tuple(elsewhere.items())) if elsewhere else batch
        layout = self._layouts.get(key)
        if layout is None:
            layout = lay_out(batch, elsewhere)
            if len(batch) <= _MEMORABLE_REQUESTS and all(shapes.is_shared for shapes in batch):
                self._layouts.keep(key, layout)
        return layout

    def _copy(self, requests: Sequence[InferenceRequest], layout: RequestLayout) -> list[int]:
        """Copy the inputs that lie nowhere else into one block, and return it."""
        size_bytes = layout.size_bytes
        if not size_bytes:  # an empty block in a region that exists
            return [self.borrowed_blocks.first.id, 0, 0]
        block = self.borrowed_blocks.allocate(size_bytes)
        for i, number, offset, end in layout.copies:
            array = requests[i].arrays[number]
            if array.nbytes != end - offset:
                raise InvalidRequest("an input was resized after its request was made")
            block.region.write(block.offset + offset, array)
        return [block.region.id, block.offset, size_bytes]

    def _find_shared(
        self, requests: Sequence[InferenceRequest], blocks: list[list[int]]
    ) -> dict[tuple[int, int], Place]:
        """Lend the inputs that callers wrote into shared memory themselves, and add their blocks to `blocks`.

        Returns the block and the offset of each, by request and number of the input. Also fills `_targets` with the
        outputs that are to be written into such memory.
        """
        found: dict[tuple[int, int], Place] = {}
        on_devices: list[Any] = []
        self._targets = []
        for i, request in enumerate(requests):
            if request.has_views:
                for output, lease in request.targets.items():
                    self._targets.append([i, output, *self.borrowed_blocks.lend_target(lease)])
                for number, array in enumerate(request.arrays):
                    if not isinstance(array, np.ndarray):
                        on_devices.append((i, number, array))
                        continue
                    lent = self.borrowed_blocks.lend(array)
                    if lent is not None:
                        found[i, number] = len(blocks), lent[1]
                        blocks.append(lent[0])
        if on_devices:
            place(on_devices, self.borrowed_blocks, blocks, found)
        return found

    def take_released(self, most: int = MAX_PLACES) -> list[object]:
        """Take at most so many places that callers have dropped, to send them to the stub. From any thread."""
        released: list[object] = []
        try:
            while self.released and len(released) < most:
                released.append(self.released.popleft())
        except IndexError:  # another thread took the last one
            return released
        return released

    # Up

    def wait(self) -> None:
        """Block until the answer or the end of the stub is there. A signal handler may end it without loss of the
        answer.

        Raises `PeerGone`.
        """
        if not self.port.wait():
            self.conversation.channel.wait()

    def finish(self, requests: Sequence[InferenceRequest]) -> list[Answer]:
        """Read and check the answer to the batch. Returns one answer for each request, in order.

        Raises `PeerGone`, and `RemoteProtocolError` for an answer that breaks the protocol.
        """
        answers: list[Answer] | None = self.port.take(requests)
        return self._finish(requests) if answers is None else answers

    def _finish(self, requests: Sequence[InferenceRequest]) -> list[Answer]:
        try:
            message = self.conversation.receive()
        except PeerGone as gone:
            gone.was_taken = gone.was_taken or self.is_given_up
            raise
        _, batch, _, held, released, blocks, packed, remarks, states = message
        if self.lanes is not None:
            self.lanes.receive()
            hand_back(requests, self.borrowed_blocks)
        reader = self._reader
        layout = reader.layout(packed, len(requests))
        count = len(layout.responses)
        if batch != self.port.batch or count != len(requests):
            raise RemoteProtocolError(
                f"an answer to batch {batch} with {count} responses; "
                f"batch {self.port.batch} has {len(requests)} requests"
            )
        reader.check_blocks(layout, blocks)
        leases = [self.open(*block) for block in blocks]
        reader.check(layout, leases)
        remarks = [None] * count if remarks is None else remarks
        if len(remarks) != count:
            raise RemoteProtocolError(f"{len(remarks)} remarks on {count} responses")
        answers: list[Answer] = [
            reader.outcome(request, outputs, remark, leases)
            for request, outputs, remark in zip(requests, layout.responses, remarks, strict=True)
        ]
        if states is not None:
            answers = _deferred(answers, states)
        self.replies.answered(states)
        self.borrowed_blocks.end_batch(held)
        if released:
            self.borrowed_blocks.take_back(released)
        return answers

    def response(self, row: list[Any]) -> tuple[InferenceRequest, Outcome | None, int]:
        """Check a response that comes apart from the answer. Returns its request, the outcome and the flags.

        The outcome is None if the response is only a flag. For the reactor. Raises `RemoteProtocolError`.
        """
        batch, index, flags, blocks, packed, remark = row
        is_plain = remark is None and self.port.open_apart(blocks, packed)
        request = self.replies.find(batch, index, is_last=flags != 0)
        if is_plain and request.allocator is None:
            return request, self.port.apart(request), flags
        if self.lanes is not None:
            self.lanes.receive()
            hand_back([request], self.borrowed_blocks)
        if packed is None and remark is None:
            if blocks or not flags:
                raise RemoteProtocolError("an empty response")
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
        region: Any = self.response_regions.get(region_id)
        if region is not None and offset + size_bytes <= region.size_bytes:
            return region.lease(offset, size_bytes, self._release, (region_id, offset))
        region = region or self.device_answers.get(region_id)
        if region is None:
            raise RemoteProtocolError(
                f"a block of {size_bytes} bytes at {offset} in region {region_id}, "
                "which is not the stub's to answer from"
            )
        if offset + size_bytes > region.size_bytes:
            raise RemoteProtocolError(
                f"a block of {size_bytes} bytes at {offset} in region {region_id}, which has {region.size_bytes}"
            )
        place = (region_id, offset)
        if self.lanes is not None:
            lane = self.lanes.met(region.device.ordinal)
            return region.lease(offset, size_bytes, self._release, place, lane)
        return region.lease(offset, size_bytes, self._release, place)

    def open(self, region_id: int, offset: int, size_bytes: int) -> Lease:
        """Return a lease on a block of an answer. It lies in a response region, or was an input of the batch.

        Raises `RemoteProtocolError` for a block that the stub may not answer from.
        """
        region = self.response_regions.get(region_id)
        if region is not None and offset + size_bytes <= region.size_bytes:
            return region.lease(offset, size_bytes, self._release, (region_id, offset))
        if region is not None or region_id in self.device_answers:
            return self._answer_lease(region_id, offset, size_bytes)  # type: ignore[no-any-return]
        return self.borrowed_blocks.open(region_id, offset, size_bytes)

    # Messages too large for a packet

    def store(self, packet: bytes) -> tuple[int, int, int]:
        block = self.borrowed_blocks.allocate(len(packet))
        memory = block.region.memory()
        memory[block.offset : block.offset + len(packet)] = packet
        return block.region.id, block.offset, len(packet)

    def load(self, region: int, offset: int, size_bytes: int) -> bytes:
        lease: Lease = self._answer_lease(region, offset, size_bytes)
        # Checked before it is copied: a region may be as large as the machine's memory.
        if size_bytes > MAX_STORED_BYTES:
            raise RemoteProtocolError(f"a message of {size_bytes} bytes; {MAX_STORED_BYTES} is the most")
        return lease.tobytes()

    # Memory that is not needed for now

    def tidy(self, now_s: float) -> None:
        """Give up request regions that were not used for their time. `now_s` is of a monotonic clock. Raises
        `RemoteProtocolError`.
        """
        self._take_back()
        self.borrowed_blocks.tidy(now_s)
        if self.lanes is not None:
            self.lanes.tidy()

    def size_bytes(self) -> int:
        """Return the size of all shared memory of this stub."""
        answers = sum(region.size_bytes for region in list(self.response_regions.values()))
        return self.borrowed_blocks.size_bytes + answers

    def close(self) -> None:
        """Close all regions and drop what callers lent. Responses that callers hold stay valid."""
        self.borrowed_blocks.close()
        self.replies.close()
        for region in [*self.response_regions.values(), *self.device_answers.values()]:
            region.close()
        self._answers.close()
        self._make_lanes = None
        if self.lanes is not None:
            self.lanes.close()


def _deferred(answers: list[Answer], states: Sequence[int]) -> list[Answer]:
    """Replace the answers of requests that are not answered yet by LATER or AGAIN. Raises `RemoteProtocolError`."""
    if len(states) != len(answers):
        raise RemoteProtocolError(f"{len(states)} states of {len(answers)} requests")
    return [_DEFERRALS.get(state, answer) for answer, state in zip(answers, states, strict=True)]


def _details_on_gpu(request: InferenceRequest, lanes: Callable[[], Lanes]) -> Details | None:
    """Return the details of a request in the terms of a stub on a GPU.

    A device where outputs are wanted gets the number that the stub has for it. If nobody can take the outputs but in
    ordinary memory, the details say so. `lanes` opens the lanes to the stub.
    """
    details = request.details
    memory = ANY_MEMORY if details is None else details.memory
    if memory == ANY_MEMORY and request.is_for_host:
        return (details or Details())._replace(memory=ORDINARY_MEMORY)
    if details is None or memory != DEVICE_MEMORY:
        return details
    number = lanes().number_of(details.device)
    if number is None:
        return details._replace(memory=ANY_MEMORY, device=0)
    return details._replace(device=number)
