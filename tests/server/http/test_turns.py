"""Requests that hold the loop for long take turns with those of other clients."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from moonpool.runtime.server.http.head import Head
from moonpool.runtime.server.http.turns import Turns

pytestmark = pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "Large bodies of JSON that come together are parsed in turns with the requests of other clients.",
)


class Asked:
    """An exchange with what turns use of it."""

    def __init__(self, *, is_gone: bool = False) -> None:
        self.is_gone = is_gone
        self.head = Head("POST", b"/v2/models/m/infer", "1.1", ())
        self.failures: list[int] = []
        self.cancel: Callable[[], None] | None = None

    def fail(self, status: int, _: str) -> None:
        self.failures.append(status)


def test_others_have_their_turn_between_two_long_ones() -> None:
    seen: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        turns, done = Turns(loop), asyncio.Event()

        def act(name: str) -> None:
            seen.append(name)
            loop.call_soon(others, name)

        def others(name: str) -> None:
            seen.append(f"after {name}")
            if len(seen) == 6:
                done.set()

        for name in ("first", "second", "third"):
            exchange: Any = Asked()
            turns.take(exchange, partial(act, name))
        await done.wait()

    asyncio.run(asyncio.wait_for(main(), 30.0))

    assert seen == ["first", "after first", "second", "after second", "third", "after third"]


def test_one_that_is_gone_is_not_read_and_one_that_fails_is_told(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    gone, failing, last = Asked(is_gone=True), Asked(), Asked()

    async def main() -> None:
        turns, done = Turns(asyncio.get_running_loop()), asyncio.Event()
        each: Any
        for each, act in (
            (gone, lambda: seen.append("gone")),
            (failing, lambda: [][0]),
            (last, lambda: seen.append("last")),
            (last, done.set),
        ):
            turns.take(each, act)
        await done.wait()

    asyncio.run(asyncio.wait_for(main(), 30.0))

    assert seen == ["last"]
    assert (gone.failures, failing.failures, last.failures) == ([], [500], [])
    assert "answering POST b'/v2/models/m/infer' failed" in caplog.text


def test_one_is_read_at_a_time_also_on_threads() -> None:
    seen: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        turns, done = Turns(loop), asyncio.Event()
        first: asyncio.Future[None] = loop.create_future()
        exchange: Any = Asked()
        turns.take(exchange, lambda: first)
        turns.take(exchange, partial(seen.append, "second"))
        turns.take(exchange, done.set)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not seen
        first.set_exception(ValueError("the job failed, which its own callback hears"))
        await done.wait()
        assert first.exception() is not None

    asyncio.run(asyncio.wait_for(main(), 30.0))

    assert seen == ["second"]


def test_one_that_goes_before_its_turn_is_let_go_of_at_once() -> None:
    seen: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        turns, done = Turns(loop), asyncio.Event()
        first: asyncio.Future[None] = loop.create_future()
        exchanges: list[Any] = [Asked(), Asked(), Asked()]
        turns.take(exchanges[0], lambda: first)
        turns.take(exchanges[1], partial(seen.append, "gone"))
        turns.take(exchanges[2], done.set)
        await asyncio.sleep(0)
        assert exchanges[0].cancel is None
        goes = exchanges.pop(1)
        cancel, goes.cancel = goes.cancel, None
        cancel()
        body = weakref.ref(goes)
        del goes, cancel
        assert body() is None
        first.set_result(None)
        await done.wait()
        # A queue that all have left takes others.
        done.clear()
        turns.take(exchanges[1], partial(seen.append, "gone"))
        exchanges[1].cancel()
        await asyncio.sleep(0)
        turns.take(exchanges[0], done.set)
        await done.wait()

    asyncio.run(asyncio.wait_for(main(), 30.0))

    assert not seen
