"""Plays the runtime's end of a stub's memory on devices."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.gpu.cards import Fake
from tests.stub.closing import close_regions

from moonpool.ipc.codec import encode, packed_list, unpack_layout
from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.lane import DeviceLane
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.messages import NO_DEVICE, Kind, Side
from moonpool.ipc.region import SharedRegion
from moonpool.stub.pb_utils.memory import use_memory
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse, ReplyPort
from moonpool.stub.pb_utils.tensor import Tensor, preferred
from moonpool.stub.peers.batch import Batch
from moonpool.stub.peers.placement import Placer
from moonpool.stub.peers.regions import Regions

START = {"inputs": ["X", "Z"], "outputs": ["Y", "V"], "decoupled": False}


class Peer:
    """Is the runtime's end, on the same thread."""

    def __init__(self) -> None:
        self.regions = Regions(self.hear)
        self.made: dict[int, DeviceRegion | SharedRegion] = {}
        self.lanes: dict[int, DeviceLane] = {}
        self.refuses = ""
        self.heard: list[tuple[object, ...]] = []
        self.requests: list[InferenceRequest] = []
        for number, writer in ((1, Side.STUB), (2, Side.RUNTIME)):
            region = self.made[number] = SharedRegion.create(number, 1 << 16)
            self.regions.add_first(number, region.size_bytes, os.dup(region.fd), writer)
        self.placer = Placer(self.regions, START)
        self.batch = Batch(self.regions, ReplyPort(), START)

    def send(self, region: DeviceRegion | SharedRegion, writer: Side) -> None:
        self.made[region.id] = region
        is_device = isinstance(region, DeviceRegion)
        number = region.device.ordinal if isinstance(region, DeviceRegion) else NO_DEVICE
        handle = region.handle if isinstance(region, DeviceRegion) else b""
        if is_device and number not in self.lanes:
            lane = self.lanes[number] = DeviceLane(device(number))
            self.regions.on_devices().meet(number, lane.handle)
        fd = os.dup(region.fd)
        self.regions.arrive(fd, region.id, region.size_bytes, int(writer), number, handle)

    def hear(self, kind: Kind, *fields: Any, notes: Iterable[Callable[[], object]] = ()) -> None:
        self.heard.append((kind, *fields))
        for note in notes:
            note()
        if kind == Kind.EVENT:
            self.lanes[fields[0]].meet(fields[1])
        elif kind == Kind.GROW and self.refuses:
            self.regions.refuse(self.refuses)
        elif kind == Kind.GROW:
            size, number = fields
            region_id = max(self.made) + 1
            if number == NO_DEVICE:
                self.send(SharedRegion.create(region_id, size), Side.STUB)
            else:
                self.send(DeviceRegion.create(region_id, size, device(number)), Side.STUB)

    def lend(self, **arrays: np.ndarray) -> Batch:
        """Open a batch of one request whose inputs lie on device 0, one block each."""
        region = DeviceRegion.create(50, 1 << 20, device(0))
        self.send(region, Side.RUNTIME)
        blocks, rows = [[2, 0, 0]], []
        for name, array in arrays.items():
            offset = 4096 * len(blocks)
            region.write(offset, array)
            rows.append([START["inputs"].index(name), 11, list(array.shape), len(blocks), 0, array.nbytes])  # type: ignore[attr-defined]  # fmt: skip
            blocks.append([50, offset, array.nbytes])
        self.requests = self.batch.open(1, blocks, encode(rows), None)
        return self.batch

    def answer(
        self, *tensors: Tensor, memory: int = 0, number: int = 0, publishes: bool = True
    ) -> tuple[list[list[int]], list[list[Any]]]:
        """Return blocks and rows of a response as they are sent. Raises the error that is sent instead."""
        blocks: list[list[int]] = []
        layout, remark = self.placer.answer(
            InferenceResponse(list(tensors)), ["Y", "V"], blocks, self.batch,
            wish=preferred(memory, number),
        )  # fmt: skip
        if layout is None:
            assert remark is not None
            raise OutOfMemory(remark[1][1])
        if publishes:
            self.regions.publish()
        return blocks, unpack_layout(packed_list([layout]))[0]

    def read(self, block: list[int], row: list[Any]) -> np.ndarray:
        """Return an output as the runtime sees it."""
        region, start = self.made[block[0]], block[1] + row[4]
        if isinstance(region, DeviceRegion):
            raw = region.read(start, row[5])
        else:
            raw = bytes(region.memory()[start : start + row[5]])
        return np.frombuffer(raw, np.float32).reshape(row[2])

    def close(self) -> None:
        self.requests.clear()
        close_regions(self.regions)
        for lane in self.lanes.values():
            lane.close()
        for region in self.made.values():
            region.close()


@pytest.fixture
def peer(fake: Fake) -> Iterator[Peer]:  # noqa: ARG001 - it drives the devices
    found = Peer()
    use_memory(found.regions)
    yield found
    use_memory(None)
    found.close()
    # A caught exception is part of a cycle, and refers to arrays.
    gc.collect()


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def foreign(array: np.ndarray, number: int = 0) -> DeviceArray:
    """Allocate device memory that belongs to no block of moonpool's."""
    region = DeviceRegion.create(99, array.nbytes, device(number))
    region.write(0, array)
    lease = region.lease(0, array.nbytes, lambda _: None, None)
    region.close()
    return DeviceArray.over(lease, 0, 11, array.shape)
