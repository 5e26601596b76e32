"""Tests memory on devices in a stub: asking for it, naming blocks, copies, giving it back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.gpu.cards import Fake, driven_by, fake, fake_library
from tests.stub.devices.device_peer import Peer, floats, foreign, peer
from tests.stub.pb_utils.capsules import overwrite
from tests.waiting import wait_until

from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.ipc.dlpack import make
from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.messages import ANY_MEMORY, DEVICE_MEMORY, ORDINARY_MEMORY, Kind
from moonpool.ipc.region import SharedRegion
from moonpool.ipc.signals import at_once
from moonpool.stub import pb_utils
from moonpool.stub.hosts.call_tensors import Placed, prepared, read_outputs
from moonpool.stub.pb_utils.device_tensor import DeviceTensor
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.pb_utils.tensor import Tensor, preferred
from moonpool.stub.peers.answer import Responses
from moonpool.testing.outputs import copied

__all__ = ["fake", "fake_library", "peer"]

# These copy on a device, from it and to it.
COPIES = ("cuMemcpyAsync", "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2")


@pytest.mark.promise(
    "Device memory in a model",
    "Inputs on a device stay there: a model gets them as Triton's `Tensor`, and hands them on "
    "by DLPack or `__cuda_array_interface__`.",
)
def test_inputs_on_a_device_are_seen_there(peer: Peer) -> None:
    peer.lend(X=floats(1, 2))
    (tensor,) = peer.requests[0].inputs()
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype()) == ("X", [2], 11)
    assert not tensor.is_cpu()
    assert tensor.__dlpack_device__() == (2, 0)
    assert isinstance(tensor, Tensor)
    assert DeviceArray.of(tensor).to_host().tolist() == [1, 2]  # type: ignore[union-attr]


@pytest.mark.promise(
    "Device memory in a model",
    "`as_numpy` of a tensor on a device raises Triton's error, or copies if `MOONPOOL_GPU_AS_NUMPY` asks for that.",
)
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


@pytest.mark.promise(
    "Device memory in a model",
    "An output in a block that the runtime knows is named and not copied: an input, memory from "
    "`pb_utils.empty(device=)`, or an array that a library made of either.",
)
def test_an_input_that_is_passed_on_is_named_and_not_copied(peer: Peer, fake: Fake) -> None:
    peer.lend(X=floats(1, 2), Z=floats(3))
    x, z = peer.requests[0].inputs()
    before = fake.calls("cuMemcpyAsync"), fake.calls("cuMemcpyDtoDAsync_v2")
    blocks, rows = peer.answer(Tensor.from_dlpack("Y", z), Tensor.from_dlpack("V", x))
    assert [block[:2] for block in blocks] == [[50, 8192], [50, 4096]]
    assert peer.read(blocks[0], rows[0]).tolist() == [3]
    assert (fake.calls("cuMemcpyAsync"), fake.calls("cuMemcpyDtoDAsync_v2")) == before


@pytest.mark.promise("Device memory in a model", "An output in a block that …")
def test_an_array_that_another_library_made_of_an_input_is_recognised(peer: Peer) -> None:
    peer.lend(X=floats(1, 2, 3))
    x = peer.requests[0].inputs()[0]
    view = DeviceArray.of(x.to_dlpack())
    assert view is not None
    assert view.lease is None
    blocks, rows = peer.answer(Tensor.from_dlpack("Y", view))
    assert blocks == [[50, 4096, 12]]
    assert peer.read(blocks[0], rows[0]).tolist() == [1, 2, 3]


@pytest.mark.promise(
    "Device memory in a model",
    "Any other output on a device is copied once, on the device, and its memory is kept until the device is done.",
)
def test_foreign_memory_on_the_device_is_copied_there_once(peer: Peer, fake: Fake) -> None:
    array = foreign(floats(4, 5))
    before = [fake.calls(name) for name in COPIES]
    blocks, rows = peer.answer(Tensor.from_dlpack("Y", array))
    assert [fake.calls(name) for name in COPIES] == [before[0] + 1, *before[1:]]
    assert isinstance(peer.made[blocks[0][0]], DeviceRegion)
    assert peer.read(blocks[0], rows[0]).tolist() == [4, 5]
    assert [each[0] for each in peer.heard] == [Kind.GROW, Kind.EVENT]


@pytest.mark.promise("Device memory in a model", "An output in a block that …")
def test_memory_of_the_stub_s_on_a_device_is_named(peer: Peer) -> None:
    place = pb_utils.empty((2,), np.float32, device=0)
    place.lease.region.write(place.lease.offset, floats(6, 7))  # type: ignore[union-attr]
    blocks, rows = peer.answer(Tensor.from_dlpack("Y", place))
    assert blocks[0][:2] == [place.lease.region.id, place.lease.offset]  # type: ignore[union-attr]
    assert peer.read(blocks[0], rows[0]).tolist() == [6, 7]


@pytest.mark.promise(
    "Device memory in a model",
    "A block on a device is used again once both ends have released it. A block that a model keeps stays in use.",
)
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


@pytest.mark.promise(
    "Device memory in a model",
    "Outputs come in the memory that the request asks for; strings, and outputs for a device "
    "that is full or missing, come in ordinary memory.",
)
@pytest.mark.parametrize("shape", [(3,), (2, 2), (0,), ()])
def test_an_output_on_a_device_goes_to_ordinary_memory_where_that_is_wanted(peer: Peer, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1
    place = pb_utils.empty(shape, np.float32, device=0)
    place.lease.region.write(place.lease.offset, values)  # type: ignore[union-attr]
    tensor = Tensor.from_dlpack("Y", place)
    blocks, rows = peer.answer(tensor, Tensor("V", floats(9)), memory=ORDINARY_MEMORY)
    assert all(isinstance(peer.made[region], SharedRegion) for region, _, _ in blocks)
    assert peer.read(blocks[rows[0][3]], rows[0]).tolist() == values.tolist()
    assert peer.read(blocks[rows[1][3]], rows[1]).tolist() == [9]


@pytest.mark.promise("Device memory in a model", "Outputs come in the memory that …")
def test_an_output_in_ordinary_memory_goes_to_a_device_where_that_is_wanted(peer: Peer) -> None:
    blocks, rows = peer.answer(Tensor("Y", floats(1, 2)), memory=DEVICE_MEMORY)
    assert isinstance(peer.made[blocks[0][0]], DeviceRegion)
    assert peer.read(blocks[0], rows[0]).tolist() == [1, 2]


@pytest.mark.promise("Device memory in a model", "Outputs come in the memory that …")
@pytest.mark.parametrize("number", [0, 7])
def test_a_wish_for_a_device_without_room_or_that_is_not_there_leaves_outputs_where_they_are(
    peer: Peer, number: int
) -> None:
    peer.refuses = "no room"
    blocks, rows = peer.answer(Tensor("Y", floats(1)), memory=DEVICE_MEMORY, number=number)
    assert isinstance(peer.made[blocks[0][0]], SharedRegion)
    assert peer.read(blocks[0], rows[0]).tolist() == [1]


def test_a_peer_that_cannot_open_our_event_is_not_answered_again(peer: Peer) -> None:
    peer.lend(X=floats(1))
    events = [each for each in peer.heard if each[0] == Kind.EVENT]
    peer.regions.on_devices().meet(0, b"")
    assert [each for each in peer.heard if each[0] == Kind.EVENT] == events
    assert peer.regions.on_devices().lane(0).handle == b""


@pytest.mark.promise("Device memory in a model", "Outputs come in the memory that …")
def test_strings_stay_in_ordinary_memory(peer: Peer) -> None:
    text = Tensor("Y", np.array([b"a"], np.object_))
    blocks, _ = peer.answer(text, memory=DEVICE_MEMORY)
    assert isinstance(peer.made[blocks[0][0]], SharedRegion)


@pytest.mark.promise(
    "Device memory in a model", "If a device has no room for an output that lies on it, that request gets an error."
)
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


@pytest.mark.promise("Device memory in a model", "Tensors on a device go to other models and come back as they are.")
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
    outputs, owning = read_outputs([[50, 4096, 8]], prepared([["Y", 11, [2], 0, 0, 8]]), peer.regions, back.append)
    at_once(*owning)
    owning.clear()
    assert not outputs[0].is_cpu()
    del outputs
    gc.collect()
    assert back == [(50, 4096)]


@pytest.mark.promise("Device memory in a model", "Any other output on a device …")
def test_the_source_of_a_copy_is_kept_until_the_device_is_done(peer: Peer, fake: Fake) -> None:
    # So that a busy machine, too, looks before it is done.
    fake.delay(1_500_000)
    blocks, rows = peer.answer(Tensor.from_dlpack("Y", foreign(floats(4, 5))))
    devices = peer.regions.on_devices()
    assert devices.is_waited_for

    def is_done() -> bool:
        devices.tidy()
        return not devices.is_waited_for

    wait_until(is_done, what="the device to be done with the copy")
    assert peer.read(blocks[0], rows[0]).tolist() == [4, 5]


@pytest.mark.promise(
    "Device memory in a model",
    "Responses that are sent apart from their batch also come in order, and in the memory that their request asks for.",
)
@pytest.mark.parametrize("wished", [ANY_MEMORY, ORDINARY_MEMORY])
def test_a_response_apart_from_its_batch_is_published_before_it_is_sent(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, wished: int
) -> None:
    place = pb_utils.empty((2,), np.float32, device=0)
    steps: list[Any] = []
    monkeypatch.setattr(peer.regions.on_devices(), "publish", lambda: steps.append("published"))

    def respond(row: list[Any], *taken: Callable[[], object]) -> None:
        steps.append(row[3].copy())
        at_once(*taken)

    control = cast(Any, SimpleNamespace(respond=respond))
    responses = Responses(peer.placer, control, {"decoupled": True})
    reply = responses.reply(1, 0, ["Y"])
    reply.preferred_memory = preferred(wished, 0)
    reply.send(InferenceResponse([Tensor.from_dlpack("Y", place)]), final=True)
    assert steps[0] == "published"
    (region, _, _), *_ = steps[1]
    assert isinstance(peer.made[region], DeviceRegion) == (wished == ANY_MEMORY)


@pytest.mark.usefixtures("peer")
def test_a_test_of_a_model_sees_what_it_made_on_a_device() -> None:
    tensor = Tensor.from_dlpack("Y", foreign(floats(1, 2)))
    assert copied(tensor).tolist() == [1, 2]


@pytest.mark.promise("Device memory in a model", "A block on a device …")
def test_inputs_that_the_model_keeps_are_known_to_be_held(peer: Peer) -> None:
    batch = peer.lend(X=floats(1), Z=floats(2))
    kept = peer.requests[0].inputs()[1]
    peer.requests.clear()
    gc.collect()
    held, released = batch.end()
    assert held == [(50, 8192)]
    assert released == []
    del kept
    gc.collect()
    assert batch.release_late(8) == [(50, 8192)]


# Of two rows, where each of them begins with the second value of the one before.
STRIDES = np.array([1, 1])


class OnDevice:
    """Claims to be on a device."""

    def __dlpack__(self, **_: object) -> object:
        return make(self, 4096, (2, 0), 11, (2, 2))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def test_where_there_is_no_driver_what_is_on_a_device_is_refused() -> None:
    with driven_by("libcuda-of-nobody.so.1"):
        for source in (OnDevice(), OnDevice().__dlpack__()):
            with pytest.raises(TritonModelException, match=r"No tensor on device 0: .*libcuda"):
                Tensor.from_dlpack("X", source)


@pytest.mark.usefixtures("peer")
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"code": 5}, 'DType code "5" is not supported.'),
        ({"code": 4, "bits": 32}, "Expected BF16 tensor to have 16 bits, but had: 32"),
        ({"strides": STRIDES.ctypes.data}, "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are"),
    ],
)
def test_an_impossible_tensor_on_a_device_is_refused_in_tritons_words(fields: dict[str, int], text: str) -> None:
    capsule = OnDevice().__dlpack__()
    overwrite(capsule, **fields)
    with pytest.raises(TritonModelException) as caught:
        Tensor.from_dlpack("X", capsule)
    assert str(caught.value).startswith(text)


def test_there_is_no_device_memory_outside_a_stub() -> None:
    with pytest.raises(TritonModelException, match="only in a model that is served"):
        pb_utils.empty((2,), np.float32, device=0)
