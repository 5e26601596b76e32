"""A hundred thousand requests of all kinds: at the end everything is as it was at the beginning."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, Config, tensor
from tests.waiting import wait_until

import moonpool
from moonpool import ModelError
from moonpool.runtime.scheduler import Scheduler

REQUESTS = 100_000
WARM_UP = 10_000
TASKS = 32
THREADS = 4
# What an allocator may keep for itself, and what the figures scatter by.
GROWTH_BYTES = 4 << 20

X = np.arange(16, dtype=np.float32)
DROPPED = "the model ended without a last response"
MODELS_BY_KIND: dict[str, Config] = {
    "plain": {"max_batch_size": 8, "dynamic_batching": {}},
    "stream": {"model_transaction_policy": {"decoupled": True}},
    "coroutine": {"max_batch_size": 8},
}
SIGNATURE: Config = {
    "input": [tensor("HOW", "STRING", 1), tensor("X", "FP32", 16)],
    "output": [tensor("Y", "FP32", 16)],
}


class Soak:
    """Asks in all ways, and checks each answer."""

    def __init__(self, runtime: moonpool.Runtime) -> None:
        self.runtime = runtime
        self.done: Counter[str] = Counter()

    def inputs(self, model: str, how: str) -> dict[str, object]:
        if model == "stream":
            return {"HOW": [how], "X": X}
        return {"HOW": [[how]], "X": X[None]}

    # In event loops

    async def infer(self, model: str, how: str) -> None:
        found = await self.runtime.ainfer(model, self.inputs(model, how), timeout_s=60.0)
        expect(found["Y"].ravel(), X if how == "pass" else X * 2)

    async def parameters(self, model: str, number: int) -> None:
        given: dict[str, bool | int | float | str] = {"number": number, "text": "moon", "is": True}
        response = await self.runtime.arequest(
            model, self.inputs(model, "ok"), parameters=given, timeout_s=60.0
        )
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
        """A request of some kind, and the name of that."""
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


class Figures:
    """What could grow, in this process and in the stubs."""

    def __init__(self, runtime: moonpool.Runtime) -> None:
        gc.collect()
        self.rss_bytes = {"runtime": rss_bytes(os.getpid())}
        self.descriptors = {"runtime": descriptors(os.getpid())}
        self.shared_bytes: dict[str, int] = {}
        self.open: dict[str, int] = {}
        self.alive: dict[str, int] = {}
        for name in MODELS_BY_KIND:
            hosted = runtime._models.find(name)
            (seat,) = hosted.supervisor.seats
            (row,) = runtime.instances(name)
            self.rss_bytes[name] = rss_bytes(row["pid"])
            self.descriptors[name] = descriptors(row["pid"])
            self.shared_bytes[name] = int(seat.instance.state.link.size_bytes())
            self.open[name] = len(hosted.scheduler.outcomes.open) + hosted.scheduler.queued
        said = runtime.infer("plain", {"HOW": [["alive"]], "X": X[None]}, timeout_s=60.0)
        self.alive["plain"] = int(said["Y"].ravel()[0])
        self.objects = len(gc.get_objects())

    def __str__(self) -> str:
        rss = ", ".join(f"{name} {size >> 10} KiB" for name, size in self.rss_bytes.items())
        return (
            f"RSS {rss}; descriptors {self.descriptors}; shared bytes {self.shared_bytes}; "
            f"open {self.open}; objects of requests {self.alive}; objects here {self.objects}"
        )


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hundred_thousand_requests_of_all_kinds_leave_nothing(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    # pytest's own alarm is set for tests that take seconds; the mark above still holds.
    faulthandler.cancel_dump_traceback_later()
    # pytest would keep every line of it.
    caplog.set_level(logging.CRITICAL, "moonpool")
    caplog.set_level(logging.CRITICAL, "moonpool.stub")
    with moonpool.Runtime() as runtime:
        for name, kind in MODELS_BY_KIND.items():
            runtime.load(name, MODELS / "soak.py", config=SIGNATURE | kind)
        pids = [row["pid"] for name in MODELS_BY_KIND for row in runtime.instances(name)]
        soak = Soak(runtime)
        soak.all(WARM_UP)
        settle(runtime)
        before = Figures(runtime)
        soak.done.clear()

        started = time.monotonic()
        soak.all(REQUESTS)
        took_s = time.monotonic() - started

        settle(runtime)
        after = Figures(runtime)
        with capsys.disabled():
            sys.stdout.write(
                f"\n{sum(soak.done.values()):,} requests in {took_s:.1f} s: {dict(soak.done)}\n"
                f"before: {before}\nafter:  {after}\n"
            )
        assert [row["pid"] for name in MODELS_BY_KIND for row in runtime.instances(name)] == pids
        assert sum(soak.done.values()) >= REQUESTS - TASKS - THREADS
        assert after.descriptors == before.descriptors
        assert after.shared_bytes == before.shared_bytes
        assert after.open == dict.fromkeys(MODELS_BY_KIND, 0)
        assert after.alive == before.alive
        assert after.objects - before.objects < 500
        for name, size in after.rss_bytes.items():
            assert size - before.rss_bytes[name] < GROWTH_BYTES, name


def settle(runtime: moonpool.Runtime) -> None:
    """Wait until nothing is open any more: what was cancelled ends a little later."""
    for name in MODELS_BY_KIND:
        scheduler = runtime._models.find(name).scheduler
        wait_until(partial(is_quiet, scheduler), 30.0)


def is_quiet(scheduler: Scheduler) -> bool:
    return not len(scheduler.outcomes.open) and not scheduler.queued and not scheduler._busy
