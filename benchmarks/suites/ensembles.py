"""A pipeline of three small models as an ensemble: beside the three calls, and beside the same ensemble in a real
Triton.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import moonpool
from moonpool.benchmarks.suites.figure import counted
from moonpool.benchmarks.suites.hosted import folder_of
from moonpool.benchmarks.suites.peer.presser import Case, Shown, presser, report_in_turns
from moonpool.benchmarks.suites.peer.served import both_servers
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import Series, calls_in_turns, in_turns, time_us_async

_STEPS = ("first", "second", "third")
_MODELS = (*(f"{name}=increment" for name in _STEPS), "pipeline")
_ROUNDS, _CALLS = 9, 1000


def measure(report: Report, quick: bool) -> None:
    """In one process first, then for clients of both servers."""
    with tempfile.TemporaryDirectory(prefix="moonpool-") as scratch:
        for model in _MODELS:
            name, folder = folder_of(model)
            (Path(scratch) / name).symlink_to(folder)
        with moonpool.Runtime(scratch) as runtime:
            _measure_here(report, runtime, quick)
    _measure_served(report, quick)
    report.note("Three models with one instance each, which add 1 to 4 floats.")
    report.note("The three calls pass on what the model before has answered, as it is.")
    report.note("Ratios of servers are moonpool's figure over Triton's of the same round.")


# In this process


def _measure_here(report: Report, runtime: moonpool.Runtime, quick: bool) -> None:
    rounds, calls = (1, 50) if quick else (_ROUNDS, _CALLS)
    x = np.ones((1, 4), np.float32)

    def one_by_one() -> None:
        y = x
        for name in _STEPS:
            y = runtime.infer(name, {"X": y})["Y"]

    cases = {"ensemble": lambda: runtime.infer("pipeline", {"X": x}), "three calls": one_by_one}
    _report_pair(report, "infer, one caller", calls_in_turns(cases, rounds, calls))
    _report_pair(report, "ainfer, one task", _tasks_in_turns(runtime, x, rounds, calls))


def _tasks_in_turns(runtime: moonpool.Runtime, x: Any, rounds: int, calls: int) -> Mapping[str, Series]:
    async def whole() -> None:
        await runtime.ainfer("pipeline", {"X": x})

    async def one_by_one() -> None:
        y = x
        for name in _STEPS:
            y = (await runtime.ainfer(name, {"X": y}))["Y"]

    cases = {"ensemble": whole, "three calls": one_by_one}
    with asyncio.Runner() as runner:
        return in_turns({k: partial(_timed, runner, call, calls) for k, call in cases.items()}, rounds)


def _timed(runner: asyncio.Runner, call: Callable[[], Awaitable[object]], calls: int) -> list[float]:
    return runner.run(time_us_async(call, calls))


def _report_pair(report: Report, name: str, series: Mapping[str, Series]) -> None:
    for column, each in series.items():
        report.figure(name, "µs", each.values, column=column)
    ratios = series["ensemble"].over(series["three calls"])
    report.ratio(name, ratios, column="ratio", goal="at most 1.2", headline=True)


# For clients


def _measure_served(report: Report, quick: bool) -> None:
    pressed = presser()
    with contextlib.ExitStack() as stack:
        servers = both_servers(report, stack, _MODELS)
        for protocol, model, callers in itertools.product(("http", "grpc"), ("pipeline", "first"), (1, 4)):
            if quick and callers > 1:
                continue
            case = Case(protocol, model, "FP32", {"X": 4}, True, callers)
            is_whole = model == "pipeline"
            shown = {
                "p50_us": Shown("p50, ", "µs", "at most 0.33" if is_whole else "", is_ratio_headline=is_whole),
                "processor_us": Shown("processor, ", "µs", is_ratio_headline=is_whole),
            }
            name = f"{model}, {protocol.upper()}, {counted(callers, 'caller')}"
            sides = {server.name: (case, server) for server in servers}
            report_in_turns(report, name, pressed, sides, shown, quick=quick)
    report.note(f"Servers, models and generator are on one machine; {pressed.words}.")


if __name__ == "__main__":
    main("ensembles", "What does an ensemble cost beside its models, and beside a real Triton's?", measure)
