"""MLPerf's LoadGen as the generator: its scenarios, with a model in this process or behind a server as the system under
test.

Theory of operation. LoadGen calls `issue` on a thread of its own, and waits there for nothing: it must only put the
samples into a queue. `threads` threads take them from there, send one request for each and wait for its answer, and
tell LoadGen that the sample is complete. So as many requests as there are threads are in flight at most. LoadGen knows
no failures, so a sample whose request failed is completed, too, and counted here; a run with failures is not valid.
`StartTest` blocks until all samples are complete. The queue ends with a None for each thread.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from moonpool import MoonpoolError
from moonpool.runtime.process.extras import how_to_install
from moonpool.runtime.process.threads import start_thread

SCENARIOS = ("SingleStream", "MultiStream", "Server", "Offline")
SUMMARY = "mlperf_log_summary.txt"
# Samples of a query of MultiStream, as in the rules of MLPerf.
_MULTI_STREAM_SAMPLES = 8
# LoadGen makes its queries beforehand, and a run that has used them up before its duration is over is invalid. The
# guess is from a short window, which a busy machine may slow down, so the streams get queries for a model that is so
# many times as fast.
_MARGIN = 8


class NoLoadGen(MoonpoolError):
    """LoadGen is not installed."""

    code = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class LoadGenPlan:
    """A scenario, with the bound of Server: its rate, and the latency that a share of its queries must keep."""

    scenario: str
    threads: int
    seconds: float
    rate_per_s: float | None = None
    latency_us: float | None = None
    percentile: float = 99.0


@dataclass(frozen=True, slots=True)
class LoadGenResult:
    """LoadGen's summary, and the requests that failed, by their texts."""

    summary: str
    version: str
    errors: Counter[str]

    @property
    def is_valid(self) -> bool:
        """True if LoadGen calls the result valid and no request failed."""
        return not self.errors and "Result is : VALID" in self.summary

    @property
    def complaint(self) -> str | None:
        """The conditions of LoadGen that the run has not met, and what may help; None if it has met all."""
        unmet = [
            name.strip().removesuffix(" satisfied") for name, _, text in _lines(self.summary) if text.strip() == "NO"
        ]
        if not unmet:
            return None
        words = f"LoadGen calls the result invalid. Not satisfied: {', '.join(unmet)}"
        # More requests do not make a model faster.
        is_slow = "Performance constraints" in unmet
        return words if is_slow else f"{words}. A longer run (--seconds) may be valid"


def load_generator() -> Any:
    """Import LoadGen. Raises `NoLoadGen`."""
    try:
        return importlib.import_module("mlperf_loadgen")
    except ImportError as error:
        raise NoLoadGen(f"LoadGen is missing ({how_to_install('loadgen')}): {error}") from error


def run_loadgen(
    plan: LoadGenPlan, ask: Callable[[int], object], count: int, guess_per_s: float, folder: Path
) -> LoadGenResult:
    """Run a scenario, and leave LoadGen's logs in the folder. Blocks.

    `ask` sends one of `count` different requests and waits for its answer; it is called from several threads.
    `guess_per_s` is about the rate that `plan.threads` callers reach. Raises `NoLoadGen`, `OutOfThreads` and what `ask`
    raises beside `MoonpoolError`.
    """
    generator = load_generator()
    system = _System(generator, ask, plan.threads)
    logs = generator.LogSettings()
    logs.enable_trace = False
    logs.log_output.outdir = str(folder)
    logs.log_output.copy_summary_to_stdout = False
    sut = generator.ConstructSUT(system.issue, lambda: None)
    library = generator.ConstructQSL(count, count, _ignore, _ignore)
    try:
        with system:
            generator.StartTestWithLogSettings(sut, library, _settings(generator, plan, guess_per_s), logs)
    finally:
        generator.DestroyQSL(library)
        generator.DestroySUT(sut)
    if system.failure is not None:
        raise system.failure
    summary = (folder / SUMMARY).read_text(encoding="utf-8", errors="replace")
    return LoadGenResult(summary, importlib.metadata.version("mlcommons-loadgen"), system.errors)


def _ignore(samples: Sequence[int]) -> None:
    """Do nothing, since the requests are in memory anyway."""


def _settings(generator: Any, plan: LoadGenPlan, guess_per_s: float) -> Any:
    settings = generator.TestSettings()
    settings.scenario = getattr(generator.TestScenario, plan.scenario)
    settings.mode = generator.TestMode.PerformanceOnly
    settings.min_duration_ms = max(1, round(plan.seconds * 1000))
    # The duration decides alone.
    settings.min_query_count = 1
    samples = _MULTI_STREAM_SAMPLES if plan.scenario == "MultiStream" else 1
    expected_ns = max(1, round(1e9 * samples / (_MARGIN * guess_per_s)))
    if plan.scenario == "SingleStream":
        settings.single_stream_expected_latency_ns = expected_ns
    elif plan.scenario == "MultiStream":
        settings.multi_stream_samples_per_query = samples
        settings.multi_stream_expected_latency_ns = expected_ns
    elif plan.scenario == "Offline":
        # All requests are sent at once, so that a guess that is too low would end the run too early.
        settings.offline_expected_qps = 2 * guess_per_s
    else:
        settings.server_target_qps = plan.rate_per_s or guess_per_s
        settings.server_target_latency_percentile = plan.percentile / 100
        if plan.latency_us is not None:
            settings.server_target_latency_ns = round(plan.latency_us * 1000)
    return settings


class _System:
    """The system under test: threads that send requests. A context manager; its end waits for them."""

    def __init__(self, generator: Any, ask: Callable[[int], object], threads: int) -> None:
        self.errors: Counter[str] = Counter()
        self._counting = threading.Lock()
        # An error that is no answer of a model.
        self.failure: BaseException | None = None
        self._generator = generator
        self._ask = ask
        self._samples: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"moonpool-bench-loadgen-{number}") for number in range(threads)
        ]
        self._started: list[threading.Thread] = []

    def __enter__(self) -> _System:
        try:
            for thread in self._threads:
                start_thread(thread)
                self._started.append(thread)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for _thread in self._started:
            self._samples.put(None)
        for thread in self._started:
            thread.join()

    def issue(self, samples: Sequence[Any]) -> None:
        """Take the samples of a query. LoadGen calls it from its thread."""
        for sample in samples:
            self._samples.put((sample.id, sample.index))

    def _work(self) -> None:
        while (sample := self._samples.get()) is not None:
            number, index = sample
            try:
                if self.failure is None:
                    self._ask(index)
            except MoonpoolError as error:
                with self._counting:
                    self.errors[str(error)] += 1
            except BaseException as error:
                # The others still complete, or LoadGen would wait for them for ever.
                self.failure = error
            response = self._generator.QuerySampleResponse(number, 0, 0)
            self._generator.QuerySamplesComplete([response])


def _lines(summary: str) -> list[tuple[str, str, str]]:
    return [line.partition(":") for line in summary.splitlines()]


def facts_of(result: LoadGenResult) -> Mapping[str, object]:
    """Return the figures of a result for a file."""
    return {
        "loadgen": result.version,
        "valid": result.is_valid,
        "failed": result.errors.total(),
        "summary": {name.strip(): text.strip() for name, colon, text in _lines(result.summary) if colon},
    }
