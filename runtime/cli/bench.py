"""`moonpool bench`: latency and throughput of one model, in process, by concurrency."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.runtime.cli.inputs import as_arrays, made_up, parse_inputs
from moonpool.runtime.cli.measurement import Measurement, measure, measure_async
from moonpool.runtime.cli.plot import can_plot, save_plot
from moonpool.runtime.cli.session import UsageError, add_repository, session
from moonpool.runtime.cli.table import figure, table
from moonpool.runtime.terminal import Terminal
from moonpool.runtime.version import VERSION

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from moonpool.runtime.runtime import Runtime

NAME = "bench"
HELP = "measure latency and throughput of a model by concurrency"
DESCRIPTION = """\
Load one model of a repository and call it from more and more concurrent callers, each of which calls
again as soon as it was answered. Measured is the whole call of Runtime.infer in this process, or of
Runtime.ainfer with --async. Callers share this process's interpreter.
"""
EXAMPLES = """\
examples:
  moonpool bench models add_sub
  moonpool bench models add_sub --concurrency 1,8,64 --seconds 5 --async
  moonpool bench models normalise --batch 16 --shape X=1024 --save results
"""

_WARM_UP_S = 0.2
_TIMEOUT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_repository(parser)
    parser.add_argument("model", metavar="MODEL", help="the model's name")
    parser.add_argument(
        "--concurrency", metavar="N,N,…", default="1,2,4,16", help="default %(default)s"
    )
    parser.add_argument(
        "--seconds", metavar="S", type=float, default=2.0, help="for each; default %(default)s"
    )
    parser.add_argument("--instances", metavar="N", type=int, help="instead of what the model says")
    parser.add_argument(
        "--async", dest="is_async", action="store_true", help="tasks of an event loop, not threads"
    )
    parser.add_argument(
        "--input",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="NAME=JSON or NAME=@FILE.npy; without any, inputs are made up from the configuration",
    )
    parser.add_argument(
        "--shape",
        metavar="NAME=N,N",
        action="append",
        default=[],
        help="the size of a made-up input, without the batch dimension",
    )
    parser.add_argument(
        "--batch", metavar="N", type=int, default=1, help="rows of a made-up request; default 1"
    )
    parser.add_argument(
        "--save",
        metavar="DIR",
        help="write DIR/MODEL.json, and DIR/MODEL.png where matplotlib is installed "
        "(pip install 'moonpool[plot]')",
    )


def run(options: argparse.Namespace) -> int:
    concurrencies = _numbers("--concurrency", options.concurrency, least=1)
    shapes = dict(_shape(text) for text in options.shape)
    values = parse_inputs(options.input)
    if values and shapes:
        raise UsageError("--shape is for made-up inputs; leave it out with --input")
    if not options.seconds > 0 or options.batch < 1:
        raise UsageError("--seconds and --batch must be more than 0")
    if options.instances is not None and options.instances < 1:
        raise UsageError("--instances must be more than 0")
    with session(options.repository, options.backend_directory, verbose=options.verbose) as runtime:
        runtime.load(options.model, instances=options.instances)
        config = runtime.config(options.model)
        inputs = as_arrays(values, config) if values else made_up(config, options.batch, shapes)
        measured = _measure_all(runtime, options, inputs, concurrencies)
        datatypes = {tensor.name: tensor.datatype for tensor in config.inputs}
        shown = {name: [datatypes[name], *array.shape] for name, array in inputs.items()}
    _print(measured)
    if options.save is not None:
        _save(options, shown, measured)
    failed = {text: count for m, _ in measured for text, count in m.errors.items()}
    if failed:
        text, _ = max(failed.items(), key=lambda item: item[1])
        print(f"moonpool: requests failed, most often with: {text.strip()}", file=sys.stderr)
    return 1 if failed else 0


def _numbers(option: str, text: str, *, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise UsageError(
            f"{option} must be whole numbers of at least {least}, separated by commas, not {text!r}"
        )
    return numbers


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, equals, sizes = text.partition("=")
    if not (name and equals):
        raise UsageError(f"--shape must be NAME=N,N, not {text!r}")
    return name, tuple(_numbers(f"--shape {name}", sizes, least=0))


_Measured = tuple[Measurement, float]
_Inputs = dict[str, list[str | int]]


def _measure_all(
    runtime: Runtime,
    options: argparse.Namespace,
    inputs: dict[str, NDArray[Any]],
    concurrencies: Sequence[int],
) -> list[_Measured]:
    """A measurement for each concurrency, with the rows that went into an execution on average."""
    model = options.model

    def call() -> object:
        return runtime.infer(model, inputs, timeout_s=_TIMEOUT_S)

    async def call_async() -> object:
        return await runtime.ainfer(model, inputs, timeout_s=_TIMEOUT_S)

    def once(concurrency: int, seconds: float) -> Measurement:
        if options.is_async:
            import asyncio

            return asyncio.run(measure_async(call_async, concurrency, seconds))
        return measure(call, concurrency, seconds)

    # What is wrong with the inputs is said once, and at once.
    call()
    measured = []
    for concurrency in concurrencies:
        once(concurrency, min(_WARM_UP_S, options.seconds))
        before = _counts(runtime, model)
        measurement = once(concurrency, options.seconds)
        rows, executions = (
            now - then for now, then in zip(_counts(runtime, model), before, strict=True)
        )
        measured.append((measurement, rows / executions if executions else 0.0))
    return measured


def _counts(runtime: Runtime, model: str) -> tuple[int, int]:
    statistics = runtime.statistics(model)
    return statistics["inference_count"], statistics["execution_count"]


_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


def _print(measured: Sequence[_Measured]) -> None:
    terminal = Terminal(sys.stdout)
    rows = [
        ["callers", "requests/s", "p50 µs", "p90 µs", "p99 µs", "max µs", "rows/batch", "failed"]
    ]
    for measurement, batch_rows in measured:
        rows.append(
            [
                str(measurement.concurrency),
                f"{measurement.requests_per_s:,.0f}",
                *(f"{measurement.latency_us(p):,.0f}" for p in _PERCENTILES.values()),
                figure(batch_rows),
                str(measurement.errors.total()),
            ]
        )
    head, *lines = table(rows, align=">" * len(rows[0]))
    terminal.line(terminal.paint(head, "bold"))
    for line in lines:
        terminal.line(line)


def _save(options: argparse.Namespace, inputs: _Inputs, measured: Sequence[_Measured]) -> None:
    folder = Path(options.save)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{options.model}.json"
    path.write_text(json.dumps(_report(options, inputs, measured), indent=1) + "\n")
    print(path)
    if can_plot():
        path = folder / f"{options.model}.png"
        how = "asyncio" if options.is_async else "threads"
        save_plot([m for m, _ in measured], f"{options.model}, called from {how}", path)
        print(path)
    else:
        print("no plot: matplotlib is missing (pip install 'moonpool[plot]')", file=sys.stderr)


def _report(
    options: argparse.Namespace, inputs: _Inputs, measured: Sequence[_Measured]
) -> dict[str, object]:
    return {
        "moonpool": VERSION,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "model": options.model,
        "instances": options.instances,
        "callers": "asyncio" if options.is_async else "threads",
        # Datatype and shape of each.
        "inputs": inputs,
        "series": [
            {
                "concurrency": measurement.concurrency,
                "seconds": measurement.seconds,
                "requests": len(measurement.latencies_ns),
                "failed": measurement.errors.total(),
                "requests_per_s": measurement.requests_per_s,
                "rows_per_batch": batch_rows,
                # JSON has no NaN; nothing was answered then.
                "latency_us": {
                    name: measurement.latency_us(p) if measurement.latencies_ns else None
                    for name, p in _PERCENTILES.items()
                },
            }
            for measurement, batch_rows in measured
        ],
    }
