"""The link to a stub, with a peer over a real socket that sends what the test wants."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from tests.runtime.scripted import FP32, KiB, Pair, y

from moonpool import ModelError, OutOfMemory, Response
from moonpool.ipc.errors import PeerGone, RemoteProtocolError


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


# Down and up


def test_inputs_are_placed_where_the_peer_is_told(pair: Pair) -> None:
    pair.execute([1, 2, 3], [4], [5, 6])
    assert [pair.peer.input(i, 0).tolist() for i in range(3)] == [[1, 2, 3], [4], [5, 6]]
    assert pair.peer.details is None


def test_the_rows_of_one_input_lie_back_to_back(pair: Pair) -> None:
    pair.execute([1, 2], [3, 4])
    (_, _, _, block, offset, size), (_, _, _, other_block, other_offset, _) = (rows[0] for rows in pair.peer.rows)
    assert block == other_block
    assert other_offset == offset + size


def test_outputs_are_views_on_what_the_peer_wrote(pair: Pair) -> None:
    requests = pair.execute([1], [2])
    blocks = [pair.peer.place([10, 11]), pair.peer.place([20])]
    pair.peer.answer(blocks, [[y(2)], [y(1, block=1)]])
    one, other = pair.finish(requests)
    assert (one["Y"].tolist(), other["Y"].tolist()) == ([10, 11], [20])
    region, offset, _ = blocks[0]
    buffer = pair.peer.regions[region].buffer
    np.ndarray((1,), np.float32, buffer, offset)[0] = 77
    assert one["Y"].tolist() == [77, 11]


def test_errors_and_parameters_come_with_their_request(pair: Pair) -> None:
    requests = pair.execute([1], [2], [3])
    block = pair.peer.place([9])
    remarks = [None, [None, [3, "too large"]], [{"note": "fine", "count": 2}, None]]
    pair.peer.answer([block], [[y(1)], [], [y(1)]], remarks=remarks)
    good, bad, noted = pair.link.finish(requests)
    assert isinstance(good, Response)
    assert isinstance(bad, ModelError)
    assert (str(bad), bad.code) == ("too large", "INVALID_ARG")
    assert isinstance(noted, Response)
    assert noted.parameters == {"note": "fine", "count": 2}


def test_the_end_of_the_peer_is_told_in_both_directions(pair: Pair) -> None:
    requests = pair.execute([1])
    pair.peer.channel.close()
    with pytest.raises(PeerGone):
        pair.link.finish(requests)
    with pytest.raises(PeerGone):
        pair.link.conversation.channel.send(b"anything")


def test_an_answer_whose_bytes_came_before_has_what_the_peer_wrote_this_time(pair: Pair) -> None:
    first = pair.peer.place([1, 2])
    values = np.ndarray((2,), np.float32, pair.peer.regions[first[0]].buffer, first[1])
    for batch in range(5):
        requests = pair.execute([1])
        values[:] = batch, batch + 1
        pair.peer.answer([first], [[y(2)]])
        (outputs,) = pair.finish(requests)
        assert outputs["Y"].tolist() == [batch, batch + 1]
        assert outputs["Y"].shape == (2,)
        del outputs
        assert [*pair.link.released] == [(first[0], first[1])]


# Memory that is given back


def test_memory_of_requests_is_free_when_the_answer_is_there(pair: Pair) -> None:
    for _ in range(100):
        requests = pair.execute([1] * 1000)
        assert pair.lent_bytes >= 4000
        pair.peer.answer()
        pair.finish(requests)
        assert pair.lent_bytes == 0
    assert pair.link.size_bytes() == 128 * KiB


def test_memory_of_answers_is_given_back_with_the_next_batch_when_it_is_dropped(pair: Pair) -> None:
    requests = pair.execute([1], [2])
    blocks = [pair.peer.place([1]), pair.peer.place([2])]
    pair.peer.answer(blocks, [[y(1)], [y(1, block=1)]])
    one, other = pair.finish(requests)
    requests = pair.execute([3])
    assert pair.peer.released == []
    view = one["Y"][:1]
    del one
    pair.peer.answer()
    pair.finish(requests)
    requests = pair.execute([4])
    assert pair.peer.released == []
    del view
    pair.peer.answer()
    pair.finish(requests)
    requests = pair.execute([5])
    assert pair.peer.released == [blocks[0][:2]]
    del other
    pair.peer.answer()
    pair.finish(requests)
    pair.execute([6])
    assert pair.peer.released == [blocks[1][:2]]


def test_a_block_that_several_responses_share_is_given_back_once(pair: Pair) -> None:
    requests = pair.execute([1], [2])
    block = pair.peer.place([1, 2])
    pair.peer.answer([block], [[y(1)], [y(1, offset=4)]])
    one, other = pair.finish(requests)
    assert (one["Y"].tolist(), other["Y"].tolist()) == ([1], [2])
    del one
    requests = pair.execute([3])
    assert pair.peer.released == []
    pair.peer.answer()
    pair.finish(requests)
    del other
    pair.execute([4])
    assert pair.peer.released == [block[:2]]


def test_releases_are_not_lost_when_a_batch_cannot_be_sent() -> None:
    pair = Pair(limit=64 * KiB)
    try:
        requests = pair.execute([1])
        block = pair.peer.place([1])
        pair.peer.answer([block], [[y(1)]])
        pair.finish(requests).clear()
        with pytest.raises(OutOfMemory):
            pair.link.execute([pair.request(np.zeros(KiB * KiB))])
        assert pair.lent_bytes == 0
        pair.execute([2])
        assert pair.peer.released == [block[:2]]
    finally:
        pair.close()


def test_blocks_that_the_model_keeps_stay_until_it_releases_them(pair: Pair) -> None:
    requests = pair.execute([1, 2, 3])
    place = pair.peer.blocks[0][:2]
    kept = pair.peer.input(0, 0)
    pair.peer.answer(held=[place])
    pair.finish(requests)
    assert pair.lent_bytes > 0
    for _ in range(3):
        requests = pair.execute([9, 9, 9])
        pair.peer.answer()
        pair.finish(requests)
    assert kept.tolist() == [1, 2, 3]
    requests = pair.execute([4])
    pair.peer.answer(released=[place])
    pair.finish(requests)
    assert pair.lent_bytes == 0


def test_a_block_that_an_idle_model_releases_is_free_without_another_batch(pair: Pair) -> None:
    requests = pair.execute([1, 2, 3])
    place = pair.peer.blocks[0][:2]
    pair.peer.answer(held=[place])
    # RELEASE overtakes the answer.
    pair.link.release([place])
    pair.finish(requests)
    pair.link.tidy(0.0)
    assert pair.lent_bytes == 0


def test_no_more_is_let_go_of_than_was_lent(pair: Pair) -> None:
    requests = pair.execute([1, 2, 3])
    place = pair.peer.blocks[0][:2]
    pair.link.release([place])
    with pytest.raises(RemoteProtocolError, match="more blocks than it was given"):
        pair.link.release([place])
    pair.peer.answer()
    pair.finish(requests)
    with pytest.raises(RemoteProtocolError, match="which it does not hold"):
        pair.link.tidy(0.0)


def test_an_input_may_be_passed_through_as_an_output(pair: Pair) -> None:
    requests = pair.execute([1, 2], [3])
    pair.peer.answer([pair.peer.blocks[0]], [[y(2, 0, pair.peer.rows[0][0][4])], []])
    passed, _ = pair.finish(requests)
    assert passed["Y"].tolist() == [1, 2]
    # Other batches do not write over it.
    for _ in range(3):
        requests = pair.execute([8, 8], [8])
        pair.peer.answer(rows=[[], []])
        pair.finish(requests)
    assert passed["Y"].tolist() == [1, 2]
    assert pair.lent_bytes > 0
    del passed
    assert pair.lent_bytes == 0
    # The block is not the peer's to reuse, so the peer gets no message about it.
    pair.execute([1])
    assert pair.peer.released == []


def test_an_input_may_be_kept_and_passed_through_at_once(pair: Pair) -> None:
    requests = pair.execute([1, 2])
    place = pair.peer.blocks[0]
    pair.peer.answer([place], [[y(2)]], held=[place[:2]])
    (passed,) = pair.finish(requests)
    del passed
    assert pair.lent_bytes > 0
    requests = pair.execute([3])
    pair.peer.answer(released=[place[:2]])
    pair.finish(requests)
    assert pair.lent_bytes == 0


# Memory of callers


def test_an_array_in_shared_memory_is_not_copied(pair: Pair) -> None:
    array = pair.memory.empty((3,), np.dtype(np.float32), 12)
    array[...] = [1, 2, 3]
    pair.link.execute([pair.request(array)])
    pair.peer.receive()
    assert pair.lent_bytes == 0
    assert pair.peer.input(0, 0).tolist() == [1, 2, 3]
    array[0] = 9
    assert pair.peer.input(0, 0).tolist() == [9, 2, 3]


def test_part_of_an_array_in_shared_memory_is_not_copied_either(pair: Pair) -> None:
    array = pair.memory.empty((4,), np.dtype(np.float32), 16)
    array[...] = [1, 2, 3, 4]
    pair.execute(array[1:3])
    assert pair.lent_bytes == 0
    assert pair.peer.input(0, 0).tolist() == [2, 3]


def test_scattered_elements_are_copied(pair: Pair) -> None:
    array = pair.memory.empty((4,), np.dtype(np.float32), 16)
    array[...] = [1, 2, 3, 4]
    pair.execute(array[::2], array[::-1])
    assert pair.lent_bytes > 0
    assert [pair.peer.input(i, 0).tolist() for i in (0, 1)] == [[1, 3], [4, 3, 2, 1]]


def test_copied_and_shared_inputs_share_a_batch(pair: Pair) -> None:
    array = pair.memory.empty((2,), np.dtype(np.float32), 8)
    array[...] = [3, 4]
    requests = pair.execute([1, 2], array, [5])
    assert [pair.peer.input(i, 0).tolist() for i in range(3)] == [[1, 2], [3, 4], [5]]
    pair.peer.answer(rows=[[], [], []])
    pair.finish(requests)


def test_the_caller_s_memory_is_in_use_until_the_batch_is_over(pair: Pair) -> None:
    array = pair.memory.empty((2,), np.dtype(np.float32), 8)
    array[...] = [3, 4]
    requests = pair.execute(array)
    place = array.__array_interface__["data"][0]
    seen = pair.peer.input(0, 0)
    del array
    requests[0].arrays.clear()
    other = pair.memory.empty((2,), np.dtype(np.float32), 8)
    other[...] = [7, 7]
    assert seen.tolist() == [3, 4]
    pair.peer.answer()
    pair.finish(requests)
    again = pair.memory.empty((2,), np.dtype(np.float32), 8)
    assert again.__array_interface__["data"][0] == place


def test_the_caller_s_memory_may_be_passed_through(pair: Pair) -> None:
    array = pair.memory.empty((2,), np.dtype(np.float32), 8)
    array[...] = [3, 4]
    requests = pair.execute(array)
    pair.peer.answer([pair.peer.blocks[pair.peer.rows[0][0][3]]], [[y(2)]])
    (passed,) = pair.finish(requests)
    requests[0].arrays.clear()
    del array
    gc.collect()
    pair.memory.empty((2,), np.dtype(np.float32), 8)[...] = 0
    assert passed["Y"].tolist() == [3, 4]


# Large messages, and memory that grows


def test_a_message_too_large_for_a_packet_goes_through_memory(pair: Pair) -> None:
    batch = [[float(i)] for i in range(6000)]
    requests = pair.execute(*batch)
    assert len(pair.peer.rows) == 6000
    assert pair.peer.input(5999, 0).tolist() == [5999]
    block = pair.peer.place([5])
    pair.peer.answer([block], [[y(1)]] * 6000)
    outputs = pair.finish(requests)
    assert all(each["Y"].tolist() == [5] for each in outputs)
    assert pair.lent_bytes == 0
    del outputs
    pair.execute([1])
    # One block held the answer's tensors, and the other the message itself.
    assert len(pair.peer.released) == 2


def test_regions_are_added_for_large_batches_and_given_up_when_they_are_idle(pair: Pair) -> None:
    requests = pair.execute(np.ones(KiB * KiB))
    grown = pair.link.size_bytes()
    assert grown > 4 * KiB * KiB
    assert pair.peer.input(0, 0)[-1] == 1
    told = pair.peer.forgotten
    pair.link.tidy(0.0)
    pair.link.tidy(100.0)
    assert told == []
    pair.peer.answer()
    pair.finish(requests)
    pair.link.tidy(200.0)
    pair.link.tidy(259.0)
    assert told == []
    pair.link.tidy(260.0)
    assert len(told) == 1
    assert pair.link.size_bytes() == 128 * KiB
    pair.execute([1])
    assert pair.peer.input(0, 0).tolist() == [1]


def test_responses_stay_valid_after_close(pair: Pair) -> None:
    requests = pair.execute([1, 2])
    pair.peer.answer([pair.peer.place([7]), pair.peer.blocks[0]], [[y(1), [1, FP32, [2], 1, 0, 8]]])
    (outputs,) = pair.finish(requests)
    pair.link.close()
    pair.link.close()
    assert (outputs["Y"].tolist(), outputs["Z"].tolist()) == ([7], [1, 2])
