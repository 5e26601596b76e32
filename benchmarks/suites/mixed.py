"""Requests as services send them, which differ from the one before, beside requests that are all alike."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import moonpool
from moonpool.benchmarks.suites.hosted import MODELS, pids
from moonpool.benchmarks.suites.placement import placed, placements
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import in_turns

_TASKS = 32
_PARTS = ("time", "runtime's processor time", "stub's")
_LEVELS = {"dynamic_batching": {"priority_levels": 2, "default_priority_level": 2}}
# Sends so many requests of a load.
Run = Callable[[moonpool.Runtime, "Load", int], None]


class Request(NamedTuple):
    """Arguments of `infer`, but for the model."""

    inputs: dict[str, Any]
    options: dict[str, Any]


class Load(NamedTuple):
    """Requests that come in turn, and the load of equal requests whose time is 1."""

    name: str
    base: str
    model: str
    requests: Sequence[Request]
    run: Run


def busy_us(pid: int) -> float:
    """Processor time that all threads of a process have taken so far."""
    # The clock of another process has no name, only the number that clock_getcpuclockid(3) computes.
    return time.clock_gettime_ns((~pid << 3) | 2) / 1000


def rows(count: int, width: int) -> dict[str, Any]:
    """The inputs of add_sub."""
    return {name: np.ones((count, width), np.float32) for name in ("INPUT0", "INPUT1")}


def one_by_one(runtime: moonpool.Runtime, load: Load, count: int) -> None:
    """One caller, who waits for each answer."""
    for inputs, options in itertools.islice(itertools.cycle(load.requests), count):
        runtime.infer(load.model, inputs, **options)


def many(runtime: moonpool.Runtime, load: Load, count: int) -> None:
    """Tasks of one event loop, whose requests share batches."""
    requests = itertools.islice(itertools.cycle(load.requests), count)

    async def call() -> None:
        for inputs, options in requests:
            await runtime.ainfer(load.model, inputs, **options)

    async def run() -> None:
        await asyncio.gather(*(call() for _ in range(_TASKS)))

    asyncio.run(run())


def loads() -> Iterator[Load]:
    """Each load, after the one of equal requests that it is compared with."""
    plain = [Request(rows(1, 4), {})]
    # 1,000 shapes of at most 1,000 floats.
    shapes = [Request(rows(1 + n % 25, 1 + n // 25), {}) for n in range(1000)]
    seeded = random.Random(1)
    mixed = [Request(rows(seeded.randint(1, 4), 4), {}) for _ in range(997)]
    for model, what in (("add_sub", ""), ("own_kind", "own kind, ")):
        alone = f"{what}equal"
        yield Load(alone, alone, model, plain, one_by_one)
        yield Load(f"{what}240 shapes", alone, model, shapes[::4][:240], one_by_one)
        yield Load(f"{what}1,000 shapes", alone, model, shapes, one_by_one)
        together = f"{what}{_TASKS} tasks, equal"
        yield Load(together, together, model, plain, many)
        yield Load(f"{what}{_TASKS} tasks, 1 to 4 rows", together, model, mixed, many)
    for name, options in (
        ("an id", {"request_id": "a1b2"}),
        ("a parameter", {"parameters": {"temperature": 0.5}}),
        ("a deadline", {"timeout_s": 10.0}),
    ):
        yield Load(name, "equal", "add_sub", [Request(rows(1, 4), options)], one_by_one)
    levels = [Request(rows(1, 4), {"priority": level}) for level in (1, 2)]
    yield Load("two priorities", "equal", "urgent", levels, one_by_one)
    ids = [Request(rows(1, 4), {"request_id": f"{number:08x}"}) for number in range(1000)]
    yield Load(f"{_TASKS} tasks, ids", f"{_TASKS} tasks, equal", "add_sub", ids, many)
    texts = [Request({"TEXT": np.array([b"x" * 8] * 4, object)}, {})]
    yield Load("equal strings", "equal strings", "texts", texts, one_by_one)
    lengths = [Request({"TEXT": np.array([b"x" * seeded.randint(0, 40)] * 4, object)}, {}) for _ in range(997)]
    yield Load("strings of 0 to 40 bytes", "equal strings", "texts", lengths, one_by_one)


def measure(report: Report, quick: bool) -> None:
    """Measure all loads in turns, with both sides on one core and on two."""
    rounds, count = (1, 64) if quick else (7, 2_000)
    with moonpool.Runtime() as runtime:
        runtime.load("add_sub", MODELS / "add_sub")
        runtime.load("urgent", MODELS / "add_sub", config=_LEVELS)
        runtime.load("texts", MODELS / "texts")
        runtime.load("own_kind", MODELS / "sums_of_any_width.py")
        cases = [*loads()]
        stubs = {model: pids(runtime, model)[0] for model in {load.model for load in cases}}

        def window(load: Load) -> Callable[[], list[float]]:
            stub = stubs[load.model]

            def measured() -> list[float]:
                stub_us, own_us = busy_us(stub), time.process_time_ns() / 1000
                began = time.perf_counter_ns()
                load.run(runtime, load, count)
                passed_us = (time.perf_counter_ns() - began) / 1000
                parts = passed_us, time.process_time_ns() / 1000 - own_us, busy_us(stub) - stub_us
                return [part / count for part in parts]

            return measured

        for place in placements():
            if place.cores is None:
                continue
            with placed(place, list(stubs.values())):
                found = in_turns({load.name: window(load) for load in cases}, rounds)
            for load in cases:
                mine, base = found[load.name].rounds, found[load.base].rounds
                for index, part in enumerate(_PARTS):
                    values = [each[index] for each in mine]
                    column = f"{part}, {place.name}"
                    report.figure(load.name, "µs", values, column=column, headline=index == 0)
                    if load.name == load.base:
                        continue
                    report.ratio(
                        f"{load.name} over {load.base}, {part}",
                        [each[index] / other[index] for each, other in zip(mine, base, strict=True)],
                        column=place.name,
                        headline=index == 0,
                    )


if __name__ == "__main__":
    main("mixed", "What does a request take that differs from the one before?", measure)
