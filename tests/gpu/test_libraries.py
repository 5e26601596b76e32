"""PyTorch and CuPy on moonpool's device memory, and theirs in moonpool: on a card, where either is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.gpu.late import SIZE, block, late
from tests.gpu.libraries import imported

from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.lane import DeviceLane
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.ipc.tensors import CODES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("card"),
    # Warnings of libraries are not errors here.
    pytest.mark.filterwarnings("default"),
]

FP32 = CODES["FP32"]
COUNT = SIZE // 4


class Library(NamedTuple):
    """One array library, by the operations that the tests need."""

    take: Callable[[Any], Any]
    take_by_interface: Callable[[Any], Any]
    ones: Callable[[], Any]
    address: Callable[[Any], int]
    values: Callable[[Any], np.ndarray]
    new_stream: Callable[[], Any]
    number: Callable[[Any], int]


def _torch() -> Library:
    torch = imported("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch cannot use the GPU")
    return Library(
        torch.from_dlpack,
        lambda source: torch.as_tensor(source, device="cuda:0"),
        lambda: torch.ones(COUNT, device="cuda:0"),
        lambda array: int(array.data_ptr()),
        lambda array: array.cpu().numpy(),
        lambda: torch.cuda.stream(torch.cuda.Stream(0)),
        lambda context: int(context.stream.cuda_stream),
    )


def _cupy() -> Library:
    cupy = imported("cupy")
    return Library(
        cupy.from_dlpack,
        cupy.asarray,
        lambda: cupy.ones(COUNT, cupy.float32),
        lambda array: int(array.data.ptr),
        cupy.asnumpy,
        lambda: cupy.cuda.Stream(non_blocking=True),
        lambda stream: int(stream.ptr),
    )


@pytest.fixture(scope="module", params=[_torch, _cupy], ids=["torch", "cupy"])
def library(request: pytest.FixtureRequest) -> Library:
    made: Library = request.param()
    # The library loads its kernels when it first needs them.
    made.values(made.ones() * 2 + 1)
    return made


@pytest.fixture
def region(card: None) -> Iterator[DeviceRegion]:  # noqa: ARG001 - it drives the device
    made = DeviceRegion.create(7, SIZE, device(0))
    yield made
    made.close()


def array_in(region: DeviceRegion, lane: DeviceLane | None = None) -> DeviceArray:
    return DeviceArray.over(block(region, lane), 0, FP32, (COUNT,))


def test_our_memory_is_taken_without_a_copy(region: DeviceRegion, library: Library) -> None:
    region.write(0, np.arange(COUNT, dtype=np.float32))
    array = array_in(region)

    for taken in (library.take(array), library.take_by_interface(array)):
        assert library.address(taken) == region.address
        assert library.values(taken).tolist() == list(range(COUNT))


def test_a_library_writes_into_our_memory(region: DeviceRegion, library: Library) -> None:
    array = array_in(region)
    taken = library.take(array)

    taken[:] = 5
    seen = array.to_host()

    assert (seen == 5).all()


def test_a_library_s_array_is_seen_without_a_copy(library: Library) -> None:
    source = library.ones()

    array = DeviceArray.of(source)

    assert array is not None
    assert (array.address, array.shape, array.datatype) == (library.address(source), (COUNT,), FP32)
    assert (array.to_host() == 1).all()


def test_a_library_s_stream_waits_for_our_lane(region: DeviceRegion, library: Library) -> None:
    lane = DeviceLane(region.device)
    array = array_in(region, lane)
    stream = library.new_stream()
    with late(region.device, lane.stream):
        lane.from_host(array.address, np.full(COUNT, 3, np.float32), wait=False)

    with stream:
        seen = library.values(library.take(array) + 1)

    assert (seen == 4).all()
    lane.close()


def test_our_lane_waits_for_a_library_s_stream(region: DeviceRegion, library: Library) -> None:
    lane = DeviceLane(region.device)
    stream = library.new_stream()
    with stream:
        with late(region.device, library.number(stream)):
            source = library.ones() * 6
        array = DeviceArray.of(source, lane.stream)
        assert array is not None
        array.enter(lane.stream)

    lane.copy(region.address, array.address, array.nbytes)
    lane.finish()

    assert np.frombuffer(region.read(0, SIZE), np.float32).tolist() == [6.0] * COUNT
    lane.close()
