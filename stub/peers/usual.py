"""Takes usual batches through the stub in three calls: `open`, `take` and `give`.

Theory of operation. A batch is usual if it has one block of inputs in shared memory, and neither details nor targets, and if the model
returns one plain response to each request, with outputs in memory of its own. Nearly all batches are usual, and for small tensors the layers
(`batch.py`, `answer.py`, `placement.py`) take longer than the work that they do. So these three methods have the layers' steps for that
one case in a straight line. They use the layers' own plans, memory and open answer, and leave all of these as the layers would: the
bytes of ANSWER are the same.

`open` and `take` find out that a batch is not usual before they have changed anything. Then the layers do all of that step. A layout or
a plan that has not come before is left to the layers, too: they check it, and remember it for the next batch. What comes from
the runtime passes the same check of its kind as elsewhere.

For the main thread of a stub without front ends. The control thread reads `Peer.executing` and appends to `Regions.returned` meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moonpool.ipc.channel import MAX_PACKET_BYTES
from moonpool.ipc.codec import check_of, encode, unpack
from moonpool.ipc.memo import Memo
from moonpool.ipc.memory import lease_of
from moonpool.ipc.messages import NO_DETAILS, WORK, Kind
from moonpool.ipc.region import SharedRegion
from moonpool.ipc.tensors import BYTES
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.stub.peers.peer import Peer
from moonpool.stub.peers.placement import NO_OUTPUTS, fill, refusal_remark

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

    def open(self, packet: bytes) -> list[InferenceRequest] | None:
        """Return the requests of a usual EXECUTE. Returns None, and has done nothing, for any other packet.

        Raises `RemoteProtocolError`.
        """
        peer, regions, batch = self._peer, self._regions, self._batch
        try:
            fields = unpack(packet, strict_map_key=True, max_ext_len=0)
            kind, batch_id, released, blocks, packed, details, targets = fields
            layout = self._layouts.get(packed) or self._learned(packed)
            ((region_id, offset, size_bytes),) = blocks
            region = regions.requests[region_id]
        except Exception:  # another kind of message, or none at all: the layers tell what
            return None
        if (
            not layout
            or details is not None
            or targets is not None
            or kind != _EXECUTE
            or type(region) is not SharedRegion
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
                arrays = []
                for tensor in response._outputs:
                    array = tensor._array
                    if array is None or (array.base is not None and lease_of(array) is not None):
                        return False
                    arrays.append(array)
                    key += (tensor._name, tensor._datatype, tensor._shape, array.nbytes)
                placed.append((plans[tuple(key)], arrays))
        except Exception:  # a plan that is not known yet, or fields that the model has broken
            return False
        answer, allocate = self._answer, self._regions.allocate
        for plan, arrays in placed:
            try:
                if arrays:
                    fill(allocate(plan.size_bytes), arrays, plan, answer.blocks)
                answer.plans.append(plan)
            except Exception as error:  # noqa: PERF203 - of this response alone
                answer.add(NO_OUTPUTS, refusal_remark(error))
        return True

    def give(self) -> None:
        """Answer the batch. To be called when nothing else of ours refers to the objects of the batch. Raises `PeerGone`."""
        peer, answer, batch = self._peer, self._answer, self._batch
        if answer.remarks or answer.states or self._regions.devices is not None:
            self._send(peer.give())
            return
        batch_id = peer.executing[0]
        peer.executing = (batch_id, [])
        if batch.kept or len(batch.returned) != 1:
            held, released = batch.end()
        else:
            batch.returned.clear()
            held = released = _NONE
        blocks, plans = answer.blocks, tuple(answer.plans)
        answer.blocks, answer.plans = [], []
        layout = self._placer.layouts.get(plans) or self._placer.layout(plans)
        packet = encode(_ANSWER, batch_id, held, released, blocks, layout, None, None)
        if len(packet) <= MAX_PACKET_BYTES:
            self._channel.send_waiting(packet)
        else:
            self._send((_ANSWER, batch_id, held, released, blocks, layout, None, None))

    def _send(self, fields: tuple[Any, ...]) -> None:
        # The conversation has not seen EXECUTE. After ANSWER it stands where it stood before.
        self._peer.conversation.pass_turn(_EXECUTE)
        self._peer.send(fields)
