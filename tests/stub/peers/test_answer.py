"""Tests senders of requests whose answer goes with the batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moonpool.ipc.messages import ANSWERED, NO_DETAILS, OPEN, RESCHEDULED
from moonpool.ipc.signals import at_once
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.request import RELEASE_RESCHEDULE, InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.peers.answer import Answer, Responses
from moonpool.stub.peers.placement import Placer

pytestmark = pytest.mark.promise(
    "Responses at any time",
    "A sender that was not used leaves nothing behind, and a sender of a rescheduled request can send nothing more.",
)


class Desk:
    """Make the parts that answer in a stub, without the stub."""

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []
        placer = Placer(cast(Any, None), {"outputs": []})
        control = cast(Any, SimpleNamespace(respond=self._respond))
        self.responses = Responses(placer, control, {"decoupled": False})
        self.answer = Answer(placer, cast(Any, SimpleNamespace(targets={}, places=[])))

    def _respond(self, row: list[Any], *steps: Callable[[], object]) -> None:
        at_once(*steps, partial(self.sent.append, row))

    def request(self) -> InferenceRequest:
        return InferenceRequest.from_wire(NO_DETAILS, (), [], (self.responses, 1, 0))

    def states(self) -> list[int] | None:
        return self.answer.give()[3]


def test_a_sender_that_was_not_used_leaves_nothing_behind() -> None:
    desk = Desk()
    for answered in (True, False):
        request = desk.request()
        sender = request.get_response_sender()
        if answered:
            desk.answer.take([request], [InferenceResponse([])])
        else:
            desk.answer.fail([request], "failed")
        assert not desk.responses.are_open
        with pytest.raises(TritonModelException):
            sender.send(InferenceResponse([]))
        assert desk.states() is None
    assert desk.sent == []


def test_the_sender_of_a_rescheduled_request_sends_no_more() -> None:
    desk = Desk()
    request = desk.request()
    sender = request.get_response_sender()
    request.set_release_flags(RELEASE_RESCHEDULE)
    desk.answer.take([request], [None])
    assert desk.states() == [RESCHEDULED]
    assert not desk.responses.are_open
    with pytest.raises(TritonModelException, match="has been closed"):
        sender.send(InferenceResponse([]))
    assert desk.sent == []


def test_responses_sent_meanwhile_come_before_returned_ones() -> None:
    """Send from another thread of the model right before its batch is answered."""
    desk = Desk()
    request, other = desk.request(), desk.request()
    request.get_response_sender().send(InferenceResponse([]))
    desk.answer.take([request, other], [InferenceResponse([]), InferenceResponse([])])
    assert desk.states() == [OPEN, ANSWERED]
    assert len(desk.sent) == 2
