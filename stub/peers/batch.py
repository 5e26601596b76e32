"""Makes the requests of one EXECUTE into objects for the model, and keeps track of the blocks in which they lie."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moonpool.ipc.codec import unpack_layout
from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.memo import Memo
from moonpool.ipc.memory import Lease, Region
from moonpool.ipc.messages import NO_DETAILS, Details
from moonpool.ipc.tensors import BYTES, DTYPES
from moonpool.stub.attributes import BatchBase
from moonpool.stub.pb_utils.request import InferenceRequest, InferenceTrace
from moonpool.stub.pb_utils.response import ReplyPort
from moonpool.stub.pb_utils.tensor import Tensor, preferred
from moonpool.stub.peers.regions import LentRegion, Regions

if TYPE_CHECKING:
    from moonpool.ipc.cuda.region import DeviceLease

_MEMORABLE_BYTES = 4096
_LARGEST_BYTES = 1 << 62
_RAW = np.dtype("u1")
_ndarray = np.ndarray


class Target(NamedTuple):
    """Names the place in a client's memory where the client wants an output."""

    region: Region
    offset: int
    size_bytes: int


class Batch(BatchBase):
    """Opens batch after batch, and knows which input blocks the model still refers to."""

    __slots__ = ("_inputs", "_port", "_regions", "give_back", "layouts", "outputs", "returned")

    def __init__(self, regions: Regions, port: ReplyPort, start: dict[str, Any]) -> None:
        self._regions = regions
        self._port = port
        self._inputs: list[str] = start["inputs"]
        self.outputs: list[str] = start["outputs"]
        self.layouts: Memo[bytes, list[list[Any]]] = Memo()
        # Places of blocks. The thread that drops the last view of a block appends its place.
        self.returned: deque[object] = deque()
        self.give_back = self.returned.append
        self.places: list[object] = []
        self.has_copies = False
        # Inputs in memory of clients, until that is renewed: region, place and size.
        self.lent: list[tuple[LentRegion, tuple[int, int], int]] = []
        # Places of outputs in memory of clients, by request and output.
        self.targets: dict[int, dict[int, Target]] = {}
        self.kept = 0

    def open(
        self,
        batch: int,
        blocks: list[list[int]],
        packed: bytes,
        details: list[Any] | None,
        targets: list[list[int]] | None = None,
    ) -> list[InferenceRequest]:
        """Return the requests of a batch. Their inputs are writable views of the regions, without a copy."""
        if self.lent:  # a signal handler ended the batch before
            self.renew()
        layout = self.layouts.get(packed)
        if layout is None:
            layout = self._read(packed)
            if len(packed) <= _MEMORABLE_BYTES:
                self.layouts.keep(packed, layout)
        leases: list[Lease | DeviceLease] = []
        self.places = places = []
        self.has_copies = blocks[0][2] > 0
        regions = self._regions
        for region_id, offset, size_bytes in blocks:
            place = (region_id, offset)
            places.append(place)
            region = regions.requests.get(region_id) or regions.request_region(region_id)
            if offset + size_bytes > region.size_bytes:
                raise RemoteProtocolError(
                    f"a block of {size_bytes} bytes at {offset} in region {region_id}, which has {region.size_bytes}"
                )
            if type(region) is LentRegion:
                self.lent.append((region, place, size_bytes))
            leases.append(region.lease(offset, size_bytes, self.give_back, place))
        devices = regions.devices
        if devices is not None:
            devices.order(leases)
        requests = []
        for index, inputs in enumerate(layout):
            tensors = []
            for name, datatype, shape, block, offset, dtype, dims in inputs:
                lease = leases[block]
                if devices is None or isinstance(lease, _ndarray):
                    array = _ndarray(dims, dtype, lease, offset)
                    tensors.append(Tensor.from_wire(name, datatype, shape, array))
                else:
                    tensors.append(devices.tensor(name, datatype, shape, lease, offset))
            origin = (self._port, batch, index)
            if details is None or details[index] is None:
                request = InferenceRequest.from_wire(NO_DETAILS, self.outputs, tensors, origin)
            else:
                request = self.detailed(tensors, Details._make(details[index]), origin)
            requests.append(request)
        if self.targets:
            self.targets = {}
        if targets:
            self._aim(targets)
        return requests

    def _aim(self, targets: list[list[int]]) -> None:
        for index, output, region_id, offset, size_bytes in targets:
            target = Target(self._regions.request_region(region_id), offset, size_bytes)
            self.targets.setdefault(index, {})[output] = target

    def _read(self, packed: bytes) -> list[list[Any]]:
        """Return how to view the inputs of each request. Strings and BF16 are viewed as bytes."""
        requests = []
        for rows in unpack_layout(packed):
            inputs = []
            for index, datatype, shape, block, offset, size_bytes in rows:
                name, is_raw = self._inputs[index], datatype >= BYTES
                dtype = _RAW if is_raw else DTYPES[datatype]
                dims = (size_bytes,) if is_raw else tuple(shape)
                # numpy checks that a view lies within its block, but adds these without a look at an overflow.
                if offset + math.prod(dims) * dtype.itemsize > _LARGEST_BYTES:
                    raise RemoteProtocolError(f"input '{name}' lies in no memory")
                inputs.append((name, datatype, tuple(shape), block, offset, dtype, dims))
            requests.append(inputs)
        return requests

    def detailed(self, tensors: list[Tensor], details: Details, origin: tuple[ReplyPort, int, int]) -> InferenceRequest:
        """Make a request that has details beside its inputs."""
        wanted = self.outputs
        if details.outputs is not None:
            wanted = [wanted[index] for index in details.outputs]
        request = InferenceRequest.from_wire(details, wanted, tensors, origin)
        if details.trace is not None:
            request._trace = InferenceTrace(details.trace)
        if details.memory:
            request._preferred_memory = preferred(details.memory, details.device)
        return request

    def has_lent(self, lease: Lease | DeviceLease) -> bool:
        """Return whether a lease is a block of the batch that is open now."""
        # The first block is empty if nothing was copied, and its place may be that of another block then.
        places = self.places if self.has_copies else self.places[1:]
        is_ours = lease.give_back is self.give_back and lease.region is not None
        return is_ours and lease.token in places

    def end(self) -> tuple[list[object], list[object]]:
        """Return the blocks of this batch that the model keeps, and those of earlier batches that it has released.

        To be called when nothing of ours refers to the objects of the batch any more.
        """
        returned = self.returned
        if not self.kept and len(returned) == len(self.places):
            returned.clear()
            return [], []
        if self.lent:
            self._leave_kept()
        released = []
        while returned:
            released.append(returned.popleft())
        held = []
        for place in self.places:
            if place in released:
                released.remove(place)
            else:
                held.append(place)
        self.kept += len(held) - len(released)
        return held, released

    def _leave_kept(self) -> None:
        """Leave memory of clients to the model that it keeps.

        They may write there as soon as they have their answers.
        """
        # Compared by identity: a place that was kept from an earlier batch may be equal to one of this batch.
        back = set(map(id, self.returned.copy()))
        kept = {region for region, place, _ in self.lent if id(place) not in back}
        for region in kept:
            region.give_up([(offset, size_bytes) for each, (_, offset), size_bytes in self.lent if each is region])
        self.lent = [each for each in self.lent if each[0] not in kept]

    def renew(self) -> None:
        """Drop what the model wrote to memory of clients. To be called between two batches: no client sees it."""
        lent: dict[LentRegion, list[tuple[int, int]]] = {}
        for region, (_, offset), size_bytes in self.lent:
            lent.setdefault(region, []).append((offset, size_bytes))
        for region, blocks in lent.items():
            region.renew(blocks)
        self.lent.clear()

    def release_late(self, most: int) -> list[object]:
        """Return blocks of earlier batches that the model has released since. To be called while no batch is open."""
        released: list[object] = []
        while self.returned and len(released) < most:
            released.append(self.returned.popleft())
        self.kept -= len(released)
        return released
