"""Answers of a stub that break the protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.runtime.scripted import BYTES, FP32, KiB, Pair, y

from moonpool.ipc.codec import encode
from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import NO_CORE, Kind


@pytest.fixture(params=["compiled", "in Python"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair()
    pair.link.port.is_plain = pair.link.port.is_plain and request.param != "in Python"
    yield pair
    pair.close()


def _no_such_region(pair: Pair) -> None:
    pair.peer.answer([[999_999, 0, 4]], [[y(1)]])


def _beyond_the_region(pair: Pair) -> None:
    region = next(iter(pair.link.response_regions))
    pair.peer.answer([[region, 64 * KiB - 2, 4]], [[y(1)]])


def _beyond_the_block(pair: Pair) -> None:
    pair.peer.answer([pair.peer.place([1])], [[y(2)]])


def _no_such_block(pair: Pair) -> None:
    pair.peer.answer([], [[y(1)]])


def _more_than_was_lent(pair: Pair) -> None:
    region, offset, _ = pair.peer.blocks[0]
    pair.peer.answer([[region, offset, 4096]], [[y(1)]])


def _another_place_in_the_request_s_region(pair: Pair) -> None:
    region, offset, _ = pair.peer.blocks[0]
    pair.peer.answer([[region, offset + 64, 4]], [[y(1)]])


def _no_such_output(pair: Pair) -> None:
    pair.peer.answer([pair.peer.place([1])], [[[2, FP32, [1], 0, 0, 4]]])


def _an_output_twice(pair: Pair) -> None:
    pair.peer.answer([pair.peer.place([1])], [[y(1), y(1)]])


def _another_size_than_the_shape_s(pair: Pair) -> None:
    pair.peer.answer([pair.peer.place([1, 2])], [[[0, FP32, [1], 0, 0, 8]]])


def _a_shape_of_astronomic_size(pair: Pair) -> None:
    pair.peer.answer([pair.peer.place([1])], [[[0, FP32, [2**62, 0, 2**62], 0, 0, 0]]])


def _strings_that_are_none(pair: Pair) -> None:
    pair.peer.answer([pair.peer.place([1])], [[[0, BYTES, [1], 0, 0, 4]]])


def _too_few_responses(pair: Pair) -> None:
    pair.peer.answer([], [])


def _too_many_responses(pair: Pair) -> None:
    pair.peer.answer([], [[], []])


def _remarks_on_others(pair: Pair) -> None:
    pair.peer.answer([], [[]], remarks=[None, None])


def _another_batch(pair: Pair) -> None:
    pair.peer.answer(batch=pair.peer.batch + 1)


def _keeping_what_it_has_not(pair: Pair) -> None:
    pair.peer.answer(held=[[1, 2]])


def _keeping_twice(pair: Pair) -> None:
    place = pair.peer.blocks[0][:2]
    pair.peer.answer(held=[place, place])


def _releasing_what_it_has_not(pair: Pair) -> None:
    pair.peer.answer(released=[pair.peer.blocks[0][:2]])


LIES = [
    _no_such_region,
    _beyond_the_region,
    _beyond_the_block,
    _no_such_block,
    _more_than_was_lent,
    _another_place_in_the_request_s_region,
    _no_such_output,
    _an_output_twice,
    _another_size_than_the_shape_s,
    _a_shape_of_astronomic_size,
    _strings_that_are_none,
    _too_few_responses,
    _too_many_responses,
    _remarks_on_others,
    _another_batch,
    _keeping_what_it_has_not,
    _keeping_twice,
    _releasing_what_it_has_not,
]


def good_answers(pair: Pair, count: int) -> None:
    """Let the peer give so many answers that differ in nothing but the number of the batch."""
    block = pair.peer.place([1])
    for _ in range(count):
        requests = pair.execute([1])
        pair.peer.answer([block], [[y(1)]])
        pair.finish(requests)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__.strip("_"))
def test_an_answer_that_cannot_be_is_refused(pair: Pair, lie: Any, before: int) -> None:
    good_answers(pair, before)
    requests = pair.execute([1])
    lie(pair)
    with pytest.raises(RemoteProtocolError) as caught:
        pair.link.finish(requests)
    assert len(str(caught.value)) > 10


def test_an_answer_that_was_believed_once_is_checked_against_other_blocks(pair: Pair) -> None:
    requests = pair.execute([1])
    pair.peer.answer([pair.peer.place([1, 2])], [[y(2)]])
    pair.finish(requests)
    requests = pair.execute([1])
    # This block is too small for the layout, which the link remembers from the answer before.
    pair.peer.answer([pair.peer.place([1])], [[y(2)]])
    with pytest.raises(RemoteProtocolError, match="reaches beyond its block"):
        pair.link.finish(requests)


def test_an_answer_that_was_believed_once_is_refused_when_its_region_is_gone(pair: Pair) -> None:
    good_answers(pair, 2)
    requests = pair.execute([1])
    (region_id,) = pair.link.response_regions
    pair.peer.answer([[region_id, 0, 4]], [[y(1)]])
    pair.link.retire_answers(region_id)
    with pytest.raises(RemoteProtocolError, match="not the stub's to answer from"):
        pair.link.finish(requests)


def test_an_answer_that_was_believed_once_is_refused_for_a_larger_batch(pair: Pair) -> None:
    good_answers(pair, 2)
    requests = pair.execute([1], [2])
    (region_id,) = pair.link.response_regions
    pair.peer.answer([[region_id, 0, 4]], [[y(1)]])
    with pytest.raises(RemoteProtocolError, match="with 1 responses"):
        pair.link.finish(requests)


def test_an_answer_that_was_believed_once_is_refused_for_a_batch_that_is_over(pair: Pair) -> None:
    good_answers(pair, 2)
    requests = pair.execute([1])
    (region_id,) = pair.link.response_regions
    pair.peer.answer([[region_id, 0, 4]], [[y(1)]], batch=pair.peer.batch - 1)
    with pytest.raises(RemoteProtocolError, match="an answer to batch 2"):
        pair.link.finish(requests)


def test_no_answer_is_accepted_out_of_turn_however_often_it_came_before(pair: Pair) -> None:
    good_answers(pair, 2)
    requests = pair.execute([1])
    (region_id,) = pair.link.response_regions
    answer = [[region_id, 0, 4]], [[y(1)]]
    pair.peer.answer(*answer)
    assert len(pair.finish(requests)) == 1
    pair.peer.channel.send(encode(Kind.ANSWER, 3, NO_CORE, [], [], answer[0], encode(answer[1][0]), None, None))
    with pytest.raises(RemoteProtocolError, match="ANSWER came out of turn"):
        pair.link.finish(requests)
