"""Time from `kill -9` of a stub to the first good answer, against the start of a stub."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import moonpool
from moonpool.benchmarks.suites.hosted import MODELS, option, pids
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import in_turns

_GO = {"STALL": np.zeros(1, np.bool_)}
_STALL = {"STALL": np.ones(1, np.bool_)}
_DEADLINE_S = 30.0


class Victim:
    """A model whose only stub is killed."""

    def __init__(self, runtime: moonpool.Runtime, folder: str) -> None:
        self._runtime = runtime
        self._stalled = Path(folder, "stalled")
        # By default restarts pause longer and longer, and end after the sixth.
        restart = {"MOONPOOL_MAX_RESTARTS": option(100_000), "MOONPOOL_RESTART_BACKOFF_S": option(0)}
        parameters = {**restart, "stalled": option(self._stalled)}
        runtime.load("victim", MODELS / "stall", config={"parameters": parameters})
        self.noticed_ms: list[float] = []

    def kill_idle(self) -> list[float]:
        """Milliseconds from the kill of an idle stub to the first good answer."""
        before = time.perf_counter()
        os.kill(pids(self._runtime, "victim")[0], signal.SIGKILL)
        return [self._until_answered(before)]

    def kill_busy(self) -> list[float]:
        """Kill as `kill_idle` does, while a request is executing. Also notes when its caller gets the error."""
        self._stalled.unlink(missing_ok=True)
        noticed: list[float] = []

        def call() -> None:
            try:
                self._runtime.infer("victim", _STALL)
            except moonpool.StubDied:
                noticed.append(time.perf_counter())

        caller = threading.Thread(target=call)
        caller.start()
        deadline = time.monotonic() + _DEADLINE_S
        while not self._stalled.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        before = time.perf_counter()
        os.kill(pids(self._runtime, "victim")[0], signal.SIGKILL)
        took_ms = self._until_answered(before)
        caller.join()
        self.noticed_ms += [(when - before) * 1000 for when in noticed]
        return [took_ms]

    def _until_answered(self, before: float) -> float:
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            try:
                self._runtime.infer("victim", _GO, timeout_s=_DEADLINE_S)
            except (moonpool.StubDied, moonpool.ModelUnavailable):
                if time.monotonic() > deadline:
                    raise
            else:
                return (time.perf_counter() - before) * 1000


def measure(report: Report, quick: bool) -> None:
    """Starts and both kinds of death in turns."""
    # The stubs die on purpose, so their log lines are of no use.
    logging.getLogger("moonpool").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder, moonpool.Runtime() as runtime:
        victim = Victim(runtime, folder)

        def start() -> list[float]:
            before = time.perf_counter()
            runtime.load("other", MODELS / "add_sub")
            took_ms = (time.perf_counter() - before) * 1000
            runtime.unload("other")
            return [took_ms]

        series = in_turns(
            {
                "load, which starts a stub": start,
                "kill -9 when idle, to the first answer": victim.kill_idle,
                "kill -9 in execute, to the first answer": victim.kill_busy,
            },
            1 if quick else 20,
        )
    for name, found in series.items():
        report.figure(name, "ms", found.values, headline=True)
    for name in list(series)[1:]:
        more = series[name].minus(series["load, which starts a stub"])
        what = f"{name}, less a load"
        report.figure(what, "ms", more, goal="≤ 50 ms", headline=True)
    report.figure("kill -9 in execute, until its caller knows", "ms", victim.noticed_ms)
    report.note("The pauses between restarts are set to none, as they are before a first restart.")


if __name__ == "__main__":
    main("recovery", "How soon does a model answer again after its process was killed?", measure)
