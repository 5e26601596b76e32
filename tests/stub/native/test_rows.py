"""Tests joining the rows of requests, and cutting them apart again."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.heap_region import HeapRegion

from moonpool.ipc.memory import Lease, lease_of
from moonpool.stub.native.model import cut, joined


@pytest.fixture
def block() -> Lease:
    region = HeapRegion(1, 4096)
    lease = region.lease(128, 1024, lambda _: None, None)
    lease[:] = 0
    return lease


def view(block: Lease, rows: int, offset: int) -> NDArray[np.generic]:
    return np.ndarray((rows, 2), np.float32, block, offset)


def test_rows_that_lie_back_to_back_are_joined_without_a_copy(block: Lease) -> None:
    first, second = view(block, 1, 64), view(block, 3, 72)
    whole = joined([first, second])
    whole[3] = 5

    assert whole.shape == (4, 2)
    assert second[2].tolist() == [5, 5]
    assert lease_of(whole) is block


@pytest.mark.parametrize("offset", [64, 80, 0])
def test_rows_with_a_gap_or_out_of_order_are_copied(block: Lease, offset: int) -> None:
    first, second = view(block, 1, 64), view(block, 1, offset)
    first[:] = 1
    second[:] = 2
    whole = joined([first, second])

    np.testing.assert_array_equal(whole, np.concatenate([first, second]))
    assert not np.shares_memory(whole, first)


def test_rows_of_different_blocks_are_copied(block: Lease) -> None:
    other = HeapRegion(2, 4096).lease(0, 1024, lambda _: None, None)
    whole = joined([view(block, 1, 0), view(other, 1, 8)])

    assert not np.shares_memory(whole, np.asarray(block))


def test_ordinary_arrays_are_copied_together() -> None:
    assert joined([np.zeros((1, 2)), np.ones((2, 2))]).tolist() == [[0, 0], [1, 1], [1, 1]]


def test_the_rows_of_one_request_are_its_own_array() -> None:
    array = np.zeros((3, 2))

    assert joined([array]) is array
    assert cut(array, [3])[0] is array


def test_requests_without_rows_are_joined_as_well(block: Lease) -> None:
    whole = joined([view(block, 0, 0), view(block, 2, 0), view(block, 0, 16)])

    assert whole.shape == (2, 2)
    assert lease_of(whole) is block


def test_cut_rows_are_views() -> None:
    array = np.arange(6).reshape(3, 2)
    pieces = cut(array, [1, 0, 2])

    assert [piece.shape for piece in pieces] == [(1, 2), (0, 2), (2, 2)]
    assert all(np.shares_memory(piece, array) for piece in (pieces[0], pieces[2]))
