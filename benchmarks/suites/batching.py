"""Throughput by batch size, for both kinds of model."""

from __future__ import annotations

from collections.abc import Callable

import moonpool
from moonpool.benchmarks.suites.hosted import MODELS
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import in_turns
from moonpool.benchmarks.suites.throughput import with_tasks

SIZES = (1, 2, 4, 8, 16, 32, 64)
_QUICK_SIZES = (1, 64)
IN_FLIGHT = 64
_KINDS = {"Triton's kind": MODELS / "add_sub", "moonpool's kind": MODELS / "sums.py"}


def measure(report: Report, quick: bool) -> None:
    """64 callers, and the largest batch that is allowed."""
    rounds, window_s = (1, 0.02) if quick else (5, 0.5)
    sizes = _QUICK_SIZES if quick else SIZES
    with moonpool.Runtime() as runtime:

        def case(model: str) -> Callable[[], list[float]]:
            return lambda: [with_tasks(runtime, model, IN_FLIGHT, window_s)]

        models = {(kind, size): f"{index}_{size}" for index, kind in enumerate(_KINDS) for size in sizes}
        for (kind, size), model in models.items():
            config = {"max_batch_size": size, "dynamic_batching": {}}
            runtime.load(model, _KINDS[kind], config=config)
        series = in_turns({which: case(model) for which, model in models.items()}, rounds)
        for (kind, size), found in series.items():
            name = f"batches of up to {size}"
            report.figure(name, "requests/s", found.values, column=kind, headline=True)
            statistics = runtime.statistics(models[kind, size])
            mean = statistics["inference_count"] / statistics["execution_count"]
            report.figure(f"{name}, on average", "rows", [mean], column=kind)
        for kind in _KINDS:
            ratio = series[kind, sizes[-1]].over(series[kind, sizes[0]])
            report.ratio("64 over 1", ratio, column=kind, headline=True)
    report.note(f"{IN_FLIGHT} asyncio tasks, each with one request of one row in flight.")


if __name__ == "__main__":
    main("batching", "What does a larger batch bring?", measure)
