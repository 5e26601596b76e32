"""Tests the rules of response senders, without a stub."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from moonpool.ipc.messages import AGAIN, FINAL, NO_DETAILS
from moonpool.ipc.signals import at_once
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import DROPPED, InferenceResponse, Reply, ReplyPort
from moonpool.stub.pb_utils.tensor import Tensor

pytestmark = pytest.mark.promise("Responses at any time", "A sender refuses wrong use …")


class Post(ReplyPort):
    """Keeps what was delivered: the response, or the text of its error, and the flags."""

    def __init__(self, *, is_decoupled: bool = True) -> None:
        self.is_decoupled = is_decoupled
        self.sent: list[tuple[object, int]] = []

    def respond(self, _: Reply, response: InferenceResponse | None, flags: int, *steps: Callable[[], object]) -> None:
        error = None if response is None else response.error()
        sent = (response if error is None else error.message(), flags)
        at_once(*steps, partial(self.sent.append, sent))


def request(port: ReplyPort | None) -> InferenceRequest:
    origin = None if port is None else (port, 1, 0)
    return InferenceRequest.from_wire(NO_DETAILS, (), [], origin)


def response() -> InferenceResponse:
    return InferenceResponse([Tensor("Y", np.zeros(1, np.float32))])


def test_a_request_has_one_sender() -> None:
    given = request(Post())
    assert given.get_response_sender() is given.get_response_sender()


def test_an_open_reply_that_is_dropped_is_abandoned_once() -> None:
    port = Post()
    given = request(port)
    given.reply().leave_open()
    sender = given.get_response_sender()
    del given
    assert port.sent == []
    del sender
    assert port.sent == [(DROPPED, FINAL)]


@pytest.mark.promise(
    "Responses at any time",
    "If a model that is not decoupled has sent its response, nothing that it sends, returns or "
    "raises afterwards changes the answer.",
)
def test_the_answer_of_a_model_that_has_one_stands_whatever_comes_after() -> None:
    for is_failure in (True, False):
        port = Post(is_decoupled=False)
        given, sent = request(port), response()
        given.get_response_sender().send(sent)
        with pytest.raises(TritonModelException, match="cannot send more than one response"):
            given.get_response_sender().send(response())
        if is_failure:
            given.reply().fail("on purpose")
        else:
            given.reply().finish(response())
        assert port.sent == [(sent, 0), (None, FINAL)]


def test_an_error_follows_the_responses_of_a_decoupled_model() -> None:
    port = Post()
    given, sent = request(port), response()
    given.get_response_sender().send(sent)
    given.reply().fail("on purpose")
    assert port.sent == [(sent, 0), ("on purpose", FINAL)]


def test_an_answered_reply_is_not_abandoned() -> None:
    port = Post()
    given = request(port)
    given.get_response_sender()
    given.reply().close(1)
    del given
    gc.collect()
    assert port.sent == []


def test_a_rescheduled_request_is_closed() -> None:
    port = Post()
    given = request(port)
    sender = given.get_response_sender()
    sender.send(response())
    given.reply().reschedule()
    with pytest.raises(TritonModelException, match="has been closed"):
        sender.send(response())
    assert [flags for _, flags in port.sent] == [0, AGAIN]


@pytest.mark.promise("Responses at any time", "Responses of one sender arrive …")
def test_no_response_follows_the_last_one_however_many_threads_send() -> None:
    port = Post()
    sender = request(port).get_response_sender()
    refused: list[str] = []

    def send(flags: int) -> None:
        for _ in range(200):
            try:
                sender.send(response(), flags)
            except TritonModelException as error:
                refused.append(str(error))

    threads = [threading.Thread(target=send, args=(flags,)) for flags in (0, 0, 0, FINAL)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [flags for _, flags in port.sent[:-1]] == [0] * (len(port.sent) - 1)
    assert port.sent[-1][1] == FINAL
    assert len(port.sent) + len(refused) == 800
