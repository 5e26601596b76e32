"""Time from spawn to ready: a stub against `python -c "import numpy"`."""

from __future__ import annotations

import threading
import time

import moonpool
from benchmarks.hosted import MODELS
from benchmarks.process_start import start_us
from benchmarks.report import Report, main
from benchmarks.rounds import Series, in_turns


class Starts:
    """Listens to the states of instances, and measures how long they took from STARTING to READY."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self._took_ms: list[float] = []
        self._lock = threading.Lock()

    def note(self, subject: str, state: str, because: str) -> None:
        """The listener for a `Runtime`."""
        del because
        now = time.perf_counter()
        with self._lock:
            if state == "STARTING":
                self._began[subject] = now
            elif state == "READY" and subject in self._began:
                self._took_ms.append((now - self._began.pop(subject)) * 1000)

    def take_ms(self) -> list[float]:
        """Return the times collected since the last call."""
        with self._lock:
            taken, self._took_ms = self._took_ms, []
        return taken


def measure(report: Report, quick: bool) -> None:
    """Interpreters, stubs and whole loads in turns."""
    starts = Starts()
    loads: list[float] = []
    with moonpool.Runtime(listener=starts.note) as runtime:

        def load() -> list[float]:
            before = time.perf_counter()
            runtime.load("add_sub", MODELS / "add_sub")
            loads.append((time.perf_counter() - before) * 1000)
            runtime.unload("add_sub")
            return starts.take_ms()

        series = in_turns(
            {
                "python -c pass": lambda: [start_us("pass") / 1000],
                'python -c "import numpy"': lambda: [start_us() / 1000],
                "a stub, spawn to ready": load,
            },
            1 if quick else 25,
        )
    for name, found in series.items():
        report.figure(name, "ms", found.values, headline=True)
    stub, with_numpy = series["a stub, spawn to ready"], series['python -c "import numpy"']
    ratios = stub.over(with_numpy)
    report.ratio('a stub over python -c "import numpy"', ratios, goal="≤ 1.3", headline=True)
    numpy_alone = with_numpy.minus(series["python -c pass"])
    report.figure("of that, importing numpy", "ms", numpy_alone)
    report.figure("of that, all but the interpreter and numpy", "ms", stub.minus(with_numpy))
    # The first load does not count.
    whole = Series([[value] for value in loads[1:]])
    report.figure("Runtime.load, two processes one after the other", "ms", whole.values)
    report.note(
        "Runtime.load first lets the model complete its configuration in a process of its own."
    )


if __name__ == "__main__":
    main("startup", "How soon can a stub take its first batch?", measure)
