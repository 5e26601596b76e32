"""More models than memory: 200 small models in room for 20, asked by 16 callers; more instances under load; and a real
Triton's load and unload.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import moonpool
from moonpool.benchmarks.suites.hosted import MODELS, pids
from moonpool.benchmarks.suites.peer.peer import Unavailable
from moonpool.benchmarks.suites.peer.served import MoonpoolServed, Served, TritonServed
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import in_turns
from moonpool.runtime.process.usage import proportional_bytes

# How long the callers ask.
SECONDS = "MOONPOOL_BENCH_RESIDENCY_S"
_SECONDS = 20.0
_CALLERS = 16
_TIMEOUT_S = 60.0
_SKEW = 1.0
# Without pauses, callers that wait for a start leave no processor for it: its time is then their number times a start.
_PAUSE_S = 0.2
_ROW = {name: np.ones((1, 4), np.float32) for name in ("INPUT0", "INPUT1")}
_BODY = json.dumps(
    {"inputs": [{"name": name, "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]} for name in _ROW]}
).encode()


class Crowd:
    """Callers that ask models by Zipf's law, each request after the answer to the last one and a pause."""

    def __init__(self, runtime: moonpool.Runtime, names: Sequence[str], pause_s: float) -> None:
        """Pause for so long on average, by an exponential distribution."""
        self._runtime, self._names, self._pause_s = runtime, names, pause_s
        self._weights = list(itertools.accumulate(1 / (rank + 1) ** _SKEW for rank in range(len(names))))
        # How often one had to be started.
        self.starts = 0
        self.cold_ms: list[float] = []
        self.warm_ms: list[float] = []
        self.lost: list[BaseException] = []
        self.most_present = 0
        self.most_bytes = 0

    def _ask(self, seed: int, end_s: float) -> None:
        chance = random.Random(seed)
        while time.monotonic() < end_s:
            if self._pause_s:
                time.sleep(chance.expovariate(1 / self._pause_s))
            (name,) = chance.choices(self._names, cum_weights=self._weights)
            residence = self._runtime._models.find(name).residence
            is_warm = residence is not None and residence.state == "AWAKE"
            before = time.perf_counter()
            try:
                self._runtime.infer(name, _ROW, timeout_s=_TIMEOUT_S)
            except moonpool.MoonpoolError as error:
                self.lost.append(error)
            took_ms = (time.perf_counter() - before) * 1e3
            (self.warm_ms if is_warm else self.cold_ms).append(took_ms)

    def run(self, seconds: float) -> None:
        """Ask for so long. Count the models in memory meanwhile, and measure it once a second."""
        end_s = time.monotonic() + seconds
        callers = [threading.Thread(target=self._ask, args=(seed, end_s)) for seed in range(_CALLERS)]
        for each in callers:
            each.start()
        entries = self._runtime._models.residency.entries()
        looks = 0
        while any(each.is_alive() for each in callers):
            present = sum(entry.is_present for entry in entries)
            self.most_present = max(self.most_present, present)
            if looks % 100 == 0:
                self.most_bytes = max(self.most_bytes, memory_bytes(self._runtime))
            looks += 1
            time.sleep(0.01)
        for each in callers:
            each.join()
        self.starts = sum(entry.wakes for entry in entries)


def memory_bytes(runtime: moonpool.Runtime) -> int:
    """Measure the memory of all models that are there."""
    sleepers = [entry.sleeper for entry in runtime._models.residency.entries()]
    return sum(proportional_bytes(pid) for each in sleepers for pid in each.pids())


def _percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def measure_crowd(report: Report, quick: bool) -> None:
    """Ask many models, of which few may be in memory: with pauses, and without, when starts keep all processors
    busy.
    """
    count, room = (12, 4) if quick else (200, 20)
    seconds = 0.5 if quick else float(os.environ.get(SECONDS) or _SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        names = [f"m{number}" for number in range(count)]
        for name in names:
            Path(folder, name).symlink_to(MODELS / "add_sub")
        budget = budget_of(folder, names[:room])
        for pause_s in (_PAUSE_S, 0.0):
            with moonpool.Runtime(folder, resident=moonpool.Resident(memory=budget)) as runtime:
                crowd = Crowd(runtime, names, pause_s)
                crowd.run(seconds)
            pauses = f"pauses of {pause_s:g} s" if pause_s else "no pauses"
            what = f"{count} models, memory for {room}, Zipf {_SKEW:g}, {_CALLERS} callers, {pauses}, {seconds:g} s"
            report_crowd(report, crowd, what, room, budget)


def budget_of(folder: str, names: Sequence[str]) -> int:
    """Measure the memory that these models take together."""
    with moonpool.Runtime(folder, resident=moonpool.Resident()) as runtime:
        for name in names:
            runtime.infer(name, _ROW, timeout_s=_TIMEOUT_S)
        return memory_bytes(runtime)


def report_crowd(report: Report, crowd: Crowd, what: str, room: int, budget: int) -> None:
    """Report what the callers have met, and what memory the models have taken meanwhile."""

    def tell(name: str, unit: str, value: float, goal: str = "") -> None:
        report.figure(name, unit, [value], column=what, goal=goal, headline=True)

    asked = len(crowd.warm_ms) + len(crowd.cold_ms)
    tell("requests", "", asked)
    tell("requests that failed", "", len(crowd.lost), "0")
    tell("most models with processes", "", crowd.most_present)
    tell("most memory above the limit, in models", "", (crowd.most_bytes - budget) / (budget / room), "≤ 1")
    if crowd.warm_ms and crowd.cold_ms:
        for name, values in (("warm", crowd.warm_ms), ("cold", crowd.cold_ms)):
            tell(f"{name}, p50", "ms", statistics.median(values))
            is_goal = name == "cold" and "no pauses" not in what
            tell(f"{name}, p99", "ms", _percentile(values, 0.99), "≤ 60 ms" if is_goal else "")
    tell("hit rate", "", 1 - crowd.starts / asked)


def measure_scaling(report: Report, quick: bool) -> None:
    """Press a model of one instance that may have four."""
    took_s, shorter = [], []
    for _ in range(1 if quick else 5):
        with moonpool.Runtime() as runtime:
            runtime.load("naps", MODELS / "naps.py", options={"MOONPOOL_INSTANCES": "1..4"})
            durations: list[tuple[float, float]] = []
            has_ended = threading.Event()

            def ask(
                runtime: moonpool.Runtime = runtime,
                found: list[tuple[float, float]] = durations,
                over: threading.Event = has_ended,
            ) -> None:
                while not over.is_set():
                    before = time.perf_counter()
                    runtime.infer("naps", {"X": np.ones((1, 1), np.float32)}, timeout_s=_TIMEOUT_S)
                    found.append((before, time.perf_counter() - before))

            callers = [threading.Thread(target=ask) for _ in range(4)]
            before = time.perf_counter()
            for each in callers:
                each.start()
            deadline = time.monotonic() + (2.0 if quick else 10.0)
            while len(pids(runtime, "naps")) < 4 and time.monotonic() < deadline:
                time.sleep(0.005)
            there = time.perf_counter()
            took_s.append(there - before)
            time.sleep(0.5)
            has_ended.set()
            for each in callers:
                each.join()
        early = [took for begun, took in durations if begun < before + 0.2]
        late = [took for begun, took in durations if begun > there + 0.1]
        if early and late:
            shorter.append(statistics.median(early) / statistics.median(late))
    report.figure("from 1 to 4 instances, after the load has begun", "s", took_s, goal="≤ 1 s", headline=True)
    if shorter:
        report.ratio("p50 of 4 callers with 1 instance, over that with 4", shorter, headline=True)


def _post(port: int, path: str, body: bytes = b"{}") -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, method="POST")
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        answer.read()


class Switch:
    """Asks one of two models after the other, of which one is in memory. The server has to start the other one each
    time.
    """

    def __init__(self, server: Served, *, is_explicit: bool) -> None:
        self._port, self._is_explicit = server.http_port, is_explicit
        self._turns = itertools.cycle(("a", "b"))

    def __call__(self) -> list[float]:
        """Return the milliseconds until the answer."""
        name = next(self._turns)
        before = time.perf_counter()
        if self._is_explicit:
            # As the client has to do it where the server does not: first the room, then the model.
            with contextlib.suppress(OSError):
                _post(self._port, f"/v2/repository/models/{'b' if name == 'a' else 'a'}/unload")
            _post(self._port, f"/v2/repository/models/{name}/load")
        _post(self._port, f"/v2/models/{name}/infer", _BODY)
        return [(time.perf_counter() - before) * 1e3]


def measure_switches(report: Report, quick: bool) -> None:
    """Switch between models on demand, and with explicit loads of a real Triton, in turns."""
    models = ("a=add_sub", "b=add_sub")
    demand = ("--model-control-mode=demand", "--resident-models=1")
    with contextlib.ExitStack() as stack:
        ours = MoonpoolServed(models, demand)
        stack.callback(ours.close)
        cases = {"moonpool, on demand": Switch(ours, is_explicit=False)}
        try:
            theirs = TritonServed(models, ("--model-control-mode=explicit",))
        except Unavailable as error:
            report.skipped("Triton, explicit unload and load", str(error))
        else:
            stack.callback(theirs.close)
            cases["Triton, explicit unload and load"] = Switch(theirs, is_explicit=True)
        series = in_turns(cases, 1 if quick else 20)
    for name, found in series.items():
        report.figure(f"the answer of a model that is not in memory, {name}", "ms", found.values, headline=True)
    if len(series) == 2:
        mine, others = series.values()
        report.ratio("Triton over moonpool", others.over(mine), headline=True)


def measure(report: Report, quick: bool) -> None:
    """All three parts."""
    logging.getLogger("moonpool").setLevel(logging.CRITICAL)
    measure_crowd(report, quick)
    measure_scaling(report, quick)
    measure_switches(report, quick)
    report.note(
        "A request is warm if its model had instances when it was sent. The models take no memory to speak of: starts "
        "and ends are all that it costs."
    )
    report.note(f"{SECONDS} in the environment is the time for which the callers ask.")


if __name__ == "__main__":
    main("residency", "What do models cost that are loaded when they are asked for?", measure)
