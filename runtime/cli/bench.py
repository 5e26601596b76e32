"""`moonpool bench`: latency and throughput of one model, in process or behind a server, by load."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.runtime.bench import result as results
from moonpool.runtime.bench.subject import InProcess
from moonpool.runtime.bench.sweep import Point, sweep
from moonpool.runtime.cli import bench_options
from moonpool.runtime.cli.bench_options import Options
from moonpool.runtime.cli.bench_table import show, warnings
from moonpool.runtime.cli.inputs import as_arrays, made_up
from moonpool.runtime.cli.plot import can_plot, save_plot
from moonpool.runtime.cli.session import UsageError, session
from moonpool.runtime.terminal import Terminal

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

    from moonpool.runtime.bench.endpoint import Endpoint
    from moonpool.runtime.bench.interface import Interface
    from moonpool.runtime.bench.load import Load
    from moonpool.runtime.bench.server import Server
    from moonpool.runtime.bench.subject import Subject
    from moonpool.runtime.cli.inputs import TakesInputs

NAME = "bench"
HELP = "measure latency and throughput of a model by load"
DESCRIPTION = """\
Press a model harder and harder, and say how quick it is. With REPO the model is loaded in this process and
called from threads (Runtime.infer), or from tasks of an event loop (Runtime.ainfer) with --async. With --url
it is asked over HTTP or gRPC at any server that speaks the KServe v2 protocol.

Each load has windows of --seconds until rate and mean latency of the last three agree within --stable
percent; these three are shown. docs/BENCH.md explains the figures and the files.
"""
EXAMPLES = """\
examples:
  moonpool bench models add_sub
  moonpool bench models add_sub --concurrency 1,8,64 --seconds 5 --async
  moonpool bench models normalise --batch 16 --shape X=1024 --save results
  moonpool bench add_sub --url grpc://localhost:8001 --concurrency 16 --against http://localhost:8000
  moonpool bench add_sub --url http://localhost:8000 --request-rate 100,1000 --against results/add_sub.json
  moonpool bench image --url http://localhost:8000 --shared-memory system --shape PIXELS=1080,1920,3
  moonpool bench words --url grpc://localhost:8001 --streaming
"""

add_arguments = bench_options.add_arguments


def run(arguments: argparse.Namespace) -> int:
    options = bench_options.checked(arguments)
    earlier = results.read(options.against_file) if options.against_file else None
    with contextlib.ExitStack() as stack:
        subjects, inputs = _subjects(stack, options)
        points: list[list[Point]] = [[] for _ in subjects]
        for measured in sweep(
            subjects,
            options.loads,
            seconds=options.seconds,
            warm_up_s=options.warm_up_s,
            most_windows=options.most_windows,
            stable_percent=options.stable_percent,
            tell=_Progress(options.most_windows),
        ):
            for mine, point in zip(points, measured, strict=True):
                mine.append(point)
    _end_progress()
    found = results.result(_about(options, subjects[0], inputs), points[0])
    if len(subjects) > 1:
        found["against"] = results.result(_about(options, subjects[1], inputs), points[1])
    elif earlier is not None:
        found["against"] = {key: earlier[key] for key in earlier if key != "against"}
    results.compare(found, in_turns=len(subjects) > 1)
    show(Terminal(sys.stdout), found)
    for warning in warnings(found):
        print(f"moonpool: {warning}", file=sys.stderr)
    if options.save is not None:
        _save(options.save, options.model, found)
    return _told_of_failures([point for each in points for point in each])


def _subjects(
    stack: contextlib.ExitStack, options: Options
) -> tuple[list[Subject], dict[str, list[str | int]]]:
    """What is measured, ready for its first window, with datatype and shape of each input."""
    servers = [
        _server(stack, options, endpoint)
        for endpoint in (options.endpoint, options.against)
        if endpoint is not None
    ]
    if options.repository is None:
        interface: TakesInputs = servers[0].interface()
        arrays = _inputs(options, interface)
        subjects: list[Subject] = []
    else:
        runtime = stack.enter_context(
            session(options.repository, options.backend_directory, verbose=options.verbose)
        )
        runtime.load(options.model, instances=options.instances)
        interface = runtime.config(options.model)
        arrays = _inputs(options, interface)
        subject = InProcess(
            runtime,
            options.model,
            arrays,
            is_async=options.is_async,
            timeout_s=options.timeout_s,
        )
        # What is wrong with the inputs is said once, and at once.
        subject.call()
        subjects = [subject]
    datatypes = {tensor.name: tensor.datatype for tensor in interface.inputs}
    for server in servers:
        _prepare(server, options, arrays, datatypes)
    shown = {name: [datatypes[name], *array.shape] for name, array in arrays.items()}
    return [*subjects, *servers], shown


def _server(stack: contextlib.ExitStack, options: Options, endpoint: Endpoint) -> Server:
    # What it imports would take every command a fifth of its start.
    from moonpool.runtime.bench.server import Server

    server = Server(
        endpoint,
        options.model,
        options.version,
        headers=options.headers,
        timeout_s=options.timeout_s,
    )
    stack.callback(server.close)
    return server


def _inputs(options: Options, interface: TakesInputs) -> dict[str, NDArray[np.generic]]:
    if options.values:
        return as_arrays(options.values, interface)
    return made_up(interface, options.batch, options.shapes)


def _prepare(
    server: Server,
    options: Options,
    arrays: Mapping[str, NDArray[np.generic]],
    datatypes: Mapping[str, str],
) -> None:
    from moonpool.runtime.bench.question import Tensor

    found: Interface = server.interface()
    if found.decoupled and not options.is_stream:
        raise UsageError(
            f"model '{options.model}' at {server.where} is decoupled: measure it with --streaming, "
            "over grpc://"
        )
    server.prepare(
        [Tensor.of(name, datatypes[name], array) for name, array in arrays.items()],
        processes=options.processes,
        most_connections=options.most_connections,
        shared_memory=options.shared_memory,
        is_stream=options.is_stream,
        is_json=options.is_json and server.scheme == "http",
    )


def _about(
    options: Options, subject: Subject, inputs: Mapping[str, list[str | int]]
) -> dict[str, object]:
    return {
        "model": options.model,
        "where": subject.where,
        "shared_memory": "system" if options.shared_memory else "none",
        "streaming": options.is_stream,
        "json_tensors": options.is_json,
        "processes": options.processes,
        "instances": options.instances,
        "window_s": options.seconds,
        # Datatype and shape of each.
        "inputs": inputs,
    }


class _Progress:
    """What is being measured, in the last line of a terminal."""

    def __init__(self, most_windows: int) -> None:
        self._terminal = Terminal(sys.stderr)
        self._most_windows = most_windows

    def __call__(self, load: Load, turn: int) -> None:
        if self._terminal.is_terminal:
            words = f"{load.label} {load.unit}, window {turn + 1} of at most {self._most_windows}"
            self._terminal.replace_line(words)


def _end_progress() -> None:
    terminal = Terminal(sys.stderr)
    if terminal.is_terminal:
        terminal.replace_line("")


def _save(folder: Path, model: str, found: Mapping[str, Any]) -> None:
    for path in results.write(folder, model, found):
        print(path)
    if can_plot():
        path = folder / f"{model}.png"
        save_plot(found, path)
        print(path)
    else:
        print("no plot: matplotlib is missing (pip install 'moonpool[plot]')", file=sys.stderr)


def _told_of_failures(points: Sequence[Point]) -> int:
    failed: dict[str, int] = {}
    for point in points:
        for window in point.windows:
            for text, count in window.errors.items():
                failed[text] = failed.get(text, 0) + count
    if not failed:
        return 0
    text, _ = max(failed.items(), key=lambda item: item[1])
    print(f"moonpool: requests failed, most often with: {text.strip()}", file=sys.stderr)
    return 1
