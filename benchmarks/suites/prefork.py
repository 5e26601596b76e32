"""Time until a model that is forked from a template is back, and memory of its instances beside each other."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import moonpool
from moonpool.benchmarks.suites.hosted import DEADLINE_S, MODELS, RESTARTS, first_answer_ms, option, pids
from moonpool.benchmarks.suites.memory import memory_mib
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import in_turns

_WAYS = {"no": "started anew", "imports": "forked after the imports", "initialize": "forked after initialize"}
_INPUT = {"X": np.zeros(1, np.float32)}
_INSTANCES = 4


def _config(prefork: str, mib: int) -> dict[str, Any]:
    return {
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "PID", "data_type": "TYPE_INT64", "dims": [1]}],
        "parameters": {
            name: option(value) for name, value in {"mib": mib, "MOONPOOL_PREFORK": prefork, **RESTARTS}.items()
        },
    }


def _victim(runtime: moonpool.Runtime, library: str, prefork: str) -> Callable[[], list[float]]:
    """Load a model, and return what kills its only stub and waits for an answer."""
    name = f"{library}_{prefork}"
    file = "weights.py" if library == "numpy" else f"weights_{library}.py"
    runtime.load(name, MODELS / file, config=_config(prefork, 1))
    ask = partial(runtime.infer, name, _INPUT, timeout_s=DEADLINE_S)
    ask()
    return partial(first_answer_ms, runtime, name, ask)


def measure(report: Report, quick: bool) -> None:
    """Deaths of all models in turns; then the memory of several instances."""
    # The stubs die on purpose, so their log lines are of no use.
    logging.getLogger("moonpool").setLevel(logging.CRITICAL)
    libraries = ["numpy"]
    if importlib.util.find_spec("torch") is None:
        report.skipped("torch", "it is not installed here")
    else:
        libraries.append("torch")
    with moonpool.Runtime() as runtime:
        kinds = [(library, way) for library in libraries for way in _WAYS]
        victims = {kind: _victim(runtime, *kind) for kind in kinds}
        series = in_turns(victims, 1 if quick else 20)
        for (library, way), found in series.items():
            goal = "" if way == "no" else "≤ 50 ms"
            name = f"{library} model, kill -9 to the first answer"
            report.figure(name, "ms", found.values, column=_WAYS[way], goal=goal, headline=True)
    mib = 10 if quick else 200
    for way in _WAYS:
        _weigh(report, way, mib)
    report.note(
        "The pauses between restarts are set to none, as they are before a first restart. Each model has 1 MiB of "
        f"weights there, and {mib} MiB where the memory of {_INSTANCES} instances, and of the template, is added up."
    )


def _weigh(report: Report, way: str, mib: int) -> None:
    with moonpool.Runtime() as runtime:
        runtime.load("m", MODELS / "weights.py", config=_config(way, mib), instances=_INSTANCES)
        for _ in range(_INSTANCES * 4):
            runtime.infer("m", _INPUT, timeout_s=DEADLINE_S)
        processes = pids(runtime, "m")
        if way != "no":
            processes.append(_parent(processes[0]))
        total = sum(memory_mib(pid)["PSS"] for pid in processes)
    name = f"{_INSTANCES} instances with {mib} MiB of weights each, PSS of all processes"
    report.figure(name, "MiB", [total], column=_WAYS[way], headline=True)


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


if __name__ == "__main__":
    main("prefork", "How soon is a model back that is forked from a template?", measure)
