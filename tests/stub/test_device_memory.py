"""Memory on devices as a stub has it: what is asked for, named, copied and given back."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.gpu.cards import Fake, fake, fake_library
from tests.waiting import wait_until

from moonpool.ipc.codec import encode, unpack_layout
from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.lane import Lane
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.messages import DEVICE_MEMORY, NO_DEVICE, ORDINARY_MEMORY, Kind, Side
from moonpool.ipc.region import SharedRegion
from moonpool.stub import pb_utils
from moonpool.stub.batch import Batch
from moonpool.stub.call_tensors import Placed, read_outputs
from moonpool.stub.device_tensor import DeviceTensor
from moonpool.stub.errors import TritonModelException
from moonpool.stub.placement import Placer
from moonpool.stub.preferred_memory import preferred
from moonpool.stub.regions import Regions
from moonpool.stub.reply import Port
from moonpool.stub.request import InferenceRequest
from moonpool.stub.response import InferenceResponse
from moonpool.stub.tensor import Tensor

__all__ = ["fake", "fake_library"]

START = {"inputs": ["X", "Z"], "outputs": ["Y", "V"], "decoupled": False}


class Peer:
    """The runtime's end, on the same thread."""

    def __init__(self) -> None:
        self.regions = Regions(self.hear)
        self.made: dict[int, DeviceRegion | SharedRegion] = {}
        self.lanes: dict[int, Lane] = {}
        self.refuses = ""
        self.heard: list[tuple[object, ...]] = []
        self.requests: list[InferenceRequest] = []
        self.send(SharedRegion.create(1, 1 << 16), Side.STUB)
        self.send(SharedRegion.create(2, 1 << 16), Side.RUNTIME)
        self.placer = Placer(self.regions, START)
        self.batch = Batch(self.regions, Port(), START)

    def send(self, region: DeviceRegion | SharedRegion, writer: Side) -> None:
        self.made[region.id] = region
        is_device = isinstance(region, DeviceRegion)
        number = region.device.ordinal if isinstance(region, DeviceRegion) else NO_DEVICE
        handle = region.handle if isinstance(region, DeviceRegion) else b""
        if is_device and number not in self.lanes:
            lane = self.lanes[number] = Lane(device(number))
            self.regions.on_devices().meet(number, lane.handle)
        fd = os.dup(region.fd)
        self.regions.arrive(fd, region.id, region.size_bytes, int(writer), number, handle)

    def hear(self, kind: Kind, *fields: Any) -> None:
        self.heard.append((kind, *fields))
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
        self, *tensors: Tensor, memory: int = 0, number: int = 0
    ) -> tuple[list[list[int]], list[list[Any]]]:
        """Blocks and rows of a response, as they would travel. Raises what is said in place of one."""
        blocks: list[list[int]] = []
        plan, remark = self.placer.answer(
            InferenceResponse(list(tensors)), ["Y", "V"], blocks, self.batch,
            wish=preferred(memory, number),
        )  # fmt: skip
        if plan is None:
            assert remark is not None
            raise OutOfMemory(remark[1][1])
        self.regions.publish()
        return blocks, unpack_layout(self.placer.layout((plan,)))[0]

    def read(self, block: list[int], row: list[Any]) -> np.ndarray:
        """An output, as the runtime sees it."""
        region, start = self.made[block[0]], block[1] + row[4]
        if isinstance(region, DeviceRegion):
            raw = region.read(start, row[5])
        else:
            raw = bytes(region.memory()[start : start + row[5]])
        return np.frombuffer(raw, np.float32).reshape(row[2])

    def close(self) -> None:
        self.requests.clear()
        self.regions.close()
        for lane in self.lanes.values():
            lane.close()
        for region in self.made.values():
            region.close()


@pytest.fixture
def peer(fake: Fake) -> Iterator[Peer]:  # noqa: ARG001 - it drives the devices
    found = Peer()
    pb_utils.use_memory(found.regions)
    yield found
    pb_utils.use_memory(None)
    found.close()
    # What an exception that was caught refers to is in a cycle.
    gc.collect()


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def foreign(array: np.ndarray, number: int = 0) -> DeviceArray:
    """Device memory that is none of moonpool's blocks."""
    region = DeviceRegion.create(99, array.nbytes, device(number))
    region.write(0, array)
    lease = region.lease(0, array.nbytes, lambda _: None, None)
    region.close()
    return DeviceArray.over(lease, 0, 11, array.shape)


def test_inputs_on_a_device_are_seen_there(peer: Peer) -> None:
    peer.lend(X=floats(1, 2))
    (tensor,) = peer.requests[0].inputs()
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype()) == ("X", [2], 11)
    assert not tensor.is_cpu()
    assert tensor.__dlpack_device__() == (2, 0)
    assert isinstance(tensor, Tensor)
    assert DeviceArray.of(tensor).to_host().tolist() == [1, 2]  # type: ignore[union-attr]


def test_numpy_gets_no_tensor_of_a_device_unless_the_model_asks_for_copies(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.lend(X=floats(1, 2))
    tensor = peer.requests[0].inputs()[0]
    with pytest.raises(TritonModelException) as caught:
        tensor.as_numpy()
    assert str(caught.value) == "Tensor is stored in GPU and cannot be converted to NumPy."
    monkeypatch.setattr(DeviceTensor, "copies_to_numpy", True)
    copy = tensor.as_numpy()
    assert copy.tolist() == [1, 2]
    assert copy is tensor.as_numpy()


def test_an_input_that_is_passed_on_is_named_and_not_copied(peer: Peer, fake: Fake) -> None:
    peer.lend(X=floats(1, 2), Z=floats(3))
    x, z = peer.requests[0].inputs()
    before = fake.calls("cuMemcpyAsync"), fake.calls("cuMemcpyDtoDAsync_v2")
    blocks, rows = peer.answer(Tensor.from_dlpack("Y", z), Tensor.from_dlpack("V", x))
    assert [block[:2] for block in blocks] == [[50, 8192], [50, 4096]]
    assert peer.read(blocks[0], rows[0]).tolist() == [3]
    assert (fake.calls("cuMemcpyAsync"), fake.calls("cuMemcpyDtoDAsync_v2")) == before


def test_an_array_that_another_library_made_of_an_input_is_recognised(peer: Peer) -> None:
    peer.lend(X=floats(1, 2, 3))
    x = peer.requests[0].inputs()[0]
    view = DeviceArray.of(x.to_dlpack())
    assert view is not None
    assert view.lease is None
    blocks, rows = peer.answer(Tensor.from_dlpack("Y", view))
    assert blocks == [[50, 4096, 12]]
    assert peer.read(blocks[0], rows[0]).tolist() == [1, 2, 3]


def test_what_lies_elsewhere_on_the_device_is_copied_there_once(peer: Peer) -> None:
    array = foreign(floats(4, 5))
    blocks, rows = peer.answer(Tensor.from_dlpack("Y", array))
    assert isinstance(peer.made[blocks[0][0]], DeviceRegion)
    assert peer.read(blocks[0], rows[0]).tolist() == [4, 5]
    assert [each[0] for each in peer.heard] == [Kind.GROW, Kind.EVENT]


def test_memory_of_the_stub_s_on_a_device_is_named(peer: Peer) -> None:
    place = pb_utils.empty((2,), np.float32, device=0)
    place.lease.region.write(place.lease.offset, floats(6, 7))  # type: ignore[union-attr]
    blocks, rows = peer.answer(Tensor.from_dlpack("Y", place))
    assert blocks[0][:2] == [place.lease.region.id, place.lease.offset]  # type: ignore[union-attr]
    assert peer.read(blocks[0], rows[0]).tolist() == [6, 7]


def test_a_block_comes_back_when_both_ends_have_let_go_of_it(peer: Peer) -> None:
    place = pb_utils.empty((2,), np.float32, device=0)
    region_id = place.lease.region.id  # type: ignore[union-attr]
    arena = peer.regions.on_devices().arena(0)
    blocks, _ = peer.answer(Tensor.from_dlpack("Y", place))
    del place
    gc.collect()
    pb_utils.empty((2,), np.float32, device=0)
    assert arena.find(region_id, blocks[0][1]) is not None
    peer.regions.returned.append((region_id, blocks[0][1]))
    again = pb_utils.empty((2,), np.float32, device=0)
    assert again.lease is not None
    assert again.lease.offset == blocks[0][1]


@pytest.mark.parametrize("shape", [(3,), (2, 2), (0,), ()])
def test_an_output_on_a_device_goes_to_ordinary_memory_where_that_is_wanted(
    peer: Peer, shape: tuple[int, ...]
) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1
    place = pb_utils.empty(shape, np.float32, device=0)
    place.lease.region.write(place.lease.offset, values)  # type: ignore[union-attr]
    tensor = Tensor.from_dlpack("Y", place)
    blocks, rows = peer.answer(tensor, Tensor("V", floats(9)), memory=ORDINARY_MEMORY)
    assert all(isinstance(peer.made[region], SharedRegion) for region, _, _ in blocks)
    assert peer.read(blocks[rows[0][3]], rows[0]).tolist() == values.tolist()
    assert peer.read(blocks[rows[1][3]], rows[1]).tolist() == [9]


def test_an_output_in_ordinary_memory_goes_to_a_device_where_that_is_wanted(peer: Peer) -> None:
    blocks, rows = peer.answer(Tensor("Y", floats(1, 2)), memory=DEVICE_MEMORY)
    assert isinstance(peer.made[blocks[0][0]], DeviceRegion)
    assert peer.read(blocks[0], rows[0]).tolist() == [1, 2]


@pytest.mark.parametrize("number", [0, 7])
def test_a_wish_for_a_device_without_room_or_that_is_not_there_leaves_outputs_where_they_are(
    peer: Peer, number: int
) -> None:
    peer.refuses = "no room"
    blocks, rows = peer.answer(Tensor("Y", floats(1)), memory=DEVICE_MEMORY, number=number)
    assert isinstance(peer.made[blocks[0][0]], SharedRegion)
    assert peer.read(blocks[0], rows[0]).tolist() == [1]


def test_strings_stay_in_ordinary_memory(peer: Peer) -> None:
    text = Tensor("Y", np.array([b"a"], np.object_))
    blocks, _ = peer.answer(text, memory=DEVICE_MEMORY)
    assert isinstance(peer.made[blocks[0][0]], SharedRegion)


def test_an_output_for_which_a_device_has_no_room_is_an_error(peer: Peer) -> None:
    array = foreign(floats(4, 5))
    peer.refuses = "the device is full"
    with pytest.raises(OutOfMemory, match="the device is full"):
        peer.answer(Tensor.from_dlpack("Y", array))
    with pytest.raises(TritonModelException, match="the device is full"):
        pb_utils.empty((2,), np.float32, device=0)


def test_outputs_in_several_memories_are_in_one_response(peer: Peer) -> None:
    peer.lend(X=floats(1))
    x = peer.requests[0].inputs()[0]
    blocks, rows = peer.answer(Tensor("Y", floats(2)), Tensor.from_dlpack("V", x))
    assert peer.read(blocks[rows[0][3]], rows[0]).tolist() == [2]
    assert peer.read(blocks[rows[1][3]], rows[1]).tolist() == [1]
    assert len({block[0] for block in blocks}) == 2


def test_tensors_on_a_device_go_to_other_models_and_come_back(peer: Peer) -> None:
    peer.lend(X=floats(1, 2))
    x = peer.requests[0].inputs()[0]
    inputs = [Tensor("B", floats(3)), x, Tensor.from_dlpack("A", foreign(floats(4)))]
    placed = Placed(peer.regions, inputs)
    rows = [[None, *row[1:]] for row in placed.rows]
    found = [peer.read(placed.blocks[row[3]], row).tolist() for row in rows]
    assert found == [[3], [1, 2], [4]]
    assert placed.blocks[placed.rows[1][3]] == [50, 4096, 8]
    peer.regions.on_devices().tidy()
    back: list[object] = []
    outputs = read_outputs([[50, 4096, 8]], [["Y", 11, [2], 0, 0, 8]], peer.regions, back.append)
    assert not outputs[0].is_cpu()
    del outputs
    gc.collect()
    assert back == [(50, 4096)]


def test_what_is_copied_on_a_device_is_kept_until_the_device_is_done(
    peer: Peer, fake: Fake
) -> None:
    fake.delay(50_000)
    blocks, rows = peer.answer(Tensor.from_dlpack("Y", foreign(floats(4, 5))))
    devices = peer.regions.on_devices()
    assert devices.is_waited_for

    def is_done() -> bool:
        devices.tidy()
        return not devices.is_waited_for

    wait_until(is_done, what="the device to be done with the copy")
    assert peer.read(blocks[0], rows[0]).tolist() == [4, 5]


def test_inputs_that_the_model_keeps_are_known_to_be_held(peer: Peer) -> None:
    batch = peer.lend(X=floats(1), Z=floats(2))
    kept = peer.requests[0].inputs()[1]
    peer.requests.clear()
    gc.collect()
    held, released = batch.let_go()
    assert held == [(50, 8192)]
    assert released == []
    del kept
    gc.collect()
    assert batch.let_go_late(8) == [(50, 8192)]


def test_there_is_no_device_memory_outside_a_stub() -> None:
    with pytest.raises(TritonModelException, match="only in a model that is served"):
        pb_utils.empty((2,), np.float32, device=0)
