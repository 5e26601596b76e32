"""Requests of clients that go away: before they are sent, in the queue, and while they execute."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.inside import hosted_in
from tests.runtime.held_batches import holding
from tests.runtime.recorder import PATIENCE_S, model_directory, row, x
from tests.waiting import wait_until

import moonpool
from moonpool import Runtime
from moonpool.runtime.model.request import InferenceRequest, Outcome, Response
from moonpool.runtime.process.threads import TaskPool
from moonpool.runtime.server.inference.call import InferCall, Inference
from moonpool.runtime.server.inference.request import RequestPlan

BATCHING = {"max_batch_size": 8, "dynamic_batching": {}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_directory(tmp_path / "m", 1)


class Call(InferCall):
    """A call whose protocol gives the outcome to a function."""

    def __init__(self, hosted: Any, on_outcome: Callable[[Any], object]) -> None:
        service: Any = SimpleNamespace(capture=None, traces=SimpleNamespace(is_on=False))
        super().__init__(Inference(service, asyncio.get_running_loop(), TaskPool(1, "unused")))
        self.hosted, self.plan = hosted, RequestPlan()
        self._on_outcome = on_outcome

    def watch(self) -> None:
        pass

    def render(self, response: Response) -> Response:
        return response

    def reply(self, rendered: Response) -> None:
        self._on_outcome(rendered)

    def fail(self, error: BaseException) -> None:
        self._on_outcome(error)


def made(runtime: Runtime, value: float) -> tuple[Any, InferenceRequest]:
    hosted = hosted_in(runtime, "m")
    inputs = row(value) if hosted.model.config.max_batch_size else x(value)
    return hosted, hosted.signature.request(inputs)


def sent(runtime: Runtime, value: float, on_outcome: Callable[[Outcome], object]) -> Call:
    hosted, request = made(runtime, value)
    call = Call(hosted, on_outcome)
    call.send(request)
    return call


def value(outcome: Outcome) -> float:
    assert isinstance(outcome, moonpool.Response)
    return float(outcome.outputs["Y"].flat[0])


def test_a_loop_gets_outcomes_by_a_call(folder: Path) -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(20)]
        for number, future in enumerate(futures):
            sent(runtime, number, future.set_result)
        return [value(outcome) for outcome in await asyncio.gather(*futures)]

    with holding(folder, **BATCHING) as (backend, runtime):
        backend.is_quick = True
        assert asyncio.run(main()) == list(range(20))


@pytest.mark.promise(
    "Tensors and requests of clients",
    "A request that is over keeps no tensors in memory, without the collector's help.",
)
@pytest.mark.parametrize("is_answered", [True, False])
def test_a_finished_request_keeps_no_tensors(folder: Path, is_answered: bool) -> None:
    async def ask(runtime: Runtime) -> weakref.ref[Keeper]:
        keeper = Keeper()
        keeper.call = sent(runtime, 4, keeper.hear)
        if is_answered:
            await asyncio.wait_for(keeper.heard.wait(), PATIENCE_S)
        else:
            keeper.leave()
        return weakref.ref(keeper)

    with holding(folder) as (backend, runtime):
        backend.is_quick = is_answered
        gc.collect()
        gc.disable()
        try:
            kept = asyncio.run(ask(runtime))
            if not is_answered:
                backend.wait_for(1).answer()
            wait_until(lambda: kept() is None, PATIENCE_S, "the caller to be collected")
        finally:
            gc.enable()


class Keeper:
    """Keeps its call to cancel it, until one of them is over, like a connection."""

    def __init__(self) -> None:
        self.heard = asyncio.Event()
        self.call: Call | None = None

    def hear(self, outcome: Outcome) -> None:
        del outcome
        self.call = None
        self.heard.set()

    def leave(self) -> None:
        assert self.call is not None
        self.call.cancel()
        self.call = None


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what it waits for happens in other threads
            await asyncio.sleep(0.001)


@pytest.mark.promise("Tensors and requests of clients", "A request can be cancelled while …")
def test_a_loop_hears_no_more_of_what_it_cancelled(folder: Path) -> None:
    async def main() -> tuple[Sequence[Outcome], float]:
        heard: list[Outcome] = []
        executing = sent(runtime, 1, heard.append)
        queued = sent(runtime, 2, heard.append)
        last: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        sent(runtime, 3, last.set_result)
        executing.cancel()
        queued.cancel()
        queued.cancel()
        backend.wait_for(1).answer()
        await until(lambda: len(backend.batches) == 2)
        backend.wait_for(2).answer()
        return heard, value(await last)

    with holding(folder) as (backend, runtime):
        assert asyncio.run(main()) == ([], 3)
        assert backend.sent == [[1.0], [3.0]]


def test_a_refusal_of_the_scheduler_is_the_answer(folder: Path) -> None:
    heard: list[Outcome] = []

    async def main() -> None:
        hosted, request = made(runtime, 1)
        runtime.unload("m")
        call = Call(hosted, heard.append)
        call.send(request)
        await until(lambda: heard)
        [refusal] = heard
        assert isinstance(refusal, moonpool.ModelUnavailable)
        assert call.is_settled()

    with holding(folder) as (_, runtime):
        asyncio.run(main())
