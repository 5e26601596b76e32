"""`moonpool bench`: latency and throughput of one model, in process or behind a server, by load."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.runtime.bench import result as results
from moonpool.runtime.bench.callers import InProcess
from moonpool.runtime.bench.control_client import Interface
from moonpool.runtime.bench.request import Endpoint, QuestionTensor
from moonpool.runtime.bench.result import check_requests, differences
from moonpool.runtime.bench.server import MeasuredServer
from moonpool.runtime.bench.windows import Load, Point, Subject, Window, sweep
from moonpool.runtime.cli import bench_options
from moonpool.runtime.cli.bench_options import Options
from moonpool.runtime.cli.bench_report import can_plot, save_plot, show, show_requests, warnings
from moonpool.runtime.cli.inputs import TakesInputs, as_arrays, made_up
from moonpool.runtime.cli.shared import UsageError, session
from moonpool.runtime.process.extras import how_to_install
from moonpool.runtime.process.terminal import Terminal, harmless

NAME = "bench"
HELP = "measure the latency and throughput of a model under load"
DESCRIPTION = """\
Send a model more and more requests, and print its latency and throughput at each load. With REPO, the model is
loaded in this process and called from threads (Runtime.infer), or with --async from tasks of an event loop
(Runtime.ainfer). With --url, any server of the KServe v2 protocol gets the requests over HTTP or gRPC.

Each load is measured in windows of --seconds, until the rate and the mean latency of the last three agree
within --stable percent. The figures are those of these three. docs/BENCH.md explains them, and the files.
"""
EXAMPLES = """\
examples:
  moonpool bench models add_sub
  moonpool bench models add_sub --concurrency 1,8,64 --seconds 5 --async
  moonpool bench models normalise --batch 16 --shape X=1024 --save results
  moonpool bench add_sub --url grpc://localhost:8001 --concurrency 16 --against http://localhost:8000
  moonpool bench add_sub --url http://localhost:8000 --request-rate 100,1000 --against results/add_sub.json
  moonpool bench normalise --url http://localhost:8000 --shared-memory system --shape X=65536
  moonpool bench add_sub --url grpc://localhost:8001 --streaming
"""

add_arguments = bench_options.add_arguments


def run(arguments: argparse.Namespace) -> int:
    options = bench_options.checked(arguments)
    if options.save is not None and not options.overwrite:
        results.check_free(options.save, options.file_name)
    earlier = results.read(options.against_file) if options.against_file else None
    with contextlib.ExitStack() as stack:
        asked = _asked(stack, options)
        abouts = [_about(options, asked, subject) for subject in asked.subjects]
        if earlier is not None:
            check_requests(abouts[0], earlier, str(options.against_file))
        show_requests(
            Terminal(sys.stdout), abouts[0], asked.size_bytes, is_made_up=not options.values
        )
        for other in [*abouts[1:], *([earlier] if earlier is not None else [])]:
            _warn_of_differences(abouts[0], other)
        points = _measured(options, asked.subjects)
    found, *others = [results.result(*each) for each in zip(abouts, points, strict=True)]
    if others:
        found["against"] = others[0]
    elif earlier is not None:
        found["against"] = {key: earlier[key] for key in earlier if key != "against"}
    results.compare(found, in_turns=bool(others))
    show(Terminal(sys.stdout), found, in_turns=bool(others))
    for warning in warnings(found):
        print(f"moonpool: {warning}", file=sys.stderr)
    if options.save is not None:
        _save(options, found)
    return _told_of_failures([point for each in points for point in each])


def _warn_of_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    if found := differences(ours, theirs):
        words = f"the two differ in {'; '.join(found)}"
        print(f"moonpool: {harmless(words)}", file=sys.stderr)


def _measured(options: Options, subjects: Sequence[Subject]) -> list[list[Point]]:
    """Measure all loads; return the points of each subject."""
    points: list[list[Point]] = [[] for _ in subjects]
    progress = _Progress(options)
    try:
        for measured in sweep(
            subjects,
            options.loads,
            seconds=options.seconds,
            warm_up_s=options.warm_up_s,
            most_windows=options.most_windows,
            stable_percent=options.stable_percent,
            tell=progress.tell,
        ):
            progress.done(measured)
            for mine, point in zip(points, measured, strict=True):
                mine.append(point)
    finally:
        progress.clear()
    return points


@dataclass(frozen=True, slots=True)
class _Asked:
    """The subjects, ready for their first window, and the request that they get."""

    subjects: Sequence[Subject]
    # Datatype and shape of each input.
    inputs: Mapping[str, list[str | int]]
    requests_digest: str
    size_bytes: int


def _asked(stack: contextlib.ExitStack, options: Options) -> _Asked:
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
            session(options.repository, options.hosting, verbose=options.verbose)
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
    tensors = [QuestionTensor.of(name, datatypes[name], array) for name, array in arrays.items()]
    for server in servers:
        _prepare(server, options, tensors)
    return _Asked(
        [*subjects, *servers],
        {name: [datatypes[name], *array.shape] for name, array in arrays.items()},
        results.digest_of_requests(tensors),
        sum(len(tensor.data) for tensor in tensors),
    )


def _server(stack: contextlib.ExitStack, options: Options, endpoint: Endpoint) -> MeasuredServer:
    server = MeasuredServer(
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


def _prepare(server: MeasuredServer, options: Options, tensors: Sequence[QuestionTensor]) -> None:
    found: Interface = server.interface()
    if found.decoupled and not options.is_stream:
        raise UsageError(
            f"model '{options.model}' at {server.where} is decoupled: measure it with --streaming, "
            "over grpc://"
        )
    server.prepare(
        tensors,
        processes=options.processes,
        most_connections=options.most_connections,
        shared_memory=options.shared_memory,
        is_stream=options.is_stream,
        is_json=options.is_json and server.scheme == "http",
    )


def _about(options: Options, asked: _Asked, subject: Subject) -> dict[str, Any]:
    fields = subject.configuration_fields()
    is_ours = subject is asked.subjects[0]
    return {
        "label": options.label if is_ours else None,
        "model": options.model,
        "model_version": options.version,
        "where": subject.where,
        "shared_memory": "system" if options.shared_memory else "none",
        "streaming": options.is_stream,
        "json_tensors": options.is_json,
        "processes": options.processes,
        "instances": options.instances,
        "window_s": options.seconds,
        "inputs": asked.inputs,
        "requests_digest": asked.requests_digest,
        "configuration_digest": None if fields is None else results.digest_of_fields(fields),
        "configuration_fields": fields,
    }


class _Progress:
    """Says what is being measured: in the last line of a terminal, elsewhere with a line for each load that is done."""

    def __init__(self, options: Options) -> None:
        self._terminal = Terminal(sys.stderr)
        self._options = options
        self._begin_s = time.monotonic()

    def tell(self, load: Load, turn: int, last: Sequence[Window]) -> None:
        if not self._terminal.is_terminal:
            return
        loads = self._options.loads
        words = [f"load {loads.index(load) + 1} of {len(loads)}, {load.words}"]
        words.append(
            f"window {turn} of at most {self._options.most_windows}" if turn else "warm-up"
        )
        if last:
            words.append(" and ".join(f"{window.requests_per_s:,.0f}/s" for window in last))
        words.append(f"{time.monotonic() - self._begin_s:.0f} s")
        # A line that wraps cannot be replaced.
        self._terminal.replace_line(", ".join(words)[: self._terminal.width - 1])

    def done(self, points: Sequence[Point]) -> None:
        if self._terminal.is_terminal:
            return
        load = points[0].load
        rates = " and ".join(
            f"{point.whole.requests_per_s:,.0f} requests/s in {len(point.windows)} windows"
            for point in points
        )
        self._terminal.line(f"moonpool: {load.words}: {rates}")

    def clear(self) -> None:
        if self._terminal.is_terminal:
            self._terminal.replace_line("")


def _save(options: Options, found: Mapping[str, Any]) -> None:
    if options.save is None:
        return
    name = options.file_name
    for path in results.write(options.save, name, found, overwrite=options.overwrite):
        print(path)
    if can_plot():
        path = options.save / f"{name}.png"
        save_plot(found, path)
        print(path)
    else:
        print(f"no plot: matplotlib is missing ({how_to_install('plot')})", file=sys.stderr)


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
