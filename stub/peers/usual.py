"""Takes usual batches through the stub in four calls: `receive`, `open`, `take` and `give`.

Theory of operation. A batch is usual if it has one block of inputs in shared memory, and neither details nor targets, and if the model
returns one plain response to each request, with outputs in memory of its own. Nearly all batches are usual, and for small tensors the layers
(`batch.py`, `answer.py`, `placement.py`) take longer than the work that they do. So these methods have the layers' steps for that
one case in a straight line. They use the layers' own plans, memory and open answer, and leave all of these as the layers would: the
bytes of ANSWER are the same.

`open` and `take` find out that a batch is not usual before they have changed anything. Then the layers do all of that step. A layout or
a plan that has not come before is left to the layers, too: they check it, and remember it for the next batch. What comes from
the runtime passes the same check of its kind as elsewhere.

Two classes have these methods. `CompiledWay` has them in C++ (`_usual.cpp`), in about half of the time. It looks for a while for the next packet where
that pays, and tells the runtime its core. `usual_way` chooses: START says whether the runtime wants that, and interpreters
without the extension, or older than 3.11, use `UsualWay`. Both are tested against each other.

For the main thread of a stub without front ends. The control thread reads `Peer.executing` and appends to `Regions.returned` meanwhile.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from moonpool.ipc.arena import Block, Extents
from moonpool.ipc.channel import MAX_PACKET_BYTES
from moonpool.ipc.codec import check_of, encode, unpack
from moonpool.ipc.extension import load_if_there
from moonpool.ipc.memo import Memo
from moonpool.ipc.memory import Lease
from moonpool.ipc.messages import NO_CORE, NO_DETAILS, NO_DEVICE, WORK, Kind
from moonpool.ipc.region import SharedRegion
from moonpool.ipc.tensors import BYTES
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.stub.peers.peer import Peer
from moonpool.stub.peers.placement import (
    NO_OUTPUTS,
    PlacementPlan,
    arrays_to_copy,
    place_copies,
    refusal_remark,
)
from moonpool.stub.peers.regions import Regions

_EXECUTE, _ANSWER = int(Kind.EXECUTE), int(Kind.ANSWER)
_ndarray = np.ndarray
_new = object.__new__
_request = InferenceRequest.from_wire
_NONE: list[object] = []
# The inputs of each request: name, datatype, shape, dtype and offset in the block.
_Layout = list[list[tuple[str, int, tuple[int, ...], Any, int]]]
_UNUSUAL: _Layout = []


class UsualWay:
    """Opens, places and answers the usual batches of one peer. See the theory of operation."""

    def __init__(self, peer: Peer, start: dict[str, Any]) -> None:
        self._peer = peer
        self._channel = peer.conversation.channel
        self._regions = peer.regions
        self._batch = peer.batch
        self._answer = peer.answer
        self._placer = peer.placer
        self._port = peer.responses
        self._outputs: list[str] = start["outputs"]
        self._is_decoupled: bool = start["decoupled"]
        self._layouts: Memo[bytes, _Layout] = Memo()
        self._check = check_of(Kind.EXECUTE, WORK[Kind.EXECUTE])

    def receive(self) -> bytes:
        """Return the next packet. Blocks. Raises as `Channel.receive` does."""
        return self._channel.receive()

    def open(self, packet: bytes) -> list[InferenceRequest] | None:
        """Return the requests of a usual EXECUTE. Returns None, and has done nothing, for any other packet.

        Raises `RemoteProtocolError`.
        """
        peer, regions, batch = self._peer, self._regions, self._batch
        try:
            fields = unpack(packet, strict_map_key=True, max_ext_len=0)
            kind, batch_id, _, released, blocks, packed, details, targets = fields
            layout = self._layouts.get(packed) or self._learned(packed)
            ((region_id, offset, size_bytes),) = blocks
            region = regions.requests[region_id]
            is_within = offset + size_bytes <= region.size_bytes
        except Exception:  # another kind of message, or none at all: the layers tell what
            return None
        if (
            not layout
            or details is not None
            or targets is not None
            or kind != _EXECUTE
            or type(region) is not SharedRegion
            or not is_within
            or regions.devices is not None
        ):
            return None
        self._check(fields)
        if released:
            regions.returned.extend(map(tuple, released))
        place = (region_id, offset)
        batch.places = [place]
        batch.has_copies = size_bytes > 0
        if batch.targets:
            batch.targets = {}
        lease = region.lease(offset, size_bytes, batch.give_back, place)
        port, outputs = self._port, self._outputs
        requests = []
        for index, inputs in enumerate(layout):
            tensors = []
            for name, datatype, shape, dtype, at in inputs:
                tensor = _new(Tensor)
                tensor._name = name
                tensor._datatype = datatype
                tensor._shape = shape
                tensor._array = _ndarray(shape, dtype, lease, at)
                tensor._wire = None
                tensors.append(tensor)
            requests.append(_request(NO_DETAILS, outputs, tensors, (port, batch_id, index)))
        peer.executing = (batch_id, requests)
        if peer.cancelled:
            peer.cancel_early(batch_id, requests)
        return requests

    def _learned(self, packed: bytes) -> _Layout:
        """Return the plan of a layout that the layers have met. It is empty if the layout is not usual."""
        known = self._batch.layouts.get(packed)
        if known is None:
            return _UNUSUAL
        layout: _Layout = [
            [(name, code, shape, dtype, at) for name, code, shape, _, at, dtype, _ in inputs]
            for inputs in known
        ]
        # Strings and BF16 are viewed as bytes.
        is_usual = all(row[1] < BYTES and row[3] == 0 for inputs in known for row in inputs)
        return self._layouts.keep(packed, layout if is_usual else _UNUSUAL)

    def take(self, requests: list[InferenceRequest], returned: object) -> bool:
        """Place the responses of the model. Returns False, and has done nothing, if they are not usual.

        `requests` are those of `open`.
        """
        if type(returned) is not list or len(returned) != len(requests) or self._is_decoupled:
            return False
        plans = self._placer.plans
        placed = []
        try:
            for response, request in zip(returned, requests):
                if (
                    type(response) is not InferenceResponse
                    or request._release_flags
                    or request._reply is not None
                    or response._error is not None
                    or response._parameters
                ):
                    return False
                key: list[object] = []
                arrays = arrays_to_copy(response._outputs, key)
                if arrays is None:
                    return False
                placed.append((plans[tuple(key)], arrays))
        except Exception:  # a plan that is not known yet, or fields that the model has broken
            return False
        answer, regions = self._answer, self._regions
        for plan, arrays in placed:
            before = len(answer.plans)
            try:
                note = partial(answer.plans.append, plan)
                if arrays:
                    place_copies(regions, arrays, plan, answer.blocks, note)
                else:
                    note()
            except Exception as error:
                # A signal handler may have raised after the response was placed.
                if len(answer.plans) == before:
                    self._refuse(error)
        return True

    def _refuse(self, error: Exception) -> None:
        """Make the answer to the next request an error, as its response cannot be placed."""
        self._answer.add(NO_OUTPUTS, refusal_remark(error))

    def give(self) -> None:
        """Answer the batch. To be called when nothing else of ours refers to the objects of the batch. Raises `PeerGone`."""
        peer, answer = self._peer, self._answer
        if answer.remarks or answer.states or self._regions.devices is not None:
            self._send(peer.give())
            return
        batch_id = peer.executing[0]
        peer.executing = (batch_id, [])
        self._finish(batch_id)

    def _finish(self, batch_id: int) -> None:
        """Send an answer that has nothing but outputs, after the objects of the batch were dropped."""
        answer, batch = self._answer, self._batch
        if batch.kept or len(batch.returned) != 1:
            held, released = batch.end()
        else:
            batch.returned.clear()
            held = released = _NONE
        blocks, plans = answer.blocks, tuple(answer.plans)
        answer.blocks, answer.plans = [], []
        layout = self._placer.layouts.get(plans) or self._placer.layout(plans)
        packet = encode(_ANSWER, batch_id, NO_CORE, held, released, blocks, layout, None, None)
        if len(packet) <= MAX_PACKET_BYTES:
            self._channel.send_waiting(packet)
        else:
            self._send((_ANSWER, batch_id, NO_CORE, held, released, blocks, layout, None, None))

    def _send(self, fields: tuple[Any, ...]) -> None:
        # The conversation has not seen EXECUTE. After ANSWER it stands where it stood before.
        self._peer.conversation.pass_turn(_EXECUTE)
        self._peer.send(fields)


class CompiledWay(UsualWay):
    """Does the same in C++, and leaves what is less usual to the methods of its base class."""

    def __init__(self, peer: Peer, start: dict[str, Any], extension: ModuleType) -> None:
        super().__init__(peer, start)
        channel, batch = self._channel, self._batch
        parts = {
            **objects_of(self._regions),
            "peer": peer,
            "batch": batch,
            "give_back": batch.give_back,
            "batch_returned": batch.returned,
            "clear_batch_returned": batch.returned.clear,
            "layouts": batch.layouts,
            "answer": self._answer,
            "plans": self._placer.plans,
            "answer_layouts": self._placer.layouts,
            "answer_layout": self._placer.layout,
            "port": self._port,
            # A request as every batch has it, but for its inputs and its origin.
            "request": _request(NO_DETAILS, self._outputs, ()),
            "make_tensor": Tensor.from_wire,
            "plan": PlacementPlan,
            "fileno": channel.descriptor,
            "channel_receive": channel.receive,
            "channel_checked": channel._checked,
            "channel_send": channel.send_waiting,
            "refuse": self._refuse,
            "give": super().give,
            "finish": self._finish,
        }
        way = extension.Way(parts, start["decoupled"], start["look_us"])
        # Methods of this class would cost another call each.
        for name in ("receive", "open", "take", "give"):
            setattr(self, name, getattr(way, name))


def objects_of(regions: Regions) -> dict[str, object]:
    """Return the objects and classes with which all compiled forms of a stub work."""
    return {
        "regions": regions,
        "request_regions": regions.requests,
        "returned": regions.returned,
        "add_returned": regions.give_back,
        "take_returned": regions.returned.popleft,
        "allocate": regions.allocate,
        "no_device": NO_DEVICE,
        "acquire": regions._turn.acquire,
        "release": regions._turn.release,
        "arena": regions.arena,
        # One to look at.
        "lease": Lease((0,), np.uint8),
        "array": _ndarray,
        "byte": np.dtype("u1"),
        "tensor": Tensor,
        "response": InferenceResponse,
        "region": SharedRegion,
        "block": Block,
        "extents": Extents,
    }


def usual_way(peer: Peer, start: dict[str, Any]) -> UsualWay:
    """Return the way for this stub: the compiled one if START wants it and the interpreter has it."""
    extension = load_if_there("moonpool.stub.peers._usual") if start["compiled"] else None
    return UsualWay(peer, start) if extension is None else CompiledWay(peer, start, extension)
