"""Time of a call from one model to another that does next to nothing, beside the same call from the runtime."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import moonpool
from moonpool.benchmarks.suites.hosted import MODELS
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import in_turns

_ASKING = {
    "input": [{"name": "N", "data_type": "TYPE_INT32", "dims": [2]}],
    "output": [{"name": "SECONDS", "data_type": "TYPE_FP64", "dims": [1]}],
}


def _from_model(runtime: moonpool.Runtime, count: int, size: int, model: str = "asking") -> list[float]:
    """Microseconds for a request that a model makes."""
    n = np.array([count, size], np.int32)
    seconds = runtime.infer(model, {"N": n})["SECONDS"][0]
    return [float(seconds) / count * 1e6]


def _from_caller(runtime: moonpool.Runtime, count: int, size: int) -> list[float]:
    """Microseconds for a request that the program makes."""
    inputs = {name: np.ones((1, size), np.float32) for name in ("INPUT0", "INPUT1")}
    before = time.perf_counter()
    for _ in range(count):
        runtime.infer("add_sub", inputs)
    return [(time.perf_counter() - before) / count * 1e6]


def measure(report: Report, quick: bool) -> None:
    """One request at a time, of one model, small and large."""
    rounds, count = (1, 64) if quick else (9, 2000)
    with moonpool.Runtime() as runtime:
        runtime.load("add_sub", MODELS / "add_sub")
        runtime.load("asking", MODELS / "asking.py", config=_ASKING)
        runtime.load("asking_at_once", MODELS / "asking_at_once.py", config=_ASKING)
        cases: dict[str, Callable[[], list[float]]] = {}
        for size in (4, 1 << 18):
            times = count if size == 4 else max(10, count // 20)
            cases[f"model {size}"] = lambda s=size, n=times: _from_model(runtime, n, s)  # type: ignore[misc]
            cases[f"caller {size}"] = lambda s=size, n=times: _from_caller(runtime, n, s)  # type: ignore[misc]
        cases["at once"] = lambda: _from_model(runtime, count, 4, "asking_at_once")
        series = in_turns(cases, rounds)
    for size, words in ((4, "4 floats"), (1 << 18, "1 MiB")):
        model, caller = series[f"model {size}"], series[f"caller {size}"]
        report.figure(f"a model asks another one, two inputs of {words}", "µs", model.values, headline=size == 4)
        report.figure(f"the program asks it, two inputs of {words}", "µs", caller.values)
        report.figure(f"ratio, two inputs of {words}", "", model.over(caller), headline=size == 4)
    rates = [1e6 / value for value in series["model 4"].values]
    report.figure("requests of one model to another", "requests/s", rates, goal="10,000")
    rates = [1e6 / value for value in series["at once"].values]
    report.figure("requests of 16 coroutines of one model to another", "requests/s", rates)
    report.note("The two are measured in turns; a model's request makes the same trip twice.")


if __name__ == "__main__":
    main("bls", "How long does a request from one model to another take?", measure)
