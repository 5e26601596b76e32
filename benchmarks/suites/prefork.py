"""Time until a model that is forked from a template is back, and memory of its instances beside each other."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import time
from typing import Any

import numpy as np

import moonpool
from moonpool.benchmarks.suites.hosted import MODELS, option, pids
from moonpool.benchmarks.suites.memory import memory_mib
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import in_turns

_DEADLINE_S = 60.0
_WAYS = {"no": "started anew", "imports": "forked after the imports", "initialize": "forked after initialize"}
_INPUT = {"X": np.zeros(1, np.float32)}
_INSTANCES = 4


def _config(prefork: str, mib: int) -> dict[str, Any]:
    return {
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "PID", "data_type": "TYPE_INT64", "dims": [1]}],
        "parameters": {
            "mib": option(mib),
            "MOONPOOL_PREFORK": option(prefork),
            # By default restarts pause longer and longer, and end after the sixth.
            "MOONPOOL_MAX_RESTARTS": option(100_000),
            "MOONPOOL_RESTART_BACKOFF_S": option(0),
        },
    }


class Victim:
    """A model whose only stub is killed."""

    def __init__(self, runtime: moonpool.Runtime, library: str, prefork: str) -> None:
        self._runtime = runtime
        self._name = f"{library}_{prefork}"
        file = "weights.py" if library == "numpy" else f"weights_{library}.py"
        runtime.load(self._name, MODELS / file, config=_config(prefork, 1))
        runtime.infer(self._name, _INPUT, timeout_s=_DEADLINE_S)

    def kill(self) -> list[float]:
        """Milliseconds from the kill of an idle stub to the first good answer."""
        before = time.perf_counter()
        os.kill(pids(self._runtime, self._name)[0], signal.SIGKILL)
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            try:
                self._runtime.infer(self._name, _INPUT, timeout_s=_DEADLINE_S)
            except (moonpool.StubDied, moonpool.ModelUnavailable):
                if time.monotonic() > deadline:
                    raise
            else:
                return [(time.perf_counter() - before) * 1000]


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
        victims = {kind: Victim(runtime, *kind) for kind in kinds}
        series = in_turns({kind: victim.kill for kind, victim in victims.items()}, 1 if quick else 20)
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
            runtime.infer("m", _INPUT, timeout_s=_DEADLINE_S)
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
