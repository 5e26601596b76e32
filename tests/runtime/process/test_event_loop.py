"""A task that awaits a wakeup goes on in the callback that sets it."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest

from moonpool.runtime.process.event_loop import Wakeup

_NAME: ContextVar[str] = ContextVar("name", default="")


def test_the_task_goes_on_in_the_callback_and_in_its_own_context() -> None:
    seen: list[str] = []

    async def wait(woken: Wakeup) -> None:
        _NAME.set("task")
        await woken
        seen.append(_NAME.get())

    async def run() -> None:
        loop = asyncio.get_running_loop()
        woken = Wakeup(loop=loop)
        task = asyncio.create_task(wait(woken))
        await asyncio.sleep(0)
        called = loop.create_future()

        def wake() -> None:
            woken.set_result(None)
            called.set_result(list(seen))

        loop.call_soon_threadsafe(wake)
        assert await called == ["task"]
        await task

    asyncio.run(run())


def test_one_that_is_set_before_does_not_wait() -> None:
    async def run() -> None:
        woken = Wakeup(loop=asyncio.get_running_loop())
        woken.set_result(None)
        await woken

    asyncio.run(run())


def test_a_task_that_waits_can_be_cancelled() -> None:
    async def run() -> None:
        woken = Wakeup(loop=asyncio.get_running_loop())

        async def wait() -> None:
            await woken

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert woken.cancelled()
        async with asyncio.timeout(60):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await Wakeup(loop=asyncio.get_running_loop())

    asyncio.run(run())


def test_an_error_of_the_task_is_its_own() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        woken = Wakeup(loop=loop)

        async def wait() -> None:
            await woken
            raise ValueError("mine")

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        loop.call_soon(woken.set_result, None)
        with pytest.raises(ValueError, match="mine"):
            await task

    asyncio.run(run())
