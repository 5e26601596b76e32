"""A response finds its request, in whatever order responses and answers come."""

from __future__ import annotations

from typing import Any, cast

import pytest

from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import ANSWERED, OPEN
from moonpool.runtime.schedule.request_queue import OpenRequests
from moonpool.runtime.stubs.answers import Replies

pytestmark = pytest.mark.promise("Responses at any time", "A stub that lies about responses …")


class Request:
    """The parts of a request that `Replies` reads."""

    left = fills_place = False


def requests(count: int) -> list[Any]:
    return [Request() for _ in range(count)]


def test_a_response_may_come_before_the_answer_to_its_batch_and_after() -> None:
    replies, (a, b) = Replies(), requests(2)
    replies.begin(7, [a, b])
    assert replies.find(7, 1, is_last=False) is b
    replies.answered([ANSWERED, OPEN])
    assert replies.key_of(b) == (7, 1)
    assert replies.find(7, 1, is_last=True) is b
    assert replies.key_of(b) is None


def test_the_last_response_may_come_before_the_answer_to_its_batch() -> None:
    replies, (a, b) = Replies(), requests(2)
    replies.begin(7, [a, b])
    assert replies.find(7, 0, is_last=True) is a
    replies.answered([OPEN, OPEN])
    assert replies.key_of(a) is None
    assert replies.key_of(b) == (7, 1)


@pytest.mark.parametrize(("batch", "index"), [(6, 0), (8, 0), (7, 2), (7, 1), (0, 0)], ids=lambda value: str(value))
def test_a_response_that_nobody_waits_for_is_refused(batch: int, index: int) -> None:
    replies = Replies()
    replies.begin(7, requests(2))
    replies.find(7, 1, is_last=True)
    with pytest.raises(RemoteProtocolError, match="which waits for none"):
        replies.find(batch, index, is_last=False)


def test_no_response_is_taken_for_a_request_that_was_answered() -> None:
    replies = Replies()
    replies.begin(7, requests(2))
    replies.answered(None)
    with pytest.raises(RemoteProtocolError, match="which waits for none"):
        replies.find(7, 0, is_last=False)


@pytest.mark.parametrize("states", [None, [ANSWERED]])
def test_a_request_that_had_its_last_response_may_not_be_answered(states: list[int] | None) -> None:
    replies = Replies()
    replies.begin(7, requests(1))
    replies.find(7, 0, is_last=True)
    with pytest.raises(RemoteProtocolError, match="answered twice"):
        replies.answered(states)


def test_a_closed_link_has_no_requests() -> None:
    replies, (a, b) = Replies(), requests(2)
    replies.begin(7, [a])
    replies.answered([OPEN])
    replies.begin(8, [b])
    replies.close()
    assert replies.key_of(a) is replies.key_of(b) is None


def test_a_batch_is_deserted_when_nobody_waits_for_anything() -> None:
    """A call of the model may be for a request that is open."""
    replies, (opened, executing) = Replies(), requests(2)
    replies.begin(7, [opened])
    replies.answered([OPEN])
    replies.begin(8, [executing])
    seen = [replies.deserted]
    for request in (executing, opened):
        request.left = True
        seen.append(replies.deserted)
    assert seen == [0, 0, 8]


# Counts of the scheduler


def test_a_request_ends_once() -> None:
    opened, (request,) = OpenRequests(), requests(1)
    instance = cast(Any, object())
    opened.open(request, instance, 0)
    assert opened.instance_of(request) is instance
    assert opened.end(request, is_executing=False)
    assert not opened.end(request, is_executing=False)
    assert len(opened) == 0


def test_a_request_that_ended_while_its_batch_executed_is_not_open_afterwards() -> None:
    opened, (request,) = OpenRequests(), requests(1)
    assert opened.end(request, is_executing=True)
    assert not opened.end(request, is_executing=True)
    opened.open(request, cast(Any, object()), 0)
    assert len(opened) == 0


def test_ended_requests_of_a_lost_batch_do_not_fail() -> None:
    opened, (a, b) = OpenRequests(), requests(2)
    opened.end(a, is_executing=True)
    assert opened.without_ended([a, b]) == [b]
    assert opened.without_ended([a, b]) == [a, b]


def test_the_requests_of_an_instance_are_taken_from_it_alone() -> None:
    opened, (a, b) = OpenRequests(), requests(2)
    one, other = cast(Any, object()), cast(Any, object())
    opened.open(a, one, 0)
    opened.open(b, other, 0)
    assert opened.take(one) == [a]
    assert opened.take() == [b]
    assert opened.take() == []


def test_an_instance_is_deserted_when_the_last_caller_has_left() -> None:
    opened, (a, b, c) = OpenRequests(), requests(3)
    one, other = cast(Any, object()), cast(Any, object())
    for request, instance in ((a, one), (b, one), (c, other)):
        opened.open(request, instance, 0)
    assert opened.deserted_since(100) == set()
    opened.desert(a, 10)
    assert opened.deserted_since(100) == set()
    opened.desert(b, 20)
    opened.desert(b, 99)
    assert opened.deserted_since(100) == {one}
    assert opened.deserted_since(20) == set()
    opened.desert(c, 30)
    opened.end(a, is_executing=False)
    assert opened.deserted_since(100) == {one, other}
    opened.take()
    assert opened.deserted_since(100) == set()


def test_a_request_may_be_left_before_its_batch_is_answered() -> None:
    opened, (request,) = OpenRequests(), requests(1)
    opened.desert(request, 5)
    request.left = True
    instance = cast(Any, object())
    opened.open(request, instance, 10)
    assert not opened.wanted_count()
    assert opened.deserted_since(11) == {instance}
    assert opened.deserted_since(10) == set()
