"""Memory is lent to a stub, handed on by it, and forgotten by it once it is gone."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest

from moonpool.ipc.errors import OutOfMemory, RemoteProtocolError
from moonpool.ipc.memory import SHARED_BYTES, lease_of
from moonpool.ipc.messages import Side
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.stubs.allotment import Allotment
from moonpool.runtime.stubs.borrowed_blocks import BorrowedBlocks
from moonpool.runtime.stubs.regions import ClientRegion


class Borrower:
    """The borrowed blocks of one stub, and memory of another one."""

    def __init__(self) -> None:
        self.announced: list[int] = []
        self.told: list[int] = []
        self.borrowed_blocks = self.new_loans()
        self.other = Allotment(None, is_contained=False).region(0, 4 * SHARED_BYTES)
        self.returned: deque[object] = deque()

    def new_loans(self, *, is_private: bool = False) -> BorrowedBlocks:
        memory = Allotment(None, is_contained=is_private)
        first = memory.region(0, 1 << 16)
        return BorrowedBlocks(self._announce, first, memory, self.told.append, is_private=is_private)

    def _announce(self, region: SharedRegion, writer: Side) -> None:
        assert writer is Side.RUNTIME
        self.announced.append(region.id)

    def array(self, size_bytes: int = SHARED_BYTES) -> np.ndarray:
        """An array in the memory of the other stub."""
        lease = self.other.lease(64, size_bytes, self.returned.append, "place")
        return np.ndarray((size_bytes,), np.uint8, lease)

    def tidy(self) -> list[int]:
        self.told.clear()
        self.borrowed_blocks.tidy(0.0)
        return self.told

    def close(self) -> None:
        self.borrowed_blocks.close()
        self.other.close()


@pytest.mark.promise("The sandbox: `strict`", "Shared memory that …")
def test_request_regions_that_a_stub_may_have_kept_are_counted_and_given_again() -> None:
    memory = Allotment(1 << 20, is_contained=True)
    sent: list[int] = []

    def announce(region: SharedRegion, _: Side) -> None:
        sent.append(os.fstat(region.fd).st_ino)

    told: list[int] = []
    borrowed_blocks = BorrowedBlocks(announce, memory.region(0, 1 << 16), memory, told.append, is_private=True)
    try:
        for number in range(20):
            borrowed_blocks.allocate(1 << 18)
            borrowed_blocks.end_batch(())
            borrowed_blocks.tidy(1000.0 * number)
            borrowed_blocks.tidy(1000.0 * number + 60.0)
        assert len(sent) == 20
        assert len(set(sent)) == 1
        assert memory.given_bytes == (1 << 16) + (1 << 18)
    finally:
        borrowed_blocks.close()


@pytest.fixture
def borrower() -> Iterator[Borrower]:
    borrower = Borrower()
    yield borrower
    borrower.close()


def test_large_memory_of_another_stub_is_lent_and_announced_once(borrower: Borrower) -> None:
    for _ in range(3):
        lent = borrower.borrowed_blocks.lend(borrower.array(), keep=True)
        assert lent == ([borrower.other.id, 64, SHARED_BYTES], 0)
    assert borrower.announced == [borrower.other.id]
    assert not borrower.returned

    borrower.borrowed_blocks.take_back([(borrower.other.id, 64)] * 3)
    assert list(borrower.returned) == ["place"] * 3


def test_a_part_of_an_array_is_lent_as_its_block_and_where_it_lies_in_it(borrower: Borrower) -> None:
    part = borrower.array(2 * SHARED_BYTES)[128 : 128 + SHARED_BYTES]
    assert borrower.borrowed_blocks.lend(part) == ([borrower.other.id, 64, 2 * SHARED_BYTES], 128)


@pytest.mark.parametrize("what", ["small", "elsewhere", "scattered"])
def test_small_and_scattered_arrays_are_copied(borrower: Borrower, what: str) -> None:
    arrays = {
        "small": borrower.array(SHARED_BYTES - 1),
        "elsewhere": np.zeros(SHARED_BYTES, np.uint8),
        "scattered": borrower.array(2 * SHARED_BYTES)[::2],
    }
    assert borrower.borrowed_blocks.lend(arrays[what]) is None
    assert borrower.announced == []


def test_memory_of_a_private_stub_is_seen_by_nobody_and_it_sees_nobodys(borrower: Borrower) -> None:
    private = borrower.new_loans(is_private=True)
    assert private.lend(borrower.array()) is None
    block = private.allocate(SHARED_BYTES)
    lease = block.region.lease(block.offset, SHARED_BYTES, borrower.returned.append, None)
    assert borrower.borrowed_blocks.lend(np.ndarray((SHARED_BYTES,), np.uint8, lease)) is None
    private.close()


def test_memory_that_was_given_up_before_it_was_announced_is_copied(borrower: Borrower) -> None:
    array = borrower.array()
    borrower.other.close()
    assert borrower.borrowed_blocks.lend(array) is None


def test_the_stub_is_told_when_lent_memory_is_gone_and_nothing_of_it_is_lent(borrower: Borrower) -> None:
    lent = borrower.borrowed_blocks.lend(borrower.array(), keep=True)
    assert lent is not None
    assert borrower.tidy() == []
    borrower.other.close()
    assert borrower.tidy() == []
    borrower.borrowed_blocks.take_back([lent[0]])
    assert borrower.tidy() == [borrower.other.id]
    assert borrower.tidy() == []


def test_a_borrowed_block_can_be_handed_on_after_its_region_was_closed(borrower: Borrower) -> None:
    array = borrower.array()
    array[:] = 7
    borrower.borrowed_blocks.lend(array, keep=True)
    del array
    borrower.other.close()

    handed_on = borrower.borrowed_blocks.open(borrower.other.id, 64, SHARED_BYTES)
    borrower.borrowed_blocks.take_back([(borrower.other.id, 64)])
    assert not borrower.returned
    assert handed_on.min() == handed_on.max() == 7
    assert lease_of(handed_on[:8]) is handed_on
    del handed_on
    assert list(borrower.returned) == ["place"]


def test_a_block_of_ours_is_free_when_the_stub_and_all_others_let_go_of_it(borrower: Borrower) -> None:
    borrowed_blocks = borrower.borrowed_blocks
    block = borrowed_blocks.allocate(100, keep=True)
    handed_on = borrowed_blocks.open(block.region.id, block.offset, 100)
    borrowed_blocks.take_back([(block.region.id, block.offset)])
    assert borrowed_blocks.used_bytes > 0
    del handed_on
    assert borrowed_blocks.used_bytes == 0


@pytest.mark.parametrize("size_bytes", [0, 1, 64])
def test_a_stub_can_neither_hand_on_nor_release_blocks_that_it_lacks(borrower: Borrower, size_bytes: int) -> None:
    block = borrower.borrowed_blocks.allocate(64, keep=True)
    place = (block.region.id, block.offset)
    for wrong in ((place[0], place[1] + 64), (place[0] + 10_000, place[1])):
        with pytest.raises(RemoteProtocolError):
            borrower.borrowed_blocks.open(*wrong, size_bytes)
        with pytest.raises(RemoteProtocolError):
            borrower.borrowed_blocks.take_back([wrong])
    with pytest.raises(RemoteProtocolError):
        borrower.borrowed_blocks.open(*place, 65)
    borrower.borrowed_blocks.take_back([place])
    with pytest.raises(RemoteProtocolError):
        borrower.borrowed_blocks.take_back([place])


def client_region() -> ClientRegion:
    fd = os.memfd_create("client", os.MFD_CLOEXEC)
    os.truncate(fd, SHARED_BYTES)
    return ClientRegion(SHARED_BYTES, fd)


@pytest.mark.promise("Memory of clients that is lent", "An output may lie in a …")
def test_no_answer_lies_in_what_a_client_lent_as_an_input(borrower: Borrower) -> None:
    region = client_region()
    lease = region.lease(0, SHARED_BYTES, borrower.returned.append, "input")
    lent = borrower.borrowed_blocks.lend(np.ndarray((SHARED_BYTES,), np.uint8, lease))
    assert lent == ([region.id, 0, SHARED_BYTES], 0)

    with pytest.raises(RemoteProtocolError, match="not the stub's to answer from"):
        borrower.borrowed_blocks.open(region.id, 0, SHARED_BYTES)
    region.close()


@pytest.mark.promise(
    "Memory of clients that is lent",
    "An output may lie in a client's memory only at the place that its request names, and only while its batch runs.",
)
def test_an_answer_may_lie_where_a_client_wants_it_while_the_batch_lasts(borrower: Borrower) -> None:
    region = client_region()
    lease = region.lease(64, 128, borrower.returned.append, "target")
    borrower.borrowed_blocks.lend_target(lease)

    assert borrower.borrowed_blocks.open(region.id, 64, 100).size == 100
    for place in [(65, 8), (64, 129), (0, 8)]:
        with pytest.raises(RemoteProtocolError, match="not the stub's to answer from"):
            borrower.borrowed_blocks.open(region.id, *place)
    with pytest.raises(RemoteProtocolError, match="which it was not given"):
        borrower.borrowed_blocks.end_batch([[region.id, 64]])
    with pytest.raises(RemoteProtocolError, match="not the stub's to answer from"):
        borrower.borrowed_blocks.open(region.id, 64, 100)
    region.close()


@pytest.mark.promise("Memory of clients that is lent", "A stub forgets regions that were …")
def test_memory_of_clients_that_are_gone_is_forgotten_before_there_is_more(borrower: Borrower) -> None:
    for _ in range(3):
        region = client_region()
        lease = region.lease(0, 64, borrower.returned.append, "target")
        borrower.borrowed_blocks.lend_target(lease)
        borrower.borrowed_blocks.end_batch(())
        region.close()

    assert borrower.told == borrower.announced[:2]


@pytest.mark.promise("Limits", "The first region by which memory has grown …")
def test_what_is_kept_for_later_makes_room_at_the_limit() -> None:
    memory = Allotment(1 << 20, is_contained=False)
    told: list[int] = []
    borrowed_blocks = BorrowedBlocks(lambda *_: None, memory.region(0, 1 << 16), memory, told.append, is_private=False)
    try:
        kept = borrowed_blocks.allocate(1 << 19)
        borrowed_blocks.end_batch(())
        borrowed_blocks.allocate(3 << 18)
        assert told == [kept.region.id]
        with pytest.raises(OutOfMemory, match="MOONPOOL_REGION_LIMIT_BYTES"):
            borrowed_blocks.allocate(1 << 18)
    finally:
        borrowed_blocks.close()
        memory.close()
