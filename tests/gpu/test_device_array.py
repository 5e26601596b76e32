"""Arrays on a device: what they say of themselves, who waits for whom, and what is read of others."""

from __future__ import annotations

import ctypes
import gc
import sys
import types
import weakref
from typing import Any

import numpy as np
import pytest
from tests.gpu.cards import Fake
from tests.gpu.late import SIZE, block, fill, fill_at_once, late, peek

from moonpool.ipc import dlpack
from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.cuda.device import Device, device
from moonpool.ipc.cuda.lane import DeviceLane
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.ipc.errors import BadTensor
from moonpool.ipc.tensors import BF16, CODES

pytestmark = pytest.mark.promise(
    "Device memory",
    "Arrays on a device come and go by both forms of DLPack and by `__cuda_array_interface__`, "
    "without a copy, in the order of their users' streams. Their memory lasts as long as "
    "anybody has them.",
)

FP32, UINT8 = CODES["FP32"], CODES["UINT8"]
LEGACY = 1


class Returns:
    """Counts what leases give back."""

    def __init__(self) -> None:
        self.tokens: list[object] = []

    def __call__(self, token: object) -> None:
        self.tokens.append(token)


def array_of(values: np.ndarray, here: Device, datatype: int = FP32) -> DeviceArray:
    """An array in a block of a region of its own."""
    region = DeviceRegion.create(7, max(values.nbytes, 1), here)
    region.write(0, values)
    lease = region.lease(0, values.nbytes, lambda _: None, "block")
    region.close()
    return DeviceArray.over(lease, 0, datatype, values.shape)


class Interface:
    """Somebody's array that has nothing but `__cuda_array_interface__`."""

    def __init__(self, array: DeviceArray, **changes: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": "<f4",
            "data": (array.address, False),
            "version": 3,
            **changes,
        }


def test_an_array_tells_what_it_is_and_copies_itself(gpu: Device) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)

    array = array_of(values, gpu)

    assert (array.shape, array.nbytes, array.is_cpu) == ((2, 3), 24, False)
    assert array.dtype == np.float32
    assert array.__dlpack_device__() == (2, gpu.ordinal)
    assert array.to_host().tolist() == values.tolist()
    assert repr(array) == "<DeviceArray FP32 [2, 3] on device 0>"


@pytest.mark.parametrize("max_version", [None, (1, 0), (1, 1)])
def test_a_capsule_is_read_as_what_was_put_into_it(gpu: Device, max_version: tuple[int, int] | None) -> None:
    array = array_of(np.arange(6, dtype=np.float32).reshape(2, 3), gpu)

    again = DeviceArray.of(array.__dlpack__(max_version=max_version))

    assert again is not None
    assert (again.address, again.shape, again.datatype) == (array.address, (2, 3), FP32)
    assert again.device is gpu
    assert not again.is_read_only


def test_an_interface_is_read_as_what_it_says(gpu: Device) -> None:
    array = array_of(np.arange(6, dtype=np.float32).reshape(2, 3), gpu)
    found = array.__cuda_array_interface__
    source = types.SimpleNamespace(__cuda_array_interface__=found)

    again = DeviceArray.of(source)

    assert again is not None
    assert (again.address, again.shape, again.datatype) == (array.address, (2, 3), FP32)
    assert (found["version"], found["strides"], found["stream"]) == (3, None, LEGACY)
    assert again.stream == LEGACY


def test_an_array_in_ordinary_memory_is_not_a_device_array(gpu: Device) -> None:
    assert DeviceArray.of(np.zeros(3)) is None
    assert DeviceArray.of([1, 2]) is None
    assert DeviceArray.of(np.zeros(3).__dlpack__()) is None
    array = array_of(np.zeros(2, np.float32), gpu)
    somewhere = ctypes.create_string_buffer(64)
    assert DeviceArray.of(Interface(array, data=(ctypes.addressof(somewhere), False))) is None


def test_an_array_of_ours_is_itself(gpu: Device) -> None:
    array = array_of(np.zeros(2, np.float32), gpu)
    assert DeviceArray.of(array) is array


def test_an_array_of_nothing_has_no_bytes(gpu: Device) -> None:
    array = array_of(np.zeros((2, 0, 3), np.float32), gpu)

    assert array.to_host().shape == (2, 0, 3)
    again = DeviceArray.of(array.__dlpack__())
    assert again is not None
    assert again.shape == (2, 0, 3)
    nowhere = DeviceArray.of(Interface(array, data=(0, False)))
    assert nowhere is not None
    assert nowhere.nbytes == 0


def test_bf16_goes_by_dlpack_alone(gpu: Device) -> None:
    array = array_of(np.array([1, 2], np.uint16), gpu, BF16)

    again = DeviceArray.of(array.__dlpack__())

    assert again is not None
    assert again.datatype == BF16
    assert not hasattr(array, "__cuda_array_interface__")


@pytest.mark.promise(
    "Device memory",
    "An array that is not contiguous, or has no datatype of moonpool's, is refused, and the error says what to do.",
)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strides": (4, 8)}, "not contiguous"),
        ({"shape": (2, -3)}, "-3"),
        ({"typestr": "<c8"}, "complex"),
        ({"typestr": ">f4"}, "dtype"),
        ({"mask": object()}, "mask"),
    ],
    ids=["strides", "shape", "complex", "byte order", "mask"],
)
def test_an_interface_that_is_no_tensor_is_refused(gpu: Device, changes: dict[str, Any], reason: str) -> None:
    array = array_of(np.zeros((2, 3), np.float32), gpu)

    with pytest.raises(BadTensor, match=reason):
        DeviceArray.of(Interface(array, **changes))


def test_an_interface_with_strides_that_are_c_s_is_taken(gpu: Device) -> None:
    array = array_of(np.zeros((2, 1, 3), np.float32), gpu)

    assert DeviceArray.of(Interface(array, strides=(12, 999, 4))) is not None


def test_the_memory_lives_as_long_as_the_capsule_s_reader(gpu: Device) -> None:
    returned = Returns()
    region = DeviceRegion.create(7, 64, gpu)
    array = DeviceArray.over(region.lease(0, 64, returned, "block"), 0, UINT8, (64,))
    capsule = array.__dlpack__()
    region.close()
    del array
    gc.collect()
    assert returned.tokens == []
    again = DeviceArray.of(capsule)
    del capsule
    gc.collect()
    assert returned.tokens == []

    del again
    assert returned.tokens == ["block"]


def test_a_capsule_that_nobody_reads_lets_go(gpu: Device) -> None:
    returned = Returns()
    region = DeviceRegion.create(7, 64, gpu)
    array = DeviceArray.over(region.lease(0, 64, returned, "block"), 0, UINT8, (64,))
    capsules = [array.__dlpack__(), array.__dlpack__(max_version=(1, 0))]
    del array
    assert returned.tokens == []

    del capsules
    assert returned.tokens == ["block"]
    region.close()


def test_a_capsule_is_used_once(gpu: Device) -> None:
    array = array_of(np.zeros(2, np.float32), gpu)
    capsule = array.__dlpack__()

    assert DeviceArray.of(capsule) is not None
    assert DeviceArray.of(capsule) is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"stream": 0}, "say 1 or 2"),
        ({"copy": True}, "copy what you get"),
        ({"dl_device": (1, 0)}, "is on device 0"),
        ({"dl_device": (2, 1)}, "is on device 0"),
    ],
)
def test_an_impossible_capsule_is_refused(gpu: Device, arguments: dict[str, Any], reason: str) -> None:
    array = array_of(np.zeros(2, np.float32), gpu)

    with pytest.raises(BufferError, match=reason):
        array.__dlpack__(**arguments)


def test_read_only_memory_needs_the_later_form(gpu: Device) -> None:
    source = array_of(np.zeros(2, np.float32), gpu)
    array = DeviceArray.of(Interface(source, data=(source.address, True)))
    assert array is not None
    assert array.is_read_only

    with pytest.raises(BufferError, match="read-only"):
        array.__dlpack__()
    again = DeviceArray.of(array.__dlpack__(max_version=(1, 0)))
    assert again is not None
    assert again.is_read_only


# Order of streams


class Producer:
    """Somebody's array, which notes for which stream it was asked."""

    def __init__(self, array: DeviceArray) -> None:
        self._array = array
        self.asked: list[object] = []

    def __dlpack__(self, *, stream: int | None = None, **more: Any) -> Any:
        self.asked.append(stream)
        return self._array.__dlpack__(stream=stream, **more)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def test_a_producer_is_told_our_stream(region: DeviceRegion) -> None:
    lane = DeviceLane(region.device)
    source = Producer(DeviceArray.over(block(region), 0, UINT8, (SIZE,)))

    assert DeviceArray.of(source, lane.stream) is not None

    assert source.asked == [lane.stream]
    lane.close()


def test_a_reader_s_stream_waits_for_the_lane(region: DeviceRegion) -> None:
    lane, stream = DeviceLane(region.device), region.device.new_stream()
    array = DeviceArray.over(block(region, lane), 0, UINT8, (SIZE,))
    fill(region, 7, lane.stream)

    capsule = array.__dlpack__(stream=stream)
    region.device.finish(stream)

    assert peek(region) == 7
    del capsule
    lane.close()
    region.device.close_stream(stream)


def test_a_consumer_without_a_stream_gets_the_default_one(region: DeviceRegion) -> None:
    lane = DeviceLane(region.device)
    array = DeviceArray.over(block(region, lane), 0, UINT8, (SIZE,))
    fill(region, 7, lane.stream)

    array.__dlpack__()
    region.device.finish(LEGACY)

    assert peek(region) == 7
    lane.close()


def test_a_consumer_that_wants_no_order_does_not_wait_and_is_waited_for(region: DeviceRegion) -> None:
    lane = DeviceLane(region.device)
    array = DeviceArray.over(block(region, lane), 0, UINT8, (SIZE,))
    capsule = array.__dlpack__(stream=-1)
    fill(region, 7, LEGACY)
    del array, capsule

    lane.publish()
    lane.finish()

    assert peek(region) == 7
    lane.close()


@pytest.mark.promise(
    "GPUs in the runtime",
    "The driver is given a stream's handle until the holder of an array that was taken on it "
    "releases the array, and no longer. CuPy's streams live that long.",
)
def test_a_reader_s_stream_is_named_until_he_lets_go_and_may_be_destroyed_then(region: DeviceRegion) -> None:
    lane, stream = DeviceLane(region.device), region.device.new_stream()
    array = DeviceArray.over(block(region, lane), 0, UINT8, (SIZE,))
    assert array.lease is not None
    capsules = [array.__dlpack__(stream=stream) for _ in range(2)]
    fill(region, 7, stream)

    capsules.pop()
    assert array.lease.streams == {stream}
    capsules.pop()
    assert array.lease.streams == set()
    region.device.close_stream(stream)

    assert (array.to_host() == 7).all()
    lane.close()


class CupyStream:
    """A stream that goes with its object, as CuPy's do."""

    def __init__(self, where: Device) -> None:
        self._where = where
        self.ptr = where.new_stream()

    def __del__(self) -> None:
        self._where.close_stream(self.ptr)


@pytest.mark.promise("GPUs in the runtime", "The driver is given a …")
def test_a_stream_of_cupy_s_lives_as_long_as_what_was_taken_on_it(
    region: DeviceRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [CupyStream(region.device)]
    cuda = types.SimpleNamespace(get_current_stream=lambda _: current[0])
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    lane, gone = DeviceLane(region.device), weakref.ref(current[0])
    array = DeviceArray.over(block(region, lane), 0, UINT8, (SIZE,))
    capsule = array.__dlpack__(stream=current[0].ptr)
    fill(region, 7, current[0].ptr)
    cuda.get_current_stream = None
    current.clear()
    assert gone() is not None

    del capsule
    assert gone() is None
    assert (array.to_host() == 7).all()
    lane.close()


def test_a_host_copy_comes_after_all_that_was_done(region: DeviceRegion) -> None:
    lane, stream = DeviceLane(region.device), region.device.new_stream()
    array = DeviceArray.over(block(region, lane), 0, UINT8, (SIZE,))
    array.enter(stream)
    fill(region, 7, stream)

    assert (array.to_host() == 7).all()
    lane.close()
    region.device.close_stream(stream)


def test_settled_is_what_nothing_is_done_to_any_more(region: DeviceRegion) -> None:
    lane = DeviceLane(region.device)
    array = DeviceArray.over(block(region, lane), 0, UINT8, (SIZE,))
    fill(region, 7, lane.stream)

    array.settle()

    assert peek(region) == 7
    lane.close()


def test_a_writer_goes_on_after_its_readers(region: DeviceRegion) -> None:
    lane, stream = DeviceLane(region.device), region.device.new_stream()
    array = DeviceArray.over(block(region), 0, UINT8, (SIZE,))
    array.enter(stream)
    array.enter(lane.stream)
    fill(region, 7, lane.stream)

    array.leave(lane.stream)
    fill_at_once(region, 8, stream)
    region.device.finish(stream)

    assert peek(region) == 8
    del array
    lane.close()


def test_the_owner_of_foreign_memory_goes_on_after_our_copy(region: DeviceRegion) -> None:
    lane, stream = DeviceLane(region.device), region.device.new_stream()
    own = DeviceArray.over(block(region), 0, UINT8, (SIZE,))
    array = DeviceArray.of(Interface(own, typestr="|u1", stream=stream))
    assert array is not None
    fill(region, 7, stream)

    array.enter(lane.stream)
    with late(region.device, lane.stream):
        lane.copy(region.address + SIZE, array.address, SIZE)
    array.leave(lane.stream)
    fill_at_once(region, 9, stream)
    region.device.finish(stream)

    assert region.read(SIZE, 2) == b"\x07\x07"
    lane.close()
    region.device.close_stream(stream)


@pytest.mark.parametrize("package", ["torch", "cupy"])
def test_a_library_is_asked_for_the_stream_that_it_works_on(
    region: DeviceRegion, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    stream = region.device.new_stream()
    current = types.SimpleNamespace(cuda_stream=stream, ptr=stream)
    cuda = types.SimpleNamespace(current_stream=lambda _: current, get_current_stream=lambda _: current)
    monkeypatch.setitem(sys.modules, package, types.SimpleNamespace(cuda=cuda))
    kind = type("Tensor", (Producer,), {"__module__": f"{package}._core"})

    array = DeviceArray.of(kind(DeviceArray.over(block(region), 0, UINT8, (SIZE,))))

    assert array is not None
    assert array.stream == stream
    region.device.close_stream(stream)


def test_a_context_is_left_as_it_was_found(fake: Fake) -> None:
    here = device(0)
    array = array_of(np.zeros(4, np.float32), here)
    pushed = fake.calls("cuCtxPushCurrent_v2") - fake.calls("cuCtxPopCurrent_v2")
    array.to_host()
    with pytest.raises(BadTensor):
        DeviceArray.of(Interface(array, mask=1))

    assert fake.calls("cuCtxPushCurrent_v2") - fake.calls("cuCtxPopCurrent_v2") == pushed == 0


def test_nothing_synchronises_the_whole_device(fake: Fake) -> None:
    array_of(np.zeros(4, np.float32), device(0)).to_host()

    assert fake.calls("cuCtxSynchronize") == 0


def test_capsules_of_every_datatype_come_back(gpu: Device) -> None:
    for (_, bits), datatype in dlpack.DATATYPES.items():
        raw = np.arange(bits // 4, dtype=np.uint8)
        array = array_of(raw, gpu, UINT8)
        assert array.lease is not None
        typed = DeviceArray.over(array.lease, 0, datatype, (2,))
        again = DeviceArray.of(typed.__dlpack__())
        assert again is not None
        assert (again.datatype, again.nbytes) == (datatype, bits // 4)
