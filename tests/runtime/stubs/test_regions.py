"""Memory that callers write their inputs into."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from moonpool.ipc.errors import Closed, OutOfMemory
from moonpool.ipc.memory import lease_of, offset_in
from moonpool.runtime.stubs.allotment import Allotment
from moonpool.runtime.stubs.regions import CallerMemory

MiB = 1 << 20
F32 = np.dtype(np.float32)


@pytest.fixture
def memory() -> Iterator[CallerMemory]:
    memory = CallerMemory(None)
    yield memory
    memory.close()


def empty(memory: CallerMemory, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    return memory.empty((count,), F32, 4 * count)


def test_regions_have_numbers_of_their_own() -> None:
    regions = [Allotment(None, is_contained=False).region(0, 4096) for _ in range(5)]
    assert len({region.id for region in regions}) == 5
    for region in regions:
        region.close()


def test_a_region_over_the_limit_is_refused() -> None:
    with pytest.raises(OutOfMemory, match="MOONPOOL_REGION_LIMIT_BYTES"):
        Allotment(8192, is_contained=False).region(8192, 4096)


def test_arrays_do_not_overlap_and_can_be_written(memory: CallerMemory) -> None:
    arrays = [empty(memory, 100) for _ in range(50)]
    for i, array in enumerate(arrays):
        array[...] = i
    assert all((array == i).all() for i, array in enumerate(arrays))
    assert all(array.flags.writeable and array.flags.aligned for array in arrays)


def test_shape_and_dtype_are_what_was_asked_for(memory: CallerMemory) -> None:
    array = memory.empty((2, 3), np.dtype(np.int16), 12)
    assert array.shape == (2, 3)
    assert array.dtype == np.int16
    assert memory.empty((), F32, 4).shape == ()
    assert memory.empty((0, 7), F32, 0).shape == (0, 7)


def test_an_array_and_its_views_are_found_by_their_lease(memory: CallerMemory) -> None:
    array = empty(memory, 100)
    for view, offset in ((array, 0), (array[10:], 40), (array.reshape(10, 10)[2], 80)):
        lease = lease_of(view)
        assert lease is not None
        found = memory.find(lease)
        assert found is not None
        region, block = found
        assert block.size_bytes >= 400
        assert offset_in(lease, view) == offset
        assert region.id in memory


def test_memory_of_others_is_not_found(memory: CallerMemory) -> None:
    other = CallerMemory(None)
    lease = lease_of(empty(other, 4))
    assert lease is not None
    assert memory.find(lease) is None
    other.close()


def test_memory_is_used_again_when_the_last_view_is_gone(memory: CallerMemory) -> None:
    first = empty(memory, 1000)
    where = first.__array_interface__["data"][0]
    view = first[5:]
    del first
    assert empty(memory, 1000).__array_interface__["data"][0] != where
    del view
    assert empty(memory, 1000).__array_interface__["data"][0] == where
    size = memory.size_bytes
    for _ in range(2000):
        empty(memory, 1000)
    assert memory.size_bytes == size


def test_it_grows_when_it_must_and_says_so_when_it_may_not() -> None:
    memory = CallerMemory(4 * MiB)
    kept = [empty(memory, MiB // 4) for _ in range(3)]
    assert memory.size_bytes >= 3 * MiB
    with pytest.raises(OutOfMemory, match="MOONPOOL_REGION_LIMIT_BYTES"):
        empty(memory, MiB)
    kept.append(empty(memory, MiB // 8))
    memory.close()


def test_threads_may_take_and_drop_at_the_same_time(memory: CallerMemory) -> None:
    failures: list[str] = []

    def work(number: int) -> None:
        for _ in range(300):
            array = empty(memory, 64)
            array[...] = number
            if not (array == number).all():
                failures.append(f"{number} found {array}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert memory.size_bytes <= 4 * MiB


def test_regions_beyond_the_first_are_given_up_when_nothing_lay_in_them_for_a_while(memory: CallerMemory) -> None:
    small = empty(memory, 16)
    before = memory.size_bytes
    large = empty(memory, 8 * MiB)
    lease = lease_of(large)
    assert lease is not None
    found = memory.find(lease)
    assert found is not None
    number = found[0].id
    memory.tidy(0.0)
    memory.tidy(1000.0)
    assert number in memory  # the array still uses it
    del large, lease, found
    gc.collect()
    memory.tidy(1000.0)
    assert number in memory
    memory.tidy(1000.1)
    assert number in memory  # it has not been idle long enough
    memory.tidy(2000.0)
    assert number not in memory
    assert memory.size_bytes == before
    small[...] = 3
    empty(memory, 16)[...] = 4
    assert (small == 3).all()


@pytest.mark.promise(
    "Limits",
    "The first region by which memory has grown is kept for a minute, others for five seconds. If memory would be "
    "refused otherwise, they are given up at once.",
)
def test_what_is_kept_for_later_makes_room_at_the_limit() -> None:
    memory = CallerMemory(16 * MiB)
    try:
        kept = empty(memory, 16)
        empty(memory, 2 * MiB)
        memory.tidy(0.0)
        memory.tidy(59.0)
        assert memory.size_bytes > 8 * MiB
        empty(memory, 3 * MiB)
        assert memory.size_bytes < 16 * MiB
        del kept
    finally:
        memory.close()


def test_a_region_that_was_used_meanwhile_is_kept(memory: CallerMemory) -> None:
    kept = empty(memory, 16)
    empty(memory, 8 * MiB)
    size = memory.size_bytes
    for now in (0.0, 1000.0, 2000.0):
        memory.tidy(now)
        empty(memory, 8 * MiB)
    assert memory.size_bytes == size
    del kept


def test_arrays_stay_valid_after_close(memory: CallerMemory) -> None:
    array = empty(memory, 1000)
    memory.close()
    memory.close()
    array[...] = 7
    assert (array == 7).all()
    with pytest.raises(Closed, match="unloaded"):
        empty(memory, 1)
