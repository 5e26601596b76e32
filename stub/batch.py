"""The requests of one EXECUTE as objects for the model, and the memory they lie in."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moonpool.ipc.codec import unpack_layout
from moonpool.ipc.details import NO_DETAILS, Details
from moonpool.ipc.memo import Memo
from moonpool.ipc.tensors import BYTES, DTYPES
from moonpool.stub.lent_region import LentRegion
from moonpool.stub.preferred_memory import preferred
from moonpool.stub.request import InferenceRequest, InferenceTrace
from moonpool.stub.tensor import Tensor

if TYPE_CHECKING:
    from typing import Any

    from moonpool.ipc.cuda.region import DeviceLease
    from moonpool.ipc.memory import Lease, Region
    from moonpool.stub.regions import Regions
    from moonpool.stub.reply import Port

_MEMORABLE_BYTES = 4096
_RAW = np.dtype("u1")
_ndarray = np.ndarray


class Target(NamedTuple):
    """Where the client wants an output that has room there."""

    region: Region
    offset: int
    size_bytes: int


class Batch:
    """Opens batch after batch; knows which blocks the model still looks at."""

    __slots__ = (
        "_has_copies",
        "_inputs",
        "_layouts",
        "_lent",
        "_let_go",
        "_outputs",
        "_port",
        "_regions",
        "_returned",
        "kept",
        "places",
        "targets",
    )

    def __init__(self, regions: Regions, port: Port, start: dict[str, Any]) -> None:
        self._regions = regions
        self._port = port
        self._inputs: list[str] = start["inputs"]
        self._outputs: list[str] = start["outputs"]
        self._layouts: Memo[bytes, list[list[Any]]] = Memo()
        # Places of blocks, appended by whichever thread drops the last view of one.
        self._returned: deque[object] = deque()
        self._let_go = self._returned.append
        self.places: list[object] = []
        self._has_copies = False
        # The places that are in memory of clients: those of inputs, and where outputs go to, by request and output.
        self._lent: list[tuple[LentRegion, tuple[int, int], int]] = []
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
        """The batch as the model sees it: views on the region, writable, no copy."""
        layout = self._layouts.get(packed)
        if layout is None:
            layout = self._read(packed)
            if len(packed) <= _MEMORABLE_BYTES:
                self._layouts.keep(packed, layout)
        leases: list[Lease | DeviceLease] = []
        self.places = places = []
        self._has_copies = blocks[0][2] > 0
        regions = self._regions
        for region_id, offset, size_bytes in blocks:
            place = (region_id, offset)
            places.append(place)
            region = regions.requests.get(region_id) or regions.request_region(region_id)
            if type(region) is LentRegion:
                self._lent.append((region, place, size_bytes))
            leases.append(region.lease(offset, size_bytes, self._let_go, place))
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
                request = InferenceRequest.from_wire(NO_DETAILS, self._outputs, tensors, origin)
            else:
                request = self._request(tensors, details[index], origin)
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
        """The inputs of each request as they are viewed: strings and BF16 as the bytes that they are."""
        requests = []
        for rows in unpack_layout(packed):
            inputs = []
            for index, datatype, shape, block, offset, size_bytes in rows:
                name, is_raw = self._inputs[index], datatype >= BYTES
                dtype = _RAW if is_raw else DTYPES[datatype]
                dims = (size_bytes,) if is_raw else tuple(shape)
                inputs.append((name, datatype, tuple(shape), block, offset, dtype, dims))
            requests.append(inputs)
        return requests

    def _request(
        self, tensors: list[Tensor], row: list[Any], origin: tuple[Port, int, int]
    ) -> InferenceRequest:
        """A request of which something is said beside its inputs."""
        details = Details._make(row)
        wanted = self._outputs
        if details.outputs is not None:
            wanted = [wanted[index] for index in details.outputs]
        request = InferenceRequest.from_wire(details, wanted, tensors, origin)
        if details.trace is not None:
            request._trace = InferenceTrace(details.trace)
        if details.memory:
            request._preferred_memory = preferred(details.memory, details.device)
        return request

    def has_lent(self, lease: Lease | DeviceLease) -> bool:
        """Whether this is a block of the batch that is open now."""
        # The first block has no bytes where nothing was copied, and then its place may be another's.
        places = self.places if self._has_copies else self.places[1:]
        is_ours = lease.give_back is self._let_go and lease.region is not None
        return is_ours and lease.token in places

    def let_go(self) -> tuple[list[object], list[object]]:
        """The blocks of this batch that the model keeps, and those of earlier ones it let go of now.

        To be called when everything else that refers to the batch's objects is gone.
        """
        returned = self._returned
        if self._lent:
            self._end_loans()
        if not self.kept and len(returned) == len(self.places):
            returned.clear()
            return [], []
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

    def _end_loans(self) -> None:
        """Clients may write to their memory again soon."""
        # Which objects these are: one that was kept earlier may have had the same place.
        back = set(map(id, self._returned.copy()))
        kept = {region for region, place, _ in self._lent if id(place) not in back}
        lent: dict[LentRegion, list[tuple[int, int]]] = {}
        for region, (_, offset), size_bytes in self._lent:
            lent.setdefault(region, []).append((offset, size_bytes))
        self._lent.clear()
        for region, blocks in lent.items():
            if region in kept:
                region.give_up(blocks)
            else:
                region.renew(blocks)

    def let_go_late(self, most: int) -> list[object]:
        """Blocks of earlier batches that the model let go of since; while no batch is open."""
        released: list[object] = []
        while self._returned and len(released) < most:
            released.append(self._returned.popleft())
        self.kept -= len(released)
        return released
