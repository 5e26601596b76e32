"""Callers that send requests of all kinds for any length of time, and check each answer."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np
from tests.e2e.hosting import MODELS, Config, tensor
from tests.inside import hosted_in
from tests.waiting import wait_until

import moonpool
from moonpool import ModelError
from moonpool.runtime.schedule.scheduler import Scheduler

TASKS = 32
THREADS = 4
X = np.arange(16, dtype=np.float32)
DROPPED = "the model ended without a last response"
MODELS_BY_KIND: dict[str, Config] = {
    "plain": {"max_batch_size": 8, "dynamic_batching": {}},
    "stream": {"model_transaction_policy": {"decoupled": True}},
    "coroutine": {"max_batch_size": 8},
    "asker": {},
}
SIGNATURE: Config = {
    "input": [tensor("HOW", "STRING", 1), tensor("X", "FP32", 16)],
    "output": [tensor("Y", "FP32", 16)],
}


class Soak:
    """Sends requests in all ways, and checks each answer."""

    def __init__(self, runtime: moonpool.Runtime) -> None:
        self.runtime = runtime
        self.done: Counter[str] = Counter()

    def inputs(self, model: str, how: str) -> dict[str, object]:
        if model in ("stream", "asker"):
            return {"HOW": [how], "X": X}
        return {"HOW": [[how]], "X": X[None]}

    # In event loops

    async def infer(self, model: str, how: str) -> None:
        found = await self.runtime.ainfer(model, self.inputs(model, how), timeout_s=60.0)
        expect(found["Y"].ravel(), X if how == "pass" else X * 2)

    async def parameters(self, model: str, number: int) -> None:
        given: dict[str, bool | int | float | str] = {"number": number, "text": "moon", "is": True}
        response = await self.runtime.arequest(model, self.inputs(model, "ok"), parameters=given, timeout_s=60.0)
        expect(response.outputs["Y"].ravel(), X * 2)
        if response.parameters != given:
            raise AssertionError(f"{given} came back as {response.parameters}")

    async def refused(self, model: str, how: str, words: str) -> None:
        try:
            await self.runtime.ainfer(model, self.inputs(model, how), timeout_s=60.0)
        except ModelError as error:
            if words in str(error):
                return
            raise
        raise AssertionError(f"{model} answered {how}")

    async def streamed(self, how: str, count: int, words: str = "") -> None:
        taken, errors = 0, ""
        stream = self.runtime.stream("stream", self.inputs("stream", how), timeout_s=60.0)
        while True:
            try:
                response = await anext(stream)
            except StopAsyncIteration:
                break
            except ModelError as error:
                errors += str(error)
            else:
                expect(response.outputs["Y"], X * 2)
                taken += 1
        if taken != count or words not in errors or bool(words) != bool(errors):
            raise AssertionError(f"{how} gave {taken} responses, not {count}, and '{errors}'")

    async def cancelled(self, number: int) -> None:
        if number % 2:
            stream = self.runtime.stream("stream", self.inputs("stream", "until cancelled"))
            await asyncio.sleep(0)
            stream.close()
            return
        asked = self.runtime.ainfer("plain", self.inputs("plain", "later"))
        task = asyncio.ensure_future(asked)
        await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return

    def one(self, dice: random.Random) -> tuple[str, Awaitable[None]]:
        """Choose a kind of request; returns its name and the request."""
        number = dice.randrange(1000)
        kinds: list[tuple[float, str, Callable[[], Awaitable[None]]]] = [
            (300, "default", lambda: self.infer("plain", "ok")),
            (100, "passed through", lambda: self.infer("plain", "pass")),
            (100, "parameters", lambda: self.parameters("plain", number)),
            (80, "errors", lambda: self.refused("plain", "error", "on purpose")),
            (50, "senders", lambda: self.infer("plain", "sender")),
            (50, "senders of another thread", lambda: self.infer("plain", "later")),
            (30, "never answered", lambda: self.refused("plain", "drop", DROPPED)),
            (80, "coroutines", lambda: self.infer("coroutine", "ok")),
            (20, "coroutines' errors", lambda: self.refused("coroutine", "error", "on purpose")),
            (20, "requests of coroutines", lambda: self.infer("coroutine", "ask")),
            (30, "requests of models", lambda: self.infer("asker", "ok")),
            (10, "their errors", lambda: self.refused("asker", "error", "on purpose")),
            (20, "streams between models", lambda: self.infer("asker", "3")),
            (10, "cancellations by models", lambda: self.infer("asker", "until cancelled")),
            (80, "streams", lambda: self.streamed(str(number % 4), number % 4)),
            (30, "streams of another thread", lambda: self.streamed("later", 3)),
            (20, "streams with an error", lambda: self.streamed("raise", 1, "on purpose")),
            (20, "dropped senders", lambda: self.streamed("drop", 0, DROPPED)),
            (0.5, "senders dropped in cycles", lambda: self.streamed("cycle", 0, DROPPED)),
            (35, "cancellations", lambda: self.cancelled(number)),
        ]
        ((_, name, make),) = dice.choices(kinds, [weight for weight, _, _ in kinds])
        return name, make()

    async def work(self, seed: int, count: int) -> None:
        dice = random.Random(seed)
        for _ in range(count):
            name, request = self.one(dice)
            await request
            self.done[name] += 1

    async def run(self, count: int) -> None:
        await asyncio.gather(*(self.work(seed, count // TASKS) for seed in range(TASKS)))

    # In threads

    def threads(self, count: int) -> None:
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(count // THREADS):
                    found = self.runtime.infer("plain", self.inputs("plain", "ok"), timeout_s=60.0)
                    expect(found["Y"].ravel(), X * 2)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.done["default, from threads"] += count // THREADS * THREADS
        if failures:
            raise failures[0]

    def all(self, count: int) -> None:
        self.threads(count // 5)
        asyncio.run(self.run(count - count // 5))


def expect(found: object, wanted: object) -> None:
    if not np.array_equal(found, wanted):  # type: ignore[arg-type]
        raise AssertionError(f"{found} came in place of {wanted}")


def load_all(runtime: moonpool.Runtime, config: Config | None = None) -> None:
    """Load the models, each in one instance; `config` is added to their configurations."""
    for name, kind in MODELS_BY_KIND.items():
        runtime.load(name, MODELS / "soak.py", config=SIGNATURE | kind | (config or {}))


def settle(runtime: moonpool.Runtime) -> None:
    """Wait until no request is open any more: cancelled ones end a little later."""
    for name in MODELS_BY_KIND:
        scheduler = hosted_in(runtime, name).scheduler
        wait_until(partial(is_quiet, scheduler), 60.0)


def is_quiet(scheduler: Scheduler) -> bool:
    return not len(scheduler.open_requests) and not scheduler.queued and not scheduler.executing
