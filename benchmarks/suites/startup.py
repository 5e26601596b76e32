"""Time from nothing to ready: of `import moonpool`, of a stub, of a load, of many loads, and of a stub that was
killed; loads at `strict`, too, from a spare and without one.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from functools import partial

import numpy as np

import moonpool
from moonpool.benchmarks.suites.hosted import DEADLINE_S, MODELS, RESTARTS, first_answer_ms
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import in_turns

_ROW = {name: np.ones((1, 4), np.float32) for name in ("INPUT0", "INPUT1")}
# The values of MOONPOOL_PREFORK.
_WAYS = {"blank": "forked", "no": "started anew"}
# Nothing is forked at `strict`.
_COLUMNS = {**_WAYS, "strict": "at strict, started anew", "spare": "at strict, from a spare"}
_PERCENTILES = (95, 99)
# A program that loads one model, and prints how long that took.
_FIRST = """
import sys, time
import moonpool
with moonpool.Runtime() as runtime:
    before = time.perf_counter()
    runtime.load("m", sys.argv[1], options={"MOONPOOL_PREFORK": sys.argv[2]})
    print((time.perf_counter() - before) * 1000)
"""


class Loads:
    """Loads, kills and loads again in one runtime, with one value of MOONPOOL_PREFORK or at `strict`.

    With `spare`, each waits until a spare is ready; that is no part of the time.
    """

    def __init__(self, runtime: moonpool.Runtime, way: str) -> None:
        self._runtime, self._way = runtime, way
        # A template stays as long as a stub that was forked from it.
        self._load(f"stays_{way}")

    def _load(self, name: str) -> None:
        is_strict = self._way in ("strict", "spare")
        option = {"MOONPOOL_SANDBOX": "strict"} if is_strict else {"MOONPOOL_PREFORK": self._way}
        self._runtime.load(name, MODELS / "add_sub", options={**option, **RESTARTS})

    def _wait_for_spare(self) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while self._way == "spare" and "\nmoonpool_spares 1\n" not in self._runtime.metrics():
            if time.monotonic() > end_s:
                raise TimeoutError("there is no spare")
            time.sleep(0.02)

    def kill(self) -> list[float]:
        """Milliseconds from the death of a stub to the next answer of its model."""
        name = f"one_{self._way}"
        self._load(name)
        try:
            ask = partial(self._runtime.infer, name, _ROW, timeout_s=DEADLINE_S)
            self._wait_for_spare()
            return first_answer_ms(self._runtime, name, ask)
        finally:
            self._runtime.unload(name)

    def load(self, count: int = 1) -> list[float]:
        """Milliseconds of so many loads, one after the other."""
        names = [f"load_{self._way}_{number}" for number in range(count)]
        self._wait_for_spare()
        before = time.perf_counter()
        for name in names:
            self._load(name)
        took_ms = (time.perf_counter() - before) * 1000
        for name in names:
            self._runtime.unload(name)
        return [took_ms]


def _start_ms(program: str) -> list[float]:
    """Milliseconds of `python -c PROGRAM`, from before its start until its end."""
    before = time.perf_counter()
    # Not from this folder: `-c` puts it in front of the path, and every import looks there.
    subprocess.run([sys.executable, "-c", program], cwd="/", check=True)
    return [(time.perf_counter() - before) * 1000]


def _first_ms(way: str) -> list[float]:
    """Milliseconds of the first load of a program."""
    command = [sys.executable, "-c", _FIRST, str(MODELS / "add_sub"), way]
    said = subprocess.run(command, cwd="/", check=True, capture_output=True, text=True)
    return [float(said.stdout)]


def measure(report: Report, quick: bool) -> None:
    """Interpreters, first loads, later loads and deaths in turns; then many loads."""
    logging.getLogger("moonpool").setLevel(logging.CRITICAL)  # stubs die on purpose
    rounds, many = (1, 3) if quick else (25, 100)
    programs = {
        "python -c pass": "pass",
        'python -c "import numpy"': "import numpy",
        'python -c "import moonpool"': "import moonpool",
        'python -c "import moonpool; moonpool.Runtime"': "import moonpool; moonpool.Runtime",
    }
    series = in_turns({name: partial(_start_ms, text) for name, text in programs.items()}, rounds)
    for name, found in series.items():
        report.figure(name, "ms", found.values)
    with_numpy = series['python -c "import numpy"']
    for name in list(programs)[2:]:
        ratios = series[name].over(with_numpy)
        report.ratio(f"{name} over numpy's", ratios, goal="≤ 1.3", headline=True)
    first = in_turns({way: partial(_first_ms, way) for way in _WAYS}, rounds)
    for way, found in first.items():
        report.figure("the first load of a program", "ms", found.values, column=_WAYS[way])
    with moonpool.Runtime(spares=0) as runtime, moonpool.Runtime(spares=1) as spared:
        loads = {way: Loads(spared if way == "spare" else runtime, way) for way in _COLUMNS}
        for name, goals, method in (
            ("a later load", {"blank": "≤ 15 ms", "spare": "≤ 20 ms"}, Loads.load),
            ("kill -9 to the next answer", {"blank": "≤ 40 ms", "spare": "≤ 25 ms"}, Loads.kill),
        ):
            cases = {way: partial(method, each) for way, each in loads.items()}
            for way, found in in_turns(cases, 4 * rounds).items():
                column = _COLUMNS[way]
                report.figure(name, "ms", found.values, column=column, goal=goals.get(way, ""), headline=True)
                for percent in _PERCENTILES:
                    value = sorted(found.values)[round(percent / 100 * (len(found.values) - 1))]
                    report.figure(f"{name}, {percent} of 100 within", "ms", [value], column=column)
        found_many = in_turns({way: partial(loads[way].load, many) for way in _WAYS}, 1 if quick else 3)
        for way, found in found_many.items():
            report.figure(f"{many} loads, one after the other", "ms", found.values, column=_WAYS[way])
        ratios = found_many["no"].over(found_many["blank"])
        report.ratio(f"{many} loads: started anew over forked", ratios, headline=True)
    report.note(
        "The model adds two arrays, at `standard` unless it says strict. Its one process completes the configuration "
        "and serves. A spare is ready before the clock begins."
    )


if __name__ == "__main__":
    main("startup", "How soon is a model ready?", measure)
