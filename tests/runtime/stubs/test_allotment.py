"""Memory that a process is given counts for as long as the process may have it, and is given again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.ipc import region as regions
from moonpool.ipc.errors import Closed, OutOfMemory
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.stubs.allotment import Allotment, ModelMemory

pytestmark = pytest.mark.promise(
    "Containment",
    "All shared memory that a contained process was ever sent counts towards its limit until "
    "the process ends. Memory that comes back is emptied at once and used again.",
)

MiB = 1 << 20
Make = Callable[..., Allotment]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Allotment] = []

    def make(limit_bytes: int | None, *, is_contained: bool = True) -> Allotment:
        made.append(Allotment(limit_bytes, is_contained=is_contained))
        return made[-1]

    yield make
    for each in made:
        each.close()


def file_of(region: SharedRegion) -> int:
    return os.fstat(region.fd).st_ino


def pages_of(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_a_region_that_came_back_is_given_again_empty_and_under_another_number(make: Make) -> None:
    memory = make(8 * MiB)
    first = memory.region(0, 2 * MiB)
    first.memory()[:5] = b"words"
    number, file = first.id, file_of(first)
    memory.retire(first)
    assert first.is_closed

    again = memory.region(0, 2 * MiB)

    assert (file_of(again), again.id == number) == (file, False)
    assert bytes(again.memory()[:5]) == bytes(5)
    assert pages_of(again.fd) == 2 * MiB
    assert memory.given_bytes == 2 * MiB
    again.close()


def test_a_region_that_came_back_is_not_given_where_memory_is_short(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = make(8 * MiB)
    memory.retire(memory.region(0, 2 * MiB))
    with monkeypatch.context() as patch:
        patch.setattr(regions, "headroom_bytes", lambda: MiB)
        with pytest.raises(OutOfMemory, match="1048576 bytes are left"):
            memory.region(0, 2 * MiB)
    memory.region(0, 2 * MiB).close()
    assert memory.given_bytes == 2 * MiB


def test_returned_memory_is_emptied_though_the_process_has_kept_it(make: Make) -> None:
    memory = make(8 * MiB)
    region = memory.region(0, 2 * MiB)
    kept = os.dup(region.fd)
    try:
        memory.retire(region)
        assert pages_of(kept) == 0
    finally:
        os.close(kept)


def test_memory_of_a_contained_process_counts_after_its_return(make: Make) -> None:
    memory = make(8 * MiB)
    for size_bytes in (MiB, 2 * MiB, 3 * MiB):
        memory.retire(memory.region(0, size_bytes))
    assert not memory.is_worn

    with pytest.raises(OutOfMemory, match="6291456 in use elsewhere or kept by the process"):
        memory.region(0, 4 * MiB)

    # A new process would have room for the region.
    assert memory.is_worn
    assert memory.given_bytes == 6 * MiB
    memory.region(0, 3 * MiB).close()


def test_a_request_beyond_the_limit_wears_nothing_out(make: Make) -> None:
    memory = make(8 * MiB)
    kept = memory.region(0, 6 * MiB)
    with pytest.raises(OutOfMemory):
        memory.region(6 * MiB, 3 * MiB)
    assert not memory.is_worn
    kept.close()


def test_an_uncontained_process_counts_only_used_memory(make: Make) -> None:
    memory = make(8 * MiB, is_contained=False)
    for size_bytes in (MiB, 2 * MiB, 3 * MiB, 4 * MiB, 5 * MiB, 8 * MiB):
        memory.retire(memory.region(0, size_bytes))
    kept = memory.region(0, MiB)
    with pytest.raises(OutOfMemory):
        memory.region(MiB, 9 * MiB)
    kept.close()


def test_a_small_need_does_not_take_up_a_large_file(make: Make) -> None:
    memory = make(None)
    memory.retire(memory.region(0, 64 * MiB))
    small = memory.region(MiB, 4096)
    assert small.size_bytes == MiB
    small.close()


def test_descriptors_of_what_came_back_have_an_end(make: Make) -> None:
    memory = make(None)
    before = len(os.listdir("/proc/self/fd"))
    for pages in range(1, 100):
        memory.retire(memory.region(0, pages * 4096))
    assert len(os.listdir("/proc/self/fd")) <= before + 8


def test_memory_that_a_tritonserver_gives_counts_until_it_comes_back(make: Make) -> None:
    memory = make(8 * MiB)
    for number in range(3):
        size_bytes, fd = memory.give_elsewhere(number, 0, 2 * MiB)
        SharedRegion.adopt(number, size_bytes, fd).close()
    with pytest.raises(OutOfMemory):
        memory.region(0, 3 * MiB)
    memory.take_back(1)
    memory.take_back(1)
    memory.take_back(3)
    memory.region(0, 2 * MiB).close()
    assert memory.given_bytes == 6 * MiB


def test_without_a_descriptor_to_spare_nothing_is_given_and_nothing_lost(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    memory = make(8 * MiB)
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", fail)
        with pytest.raises(OutOfMemory, match="Too many open files"):
            memory.give_elsewhere(1, 0, 8 * MiB)
    memory.region(0, 8 * MiB).close()


def test_nothing_is_given_and_nothing_is_kept_once_the_process_has_ended(make: Make) -> None:
    before = len(os.listdir("/proc/self/fd"))
    memory = make(8 * MiB)
    out = memory.region(0, MiB)
    memory.retire(memory.region(MiB, MiB))
    _, fd = memory.give_elsewhere(1, 0, MiB)
    os.close(fd)

    memory.close()
    memory.close()

    with pytest.raises(Closed):
        memory.region(0, MiB)
    memory.retire(out)
    memory.take_back(1)
    assert len(os.listdir("/proc/self/fd")) == before


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 64)), max_size=60), st.integers(1, 128))
def test_no_more_memory_is_given_than_the_limit_in_any_order(steps: list[tuple[bool, int]], limit_pages: int) -> None:
    """Every file that was ever made is one that the process may have kept."""
    memory = Allotment(limit_pages * 4096, is_contained=True)
    out: list[SharedRegion] = []
    files: dict[int, int] = {}
    kept: list[int] = []
    try:
        for comes_back, pages in steps:
            if comes_back and out:
                memory.retire(out.pop(pages % len(out)))
                continue
            present_bytes = sum(each.size_bytes for each in out)
            try:
                out.append(memory.region(present_bytes, pages * 4096))
            except OutOfMemory:
                continue
            # Like the process, the test keeps each file, so the kernel does not use its number again.
            kept.append(os.dup(out[-1].fd))
            files[file_of(out[-1])] = out[-1].size_bytes
            assert sum(files.values()) == memory.given_bytes <= limit_pages * 4096
    finally:
        for region in out:
            region.close()
        memory.close()
        for fd in kept:
            os.close(fd)


def test_the_processes_of_a_contained_model_share_one_limit() -> None:
    of_model = ModelMemory()
    first, second, third = (Allotment(4 * MiB, is_contained=True, of_model=of_model) for _ in range(3))
    try:
        first.retire(first.region(0, 2 * MiB))
        second.region(0, MiB).close()
        # What the first one was sent counts, though nothing of it is in use any more.
        with pytest.raises(OutOfMemory, match="MOONPOOL_REGION_LIMIT_BYTES"):
            third.region(0, 2 * MiB)
        assert not third.is_worn
        third.region(0, MiB).close()
        with pytest.raises(OutOfMemory):
            second.region(MiB, MiB)
        # Its own file is given again, which takes nothing of the others.
        first.region(0, 2 * MiB).close()
        first.close()
        second.region(MiB, MiB).close()
        assert of_model.given_bytes == 3 * MiB
    finally:
        for each in (first, second, third):
            each.close()
    assert of_model.given_bytes == 0
