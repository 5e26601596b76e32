"""Callers that send requests of all kinds with distinct inputs, check each answer and count each outcome."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.chaos.tally import PATIENCE_S, Tally, Wrong
from tests.e2e.hosting import MODELS, Config, options, tensor
from tests.e2e.sequence_client import END, START
from tests.e2e.soaking import MODELS_BY_KIND
from tests.e2e.soaking import SIGNATURE as SOAK
from tests.e2e.test_sequences import config as sequences

import moonpool

TASKS, THREADS = 24, 4
WIDE = 1 << 18  # of FP32: 1 MiB
UNTIRING = {"MAX_RESTARTS": 1_000_000, "RESTART_BACKOFF_S": 0, "RESTART_BACKOFF_MAX_S": 0}
LIMITS = {"EXECUTE_TIMEOUT_S": 1, "MEMORY_LIMIT_BYTES": "1G"}
OFTEN = options(**UNTIRING, **LIMITS)
RETRIED = options(**UNTIRING, **LIMITS, RETRY="yes")
ECHO = MODELS / "echo.py"

# Name, file, configuration and instances of each model.
CAST: list[tuple[str, str, Config, int]] = [
    *((name, "soak.py", SOAK | kind | OFTEN, 1) for name, kind in MODELS_BY_KIND.items()),
    ("sums", "sequences.py", sequences(2, max_sequence_idle_microseconds=5_000_000) | OFTEN, 1),
    ("wide", "echo.py", {"input": [tensor("X", "FP32", -1)], "output": [tensor("OUT_X", "FP32", -1)], **RETRIED}, 2),
    (
        "strings",
        "echo.py",
        {"input": [tensor("S", "STRING", -1)], "output": [tensor("OUT_S", "STRING", -1)], **OFTEN},
        1,
    ),
]
# No other model calls these, and they answer with their batches, so their counts are the requests sent to them.
COUNTED = ("asker", "sums", "wide", "strings")

Ask = Callable[[random.Random], Awaitable[None]]


def load_all(runtime: moonpool.Runtime, seed: int) -> None:
    """Load models at `standard` and at `strict` in turns; the seed decides which."""
    for number, (name, file, config, instances) in enumerate(CAST, seed):
        level = ("standard", "strict")[number % 2]
        sandbox = options(SANDBOX=level, SANDBOX_MODELS="plain, stream")
        parameters = config["parameters"] | sandbox["parameters"]
        runtime.load(name, MODELS / file, config=config | {"parameters": parameters}, instances=instances)


def few(dice: random.Random) -> NDArray[np.float32]:
    """Make numbers that no other request has, so that an answer can be checked to be its own."""
    first = dice.randrange(1 << 22)
    return np.arange(first, first + 16, dtype=np.float32)


class Crowd:
    """Callers in threads and in an event loop, from `with` to its end. They finish the requests that they began."""

    def __init__(self, runtime: moonpool.Runtime, tally: Tally, seed: int) -> None:
        self._runtime, self._tally, self._seed = runtime, tally, seed
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._caller, args=(number,), name=f"caller {number}") for number in range(THREADS)
        ]
        self._threads.append(threading.Thread(target=self._loop, name="callers in a loop"))
        self.errors: list[BaseException] = []

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
        if any(thread.is_alive() for thread in self._threads):
            faulthandler.dump_traceback(2)
            raise AssertionError(f"a request hangs: {self._tally}")

    # In threads

    def _caller(self, number: int) -> None:
        dice = random.Random(f"{self._seed} {number}")
        try:
            while not self._stop.is_set():
                dice.choice((self._sums, self._plain, self._plain, self._wide_in_place))(dice)
        except BaseException as error:
            self.errors.append(error)

    def _plain(self, dice: random.Random) -> None:
        x, how = few(dice), dice.choice(("ok", "pass", "sender", "later"))
        timeout_s, hurried = patience(dice)
        with self._tally.request("plain", how, hurried=hurried):
            found = self._runtime.infer("plain", soak_inputs("plain", how, x), timeout_s=timeout_s)
            expect(found["Y"][0], x if how == "pass" else x * 2)

    def _wide_in_place(self, dice: random.Random) -> None:
        x = self._runtime.empty("wide", "X", WIDE)
        x[:] = dice.random()
        with self._tally.request("wide", "in shared memory"):
            found = self._runtime.infer("wide", {"X": x}, timeout_s=PATIENCE_S)
            expect(found["OUT_X"], x)

    def _sums(self, dice: random.Random) -> None:
        which, steps, wanted = dice.getrandbits(40) + 1, dice.randint(1, 6), 0.0
        answered_s = time.monotonic()
        for step in range(steps):
            x = dice.randint(1, 9)
            wanted += x
            # A pause longer than a sequence may be idle has ended it.
            pause_s = time.monotonic() - answered_s
            kind = f"step {step} after {pause_s:.3f} s"
            with self._tally.request("sums", kind) as request:
                response = self._runtime.request(
                    "sums",
                    {"X": np.full((1, 1), x, np.float32)},
                    timeout_s=PATIENCE_S,
                    correlation_id=which,
                    flags=START * (step == 0) | END * (step == steps - 1),
                )
                found = json.loads(response.outputs["Y"].item())["sum"]
                if found != wanted:
                    raise Wrong(f"{found} and not {wanted}")
            answered_s = time.monotonic()
            if request.outcome != "answered":
                return

    # In an event loop

    def _loop(self) -> None:
        try:
            asyncio.run(self._all())
        except BaseException as error:
            self.errors.append(error)

    async def _all(self) -> None:
        await asyncio.gather(*(self._task(number) for number in range(TASKS)))

    async def _task(self, number: int) -> None:
        dice = random.Random(f"{self._seed} task {number}")
        kinds: list[tuple[int, Ask]] = [
            (30, self._ask_plain),
            (10, self._ask_wide),
            (10, self._ask_strings),
            (15, self._ask_coroutine),
            (15, self._ask_asker),
            (20, self._ask_stream),
            (4, self._leave),
            (1, self._lie),
            (1, self._hog),
        ]
        while not self._stop.is_set():
            ((_, ask),) = dice.choices(kinds, [weight for weight, _ in kinds])
            await ask(dice)

    async def _ask_plain(self, dice: random.Random) -> None:
        x = few(dice)
        how = dice.choice(("ok", "ok", "pass", "sender", "later", "error", "drop"))
        timeout_s, hurried = patience(dice)
        with self._tally.request("plain", how, hurried=hurried):
            asked = self._runtime.ainfer("plain", soak_inputs("plain", how, x), timeout_s=timeout_s)
            expect((await asked)["Y"][0], x if how == "pass" else x * 2)

    async def _ask_coroutine(self, dice: random.Random) -> None:
        x, how = few(dice), dice.choice(("ok", "ask", "error"))
        with self._tally.request("coroutine", how):
            inputs = soak_inputs("coroutine", how, x)
            found = await self._runtime.ainfer("coroutine", inputs, timeout_s=PATIENCE_S)
            expect(found["Y"][0], x * 2)

    async def _ask_asker(self, dice: random.Random) -> None:
        x, how = few(dice), dice.choice(("ok", "error", "3", "until cancelled"))
        with self._tally.request("asker", how):
            inputs = soak_inputs("asker", how, x)
            found = await self._runtime.ainfer("asker", inputs, timeout_s=PATIENCE_S)
            expect(found["Y"], x * 2)

    async def _ask_stream(self, dice: random.Random) -> None:
        x, how = few(dice), dice.choice(("0", "1", "3", "later", "raise", "drop"))
        timeout_s, hurried = patience(dice)
        inputs, taken = soak_inputs("stream", how, x), 0
        with self._tally.request("stream", how, hurried=hurried):
            async for response in self._runtime.stream("stream", inputs, timeout_s=timeout_s):
                expect(response.outputs["Y"], x * 2)
                taken += 1
            if taken != {"later": 3}.get(how) and str(taken) != how:
                raise Wrong(f"{taken} responses")

    async def _ask_wide(self, dice: random.Random) -> None:
        x = np.full(dice.choice((1, WIDE, WIDE, 3 * WIDE)), dice.random(), np.float32)
        timeout_s, hurried = patience(dice)
        with self._tally.request("wide", f"{x.nbytes} bytes", hurried=hurried):
            found = await self._runtime.ainfer("wide", {"X": x}, timeout_s=timeout_s)
            expect(found["OUT_X"], x)

    async def _ask_strings(self, dice: random.Random) -> None:
        sizes = [dice.choice((0, 1, 10, 3000)) for _ in range(dice.randrange(20))]
        x = np.array([dice.randbytes(size) for size in sizes], np.object_)
        with self._tally.request("strings", f"{sizes}"):
            found = await self._runtime.ainfer("strings", {"S": x}, timeout_s=PATIENCE_S)
            if found["OUT_S"].tolist() != x.tolist():
                raise Wrong("other strings")

    async def _leave(self, dice: random.Random) -> None:
        """Cancel or close the request at some point before its end."""
        model = dice.choice(("plain", "stream"))
        how = "later" if model == "plain" else "until cancelled"
        inputs = soak_inputs(model, how, few(dice))
        with self._tally.request(model, "left") as request:
            pause_s = dice.choice((0, 0.001, 0.02))
            if model == "stream":
                stream = self._runtime.stream(model, inputs, timeout_s=PATIENCE_S)
                await asyncio.sleep(pause_s)
                stream.close()
            else:
                asked = self._runtime.ainfer(model, inputs, timeout_s=PATIENCE_S)
                task = asyncio.ensure_future(asked)
                await asyncio.sleep(pause_s)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            request.outcome = "left"

    async def _lie(self, dice: random.Random) -> None:
        model = dice.choice(("plain", "stream", "coroutine"))
        inputs = soak_inputs(model, f"lie {dice.random()}", few(dice))
        with self._tally.request(model, "a lie") as request:
            try:
                async for _ in self._runtime.stream(model, inputs, timeout_s=PATIENCE_S):
                    request.outcome = "lied"
            except moonpool.ModelError as error:
                # Its answer does not matter.
                request.outcome = type(error).__name__

    async def _hog(self, dice: random.Random) -> None:
        model = dice.choice(("plain", "coroutine"))
        inputs = soak_inputs(model, "hog", x := few(dice))
        with self._tally.request(model, "hog"):
            found = await self._runtime.ainfer(model, inputs, timeout_s=PATIENCE_S)
            expect(found["Y"][0], x * 2)


def patience(dice: random.Random) -> tuple[float, bool]:
    """Choose a timeout. Returns it, and True if it is so short that its end is no failure."""
    if dice.random() < 0.03:
        return dice.choice((0.0005, 0.005, 0.05)), True
    return PATIENCE_S, False


def soak_inputs(model: str, how: str, x: NDArray[np.float32]) -> dict[str, Any]:
    if model in ("stream", "asker"):
        return {"HOW": [how], "X": x}
    return {"HOW": [[how]], "X": x[None]}


def expect(found: NDArray[Any], wanted: NDArray[Any]) -> None:
    if not np.array_equal(found, wanted):
        raise Wrong(f"{found} and not {wanted}")
