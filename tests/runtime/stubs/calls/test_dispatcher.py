"""Calls other than inference that the runtime cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.refused_threads import refuse_threads
from tests.runtime.scripted import Pair

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import calls_codec, encode
from moonpool.ipc.messages import Kind, Side
from moonpool.runtime.errors import NotGranted
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.stubs.calls.dispatcher import CallDispatcher
from moonpool.runtime.stubs.control import MessageRateLimiter

pytestmark = pytest.mark.promise(
    "At the limits", "If no thread can be started for what a model asks for, the model gets an error and may ask again."
)


class Models:
    """The runtime as the model sees it. Every load succeeds at once."""

    asker = SimpleNamespace(name="asker")

    def check_may_load(self, name: str) -> None:
        if name == "other":
            raise NotGranted("not yours")

    def load(self, *_: object) -> None: ...

    def begin_unload(self, *_: object, **__: object) -> None:
        raise NotGranted("not yours")

    def ask_ready(self, *_: object) -> None:
        raise ValueError("a bug")


@pytest.fixture
def logged() -> list[str]:
    """The lines that were logged in the name of the stub."""
    return []


@pytest.fixture
def stub(logged: list[str]) -> Iterator[Channel]:
    """The stub's end of a channel to a dispatcher."""
    pair, reactor = Pair(), Reactor()
    ours, theirs = Channel.pair()
    peer = Channel(theirs)
    dispatcher = CallDispatcher(
        ours, pair.link, reactor, cast(Any, Models()), cast(Any, None), MessageRateLimiter(reactor)
    )
    dispatcher.watch(lambda *_: None, lambda: None, lambda _, text, *__: logged.append(text))
    yield peer
    reactor.call_soon(dispatcher.close)
    reactor.close()
    peer.close()
    pair.close()


def test_a_call_for_which_there_is_no_thread_is_answered_and_its_number_is_free(
    stub: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = calls_codec(Side.STUB)
    load = encode(Kind.LOAD_MODEL, 1, "m", "", None)
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        stub.send(load)
        _, number, error, _ = codec.decode(stub.receive())
        assert number == 1
        assert "can't start new thread" in error[1]

    stub.send(load)
    assert codec.decode(stub.receive()) == [Kind.DONE, 1, None, {}]


@pytest.mark.promise("Containment", "No message of a stub …")
def test_a_call_that_is_not_granted_gets_an_error_and_no_line_in_the_log(
    stub: Channel, caplog: pytest.LogCaptureFixture
) -> None:
    stub.send(encode(Kind.UNLOAD_MODEL, 1, "other", False))

    _, number, error, _ = calls_codec(Side.STUB).decode(stub.receive())
    assert (number, error[1]) == (1, "not yours")
    assert caplog.records == []


@pytest.mark.promise("Containment", "No message of a stub …")
def test_an_error_of_the_runtimes_own_is_logged_in_the_instances_name(
    stub: Channel, logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    stub.send(encode(Kind.IS_MODEL_READY, 1, "other", ""))

    _, number, error, _ = calls_codec(Side.STUB).decode(stub.receive())
    assert number == 1
    assert "a bug" in error[1]
    assert len(logged) == 1
    assert "IS_MODEL_READY failed in the runtime" in logged[0]
    assert caplog.records == []
