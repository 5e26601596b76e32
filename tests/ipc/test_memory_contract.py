"""The memory contract, tested on every kind of memory.

For another kind of memory, add a line to `HOST` or to `DEVICE`. Promises about memory that the processor can read are
tested on `host_region`, the others on `region`.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.heap_region import HeapRegion

from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.region import DeviceLease, DeviceRegion
from moonpool.ipc.errors import Closed
from moonpool.ipc.memory import Lease, Region, lease_of, offset_in
from moonpool.ipc.region import SharedRegion
from moonpool.ipc.tensors import BF16, DTYPES, code_of

pytestmark = pytest.mark.promise(
    "Device memory",
    "Regions on a device keep the same memory contract as those in ordinary memory: size, "
    "zeros, bytes in C order, leases that release their block once, memory that stays "
    "valid after close.",
)

ID = 7
SIZE_BYTES = 8192


def _heap() -> Region:
    return HeapRegion(ID, SIZE_BYTES)


def _created() -> Region:
    return SharedRegion.create(ID, SIZE_BYTES)


def _adopted() -> Region:
    made = SharedRegion.create(ID, SIZE_BYTES)
    region = SharedRegion.adopt(ID, SIZE_BYTES, os.dup(made.fd))
    made.close()
    return region


def _adopted_and_forgotten() -> Region:
    region = SharedRegion.adopt(ID, SIZE_BYTES, SharedRegion.create(ID, SIZE_BYTES).fd)
    region.forget_fd()
    return region


def _on_device() -> Region:
    return DeviceRegion.create(ID, SIZE_BYTES, device(0))


def _adopted_on_device() -> Region:
    made = DeviceRegion.create(ID, SIZE_BYTES, device(0))
    region = DeviceRegion.adopt(ID, made.size_bytes, device(0), os.dup(made.fd), b"")
    made.close()
    return region


def _on_device_in_the_older_way() -> Region:
    device(0).why_no_descriptors = "this test has none"
    return DeviceRegion.create(ID, SIZE_BYTES, device(0))


HOST: dict[str, Callable[[], Region]] = {
    "heap": _heap,
    "created": _created,
    "adopted": _adopted,
    "adopted, descriptor forgotten": _adopted_and_forgotten,
}
DEVICE: dict[str, Callable[[], Region]] = {
    "on a device": _on_device,
    "on a device, adopted": _adopted_on_device,
    "on a device, in the older way": _on_device_in_the_older_way,
}
EVERY = [
    *(pytest.param((make, None), id=name) for name, make in HOST.items()),
    *(pytest.param((make, "fake"), id=f"{name}, fake") for name, make in DEVICE.items()),
    *(pytest.param((make, "card"), id=name, marks=pytest.mark.gpu) for name, make in DEVICE.items()),
]


@pytest.fixture(params=list(HOST.values()), ids=list(HOST))
def host_region(request: pytest.FixtureRequest) -> Iterator[Region]:
    made: Region = request.param()
    yield made
    made.close()


@pytest.fixture(params=EVERY)
def region(request: pytest.FixtureRequest) -> Iterator[Region]:
    make, where = request.param
    if where is not None:
        request.getfixturevalue(where)
    made: Region = make()
    yield made
    made.close()


def contents(region: Region, offset: int = 0, size_bytes: int | None = None) -> bytes:
    """The bytes there; all from `offset` on, unless told."""
    size_bytes = region.size_bytes - offset if size_bytes is None else size_bytes
    if isinstance(region, DeviceRegion):
        return region.read(offset, size_bytes)
    return bytes(region.memory()[offset : offset + size_bytes])


def viewed(lease: Lease | DeviceLease, dtype: type, count: int, offset: int = 0) -> Any:
    """An array in a block."""
    if isinstance(lease, DeviceLease):
        return DeviceArray.over(lease, offset, code_of(np.dtype(dtype)), (count,))
    return np.ndarray((count,), dtype, lease, offset)


def values(array: Any) -> list[Any]:
    """Return the contents of an array."""
    return list((array.to_host() if isinstance(array, DeviceArray) else array).tolist())


class Returns:
    """Counts what leases give back."""

    def __init__(self) -> None:
        self.tokens: list[object] = []

    def __call__(self, token: object) -> None:
        self.tokens.append(token)


@pytest.fixture
def returned() -> Returns:
    return Returns()


def test_a_region_tells_its_number_and_its_size(region: Region) -> None:
    assert region.id == ID
    # A device gives out whole pages, and its pages are large.
    assert region.size_bytes >= SIZE_BYTES
    assert len(contents(region)) == region.size_bytes


def test_a_new_region_is_all_zeros_and_writable(region: Region) -> None:
    assert not any(contents(region))

    region.write(region.size_bytes - 1, np.array([255], np.uint8))

    assert contents(region, region.size_bytes - 1) == b"\xff"


ARRAYS: dict[str, np.ndarray] = {
    "a row": np.arange(4, dtype=np.float32),
    "no dimensions": np.array(7, np.int64),
    "nothing": np.empty((2, 0, 3), np.uint16),
    "two dimensions": np.arange(20, dtype=np.float16).reshape(4, 5),
    "read-only": np.frombuffer(b"abcdefgh", np.uint8),
    "BF16": np.arange(6).astype(DTYPES[BF16]),
    "every other": np.arange(48, dtype=np.int16).reshape(6, 8)[::2, ::3],
    "columns first": np.asfortranarray(np.arange(20, dtype=np.float64).reshape(4, 5)),
}


@pytest.mark.parametrize("small_bytes", [0, 16384], ids=["as a large one", "as a small one"])
def test_an_array_is_written_in_c_order(region: Region, small_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.ipc.region._SMALL", small_bytes)
    for name, array in ARRAYS.items():
        region.write(0, np.zeros(region.size_bytes, np.uint8))
        region.write(64, array)

        end = 64 + array.nbytes
        assert contents(region, 64, array.nbytes) == array.tobytes(), name
        assert contents(region, 0, 64) == bytes(64), name
        assert not any(contents(region, end)), name


def test_a_lease_is_the_bytes_of_its_block(host_region: Region, returned: Returns) -> None:
    host_region.memory()[128:132] = b"moon"

    lease = host_region.lease(128, 64, returned, "block")

    assert lease.dtype == np.uint8
    assert (lease.shape, lease.nbytes) == ((64,), 64)
    assert lease[:4].tobytes() == b"moon"


def test_writes_through_a_view_of_a_lease_are_in_the_region(host_region: Region, returned: Returns) -> None:
    lease = host_region.lease(64, 32, returned, "block")
    tensor = np.ndarray((2, 2), np.float32, lease, 16)

    tensor[...] = [[1, 2], [3, 4]]

    assert np.frombuffer(host_region.memory(), np.float32, 4, 80).tolist() == [1, 2, 3, 4]


def test_a_lease_may_reach_to_the_last_byte(region: Region, returned: Returns) -> None:
    region.write(region.size_bytes - 1, np.array([9], np.uint8))

    lease = region.lease(region.size_bytes - 64, 64, returned, "last")

    assert values(viewed(lease, np.uint8, 1, 63)) == [9]


def test_a_lease_of_nothing_at_the_end_is_a_lease(region: Region, returned: Returns) -> None:
    lease = region.lease(region.size_bytes, 0, returned, "empty")
    assert lease.size == 0
    del lease

    assert returned.tokens == ["empty"]


def test_a_lease_beyond_the_region_is_refused_and_gives_nothing_back(region: Region, returned: Returns) -> None:
    for offset, size_bytes in [(0, 1), (0, 9), (-8, 9), (2**62, 64), (64, 2**62)]:
        with pytest.raises(TypeError):
            region.lease(region.size_bytes + offset, size_bytes, returned, "block")
    gc.collect()

    assert returned.tokens == []


@pytest.mark.promise("Requests", "An output's memory is released once, when its last view is collected.")
def test_a_lease_gives_its_block_back_once_when_it_is_dropped(region: Region, returned: Returns) -> None:
    token = (ID, 64)
    lease = region.lease(64, 64, returned, token)
    assert returned.tokens == []
    del lease
    gc.collect()

    assert returned.tokens == [token]
    assert returned.tokens[0] is token


def test_a_lease_lives_as_long_as_its_last_view(region: Region, returned: Returns) -> None:
    lease = region.lease(0, 64, returned, "block")
    first = viewed(lease, np.float32, 8)
    second = viewed(lease, np.float32, 8, 32)
    del lease
    del first
    assert returned.tokens == []
    del second

    assert returned.tokens == ["block"]


@pytest.mark.promise("Requests", "An output's memory is released once, …")
@pytest.mark.parametrize(
    "derive",
    [
        lambda array: array[1:],
        lambda array: array.reshape(2, -1),
        lambda array: array.view(np.int32),
        lambda array: array.T,
        lambda array: np.asarray(array),
        lambda array: np.frombuffer(array, np.uint8),
        lambda array: memoryview(array),
        lambda array: array.flat,
        lambda array: np.broadcast_to(array, (3, *array.shape)),
        lambda array: np.from_dlpack(array),
    ],
    ids=["slice", "reshape", "view", "T", "asarray", "frombuffer", "memoryview", "flat",
         "broadcast", "dlpack"],
)  # fmt: skip
def test_views_of_views_hold_the_block(
    host_region: Region, returned: Returns, derive: Callable[[object], object]
) -> None:
    lease = host_region.lease(0, 64, returned, "block")
    tensor = np.ndarray((16,), np.float32, lease)
    derived = derive(tensor[...][0:16])
    del lease, tensor
    gc.collect()
    assert returned.tokens == []
    del derived
    gc.collect()

    assert returned.tokens == ["block"]


def test_slices_and_copies_of_a_lease_give_nothing_back(host_region: Region, returned: Returns) -> None:
    lease = host_region.lease(0, 64, returned, "block")
    copy = lease.copy()
    total = lease + lease

    for short_lived in (lease[:8], lease[8:][:8], lease.view(np.int64), copy, total):
        assert isinstance(short_lived, Lease)
    del short_lived, copy, total
    gc.collect()
    assert returned.tokens == []
    del lease

    assert returned.tokens == ["block"]


def test_a_lease_in_a_reference_cycle_comes_back_with_the_collector(region: Region, returned: Returns) -> None:
    cycle: list[object] = [region.lease(0, 64, returned, "block")]
    cycle.append(cycle)
    del cycle
    gc.collect()

    assert returned.tokens == ["block"]


def test_a_lease_may_be_dropped_by_another_thread(region: Region) -> None:
    dropped_by: list[object] = []
    box: list[object] = [region.lease(0, 64, lambda _: dropped_by.append(threading.current_thread()), "block")]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()

    assert dropped_by == [thread]


def test_views_dropped_by_many_threads_give_the_block_back_once(region: Region, returned: Returns) -> None:
    lease = region.lease(0, 64, returned, "block")
    boxes = [[viewed(lease, np.uint8, 64 - i, i), viewed(lease, np.uint8, 4, i)] for i in range(8)]
    del lease
    start = threading.Barrier(8)

    def drop(box: list[Any]) -> None:
        start.wait(60)
        box.clear()

    threads = [threading.Thread(target=drop, args=(box,)) for box in boxes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert returned.tokens == ["block"]


def test_two_leases_on_one_block_each_give_it_back(region: Region, returned: Returns) -> None:
    first = region.lease(0, 64, returned, "first")
    second = region.lease(0, 64, returned, "second")
    assert (first.region, first.offset, first.size) == (region, 0, 64)
    assert (second.region, second.offset, second.size) == (region, 0, 64)
    del first
    assert returned.tokens == ["first"]
    del second

    assert returned.tokens == ["first", "second"]


def test_a_closed_region_refuses(region: Region, returned: Returns) -> None:
    region.close()

    with pytest.raises(Closed, match=f"region {ID} was closed"):
        contents(region, 0, 1)
    with pytest.raises(Closed, match=f"region {ID} was closed"):
        region.lease(0, 64, returned, "block")
    with pytest.raises(Closed, match=f"region {ID} was closed"):
        region.write(0, np.zeros(4))
    assert region.buffer is None
    assert returned.tokens == []


def test_the_memory_of_a_lease_stays_valid_after_close(region: Region, returned: Returns) -> None:
    region.write(64, np.arange(8))
    tensor = viewed(region.lease(64, 64, returned, "block"), np.int64, 8)
    region.close()
    gc.collect()

    assert values(tensor) == list(range(8))
    assert returned.tokens == []
    del tensor
    assert returned.tokens == ["block"]


def test_a_lease_may_be_written_to_after_its_region_was_closed(host_region: Region, returned: Returns) -> None:
    tensor = viewed(host_region.lease(64, 64, returned, "block"), np.int64, 8)
    host_region.close()
    gc.collect()

    tensor[...] = np.arange(8)
    tensor[0] = 41

    assert tensor.sum() == 41 + sum(range(8))


def test_a_plain_view_of_a_closed_region_stays_valid(host_region: Region) -> None:
    view = np.ndarray((SIZE_BYTES,), np.uint8, host_region.buffer)
    host_region.close()
    gc.collect()

    view[...] = 1
    assert int(view.sum()) == SIZE_BYTES


def test_the_lease_of_an_array_is_found_through_all_its_views(host_region: Region, returned: Returns) -> None:
    lease = host_region.lease(64, 64, returned, "block")
    tensor = np.ndarray((4,), np.float32, lease, 16)
    plain = lease[4:].view(np.ndarray)

    for array in (tensor, tensor[1:], tensor.reshape(2, 2)[1:].T, lease[8:], plain, plain[2:]):
        assert lease_of(array) is lease


def test_ordinary_memory_has_no_lease(host_region: Region, returned: Returns) -> None:
    lease = host_region.lease(0, 64, returned, "block")
    tensor = np.ndarray((4,), np.float32, lease)

    assert lease_of(np.zeros(3)) is None
    assert lease_of(np.zeros(3)[1:]) is None
    assert lease_of(np.frombuffer(host_region.memory(), np.uint8)) is None
    assert lease_of(tensor.copy()[1:]) is None
    assert lease_of((tensor + 1)[1:]) is None
    # This array is of the class, but has no block.
    assert lease_of(lease.copy()[1:].view(np.ndarray)) is None


def test_the_offset_of_a_view_in_its_lease_is_told(host_region: Region, returned: Returns) -> None:
    lease = host_region.lease(128, 64, returned, "block")
    tensor = np.ndarray((12,), np.float32, lease, 16)

    assert offset_in(lease, lease) == 0
    assert offset_in(lease, tensor) == 16
    assert offset_in(lease, tensor[3:]) == 28
    assert offset_in(lease, tensor.reshape(3, 4)[:, 1:]) == 20
