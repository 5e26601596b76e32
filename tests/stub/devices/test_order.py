"""Tests the order of work on a device. Earlier work starts late, so a missing order gives wrong values."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.gpu.cards import Fake, fake, fake_library
from tests.stub.devices.device_peer import Peer, floats, peer

from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.ipc.dlpack import look, make
from moonpool.ipc.messages import ORDINARY_MEMORY
from moonpool.stub import pb_utils
from moonpool.stub.pb_utils.tensor import Tensor

__all__ = ["fake", "fake_library", "peer"]

DELAY_US = 20_000


class Library:
    """Holds arrays of another library on a device, and the stream on which they are computed."""

    def __init__(self, fake: Fake) -> None:
        self._fake = fake
        self.device = device(0)
        self.stream = self.device.new_stream()
        self._regions: list[DeviceRegion] = []
        self.kept: object = None

    def computed(self, values: NDArray[np.float32]) -> Computed:
        """Return an array that will have these values later."""
        region = DeviceRegion.create(98, values.nbytes, self.device)
        self._regions.append(region)
        self.write_late(region.address, values, self.stream)
        return Computed(self, region, values.shape)

    def write_late(self, address: int, values: NDArray[np.float32], stream: int) -> None:
        """Queue work that writes these values after a while."""
        self._fake.delay(DELAY_US)
        self.write(address, values, stream)
        self._fake.delay(0)

    def write(self, address: int, values: NDArray[np.float32], stream: int) -> None:
        """Queue work that writes these values. It happens at once if it need not wait for anything."""
        for offset, byte in enumerate(values.tobytes()):
            with self.device as here:
                here.driver.cuMemsetD8Async(address + offset, byte, 1, stream)

    def taken(self, source: Any) -> int:
        """Return the address of a tensor's memory for work on the stream."""
        capsule = look(source.__dlpack__(stream=self.stream))
        assert capsule is not None
        capsule.take()
        self.kept = capsule
        return capsule.address

    def close(self) -> None:
        self.kept = None
        self.device.finish(self.stream)
        self.device.close_stream(self.stream)
        for region in self._regions:
            region.close()


class Computed:
    """Is an array that lets its consumer wait for the stream on which it is computed."""

    def __init__(self, library: Library, region: DeviceRegion, shape: tuple[int, ...]) -> None:
        self._library = library
        self._region = region
        self._shape = shape

    def __dlpack__(self, *, stream: int, max_version: object = None) -> object:
        if stream > 0:
            self._library.device.order(self._library.stream, stream)
        return make(self, self._region.address, (2, 0), 11, self._shape)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def at(address: int) -> list[float]:
    """Return two numbers as they are now. The memory of the fake device is ordinary memory."""
    return list((ctypes.c_float * 2).from_address(address))


@pytest.fixture
def library(peer: Peer, fake: Fake) -> Iterator[Library]:
    """Make a peer that has sent a batch, too."""
    peer.lend(X=floats(1, 2))
    made = Library(fake)
    yield made
    made.close()


@pytest.mark.promise(
    "Device memory in a model",
    "An output that a library computes on its own stream is sent complete, and not overwritten "
    "before it was copied; a capsule that names no stream is ready.",
)
def test_an_output_is_sent_as_its_library_computes_it(peer: Peer, library: Library) -> None:
    tensor = Tensor.from_dlpack("Y", library.computed(floats(3, 4)))
    blocks, rows = peer.answer(tensor)
    peer.lanes[0].receive()
    peer.lanes[0].finish()
    assert peer.read(blocks[0], rows[0]).tolist() == [3, 4]


def test_an_output_is_fetched_when_its_library_has_computed_it(peer: Peer, library: Library) -> None:
    tensor = Tensor.from_dlpack("Y", library.computed(floats(3, 4)))
    blocks, rows = peer.answer(tensor, memory=ORDINARY_MEMORY)
    assert peer.read(blocks[0], rows[0]).tolist() == [3, 4]


@pytest.mark.promise("Device memory in a model", "An output that a library computes …")
def test_memory_of_the_stub_s_is_sent_as_it_is_filled(peer: Peer, library: Library) -> None:
    place = pb_utils.empty((2,), np.float32, device=0)
    library.write_late(library.taken(place), floats(5, 6), library.stream)
    blocks, rows = peer.answer(Tensor.from_dlpack("Y", place))
    peer.lanes[0].receive()
    peer.lanes[0].finish()
    assert peer.read(blocks[0], rows[0]).tolist() == [5, 6]


def test_memory_of_the_stub_s_is_fetched_when_it_is_filled(peer: Peer, library: Library) -> None:
    place = pb_utils.empty((2,), np.float32, device=0)
    library.write_late(library.taken(place), floats(5, 6), library.stream)
    blocks, rows = peer.answer(Tensor.from_dlpack("Y", place), memory=ORDINARY_MEMORY)
    assert peer.read(blocks[0], rows[0]).tolist() == [5, 6]


@pytest.mark.promise("Device memory in a model", "An output that a library computes …")
@pytest.mark.usefixtures("peer")
def test_a_capsule_that_names_no_stream_is_ready(library: Library) -> None:
    place = pb_utils.empty((2,), np.float32, device=0)
    library.write_late(library.taken(place), floats(7, 8), library.stream)
    found = look(Tensor.from_dlpack("Y", place).to_dlpack())
    assert found is not None
    assert at(found.address) == [7, 8]


def test_a_block_that_a_model_still_writes_goes_back_when_that_is_done(peer: Peer, library: Library) -> None:
    x = peer.requests[0].inputs()[0]
    address = library.taken(x)
    library.write_late(address, floats(9, 9), library.stream)
    library.kept = None
    del x
    peer.requests.clear()
    peer.batch.end()
    peer.regions.publish()
    peer.lanes[0].receive()
    peer.lanes[0].finish()
    region = peer.made[50]
    assert isinstance(region, DeviceRegion)
    assert np.frombuffer(region.read(4096, 8), np.float32).tolist() == [9, 9]


@pytest.mark.promise("Device memory in a model", "An output that a library computes …")
def test_a_library_does_not_overwrite_the_source_of_a_copy(peer: Peer, library: Library, fake: Fake) -> None:
    array = library.computed(floats(1, 2))
    tensor = Tensor.from_dlpack("Y", array)
    source = tensor._data
    assert isinstance(source, DeviceArray)
    source.stream = library.stream
    library.device.finish(library.stream)
    fake.delay(DELAY_US)
    blocks, rows = peer.answer(tensor, publishes=False)
    fake.delay(0)
    library.write(source.address, floats(0, 0), library.stream)
    peer.regions.publish()
    peer.lanes[0].finish()
    assert peer.read(blocks[0], rows[0]).tolist() == [1, 2]
