"""`moonpool bench`: latency and throughput of one model, in process or behind a server, by load."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool import __version__
from moonpool.benchmarks import result as results
from moonpool.benchmarks.callers import InProcess
from moonpool.benchmarks.commands import compare
from moonpool.benchmarks.commands import options as command_line
from moonpool.benchmarks.commands.options import Options
from moonpool.benchmarks.commands.page import page_of
from moonpool.benchmarks.commands.report import can_plot, has_matplotlib, save_plot, show, show_requests, warnings
from moonpool.benchmarks.data import DataMix, openai_mix, read_capture
from moonpool.benchmarks.export import WRITERS
from moonpool.benchmarks.faults import FaultInjector
from moonpool.benchmarks.hosts.hosts import OpenHost, Task, copy_of_model, open_host
from moonpool.benchmarks.hosts.process import Unavailable
from moonpool.benchmarks.loadgen import LoadGenPlan, facts_of, load_generator, run_loadgen
from moonpool.benchmarks.loads import Concurrency, Load, Schedule
from moonpool.benchmarks.result import check_requests, differences
from moonpool.benchmarks.server import MeasuredServer
from moonpool.benchmarks.slo import RateSearch
from moonpool.benchmarks.timeline import write_timeline
from moonpool.benchmarks.windows import Point, Subject, Window, of_runs, sweep
from moonpool.runtime.cli.inputs import TakesInputs
from moonpool.runtime.cli.shared import UsageError, session
from moonpool.runtime.client.control_client import Interface
from moonpool.runtime.client.request import Endpoint
from moonpool.runtime.hosting.backends import BackendDirectory
from moonpool.runtime.observe.log_settings import LogSettings
from moonpool.runtime.process.extras import how_to_install
from moonpool.runtime.process.terminal import Terminal, harmless
from moonpool.runtime.stubs.start_message import start_of

HELP = "measure the latency and throughput of a model under load"
DESCRIPTION = """\
Send a model more and more requests, and print its latency and throughput at each load. With REPO, the model is
loaded in this process and called from threads (Runtime.infer), or with --async from tasks of an event loop
(Runtime.ainfer). With --url, any server of the KServe v2 protocol gets the requests over HTTP or gRPC, or with --openai
any server of OpenAI's API.

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
  moonpool bench writer --url http://localhost:8000 --openai chat --input max_tokens=100
  moonpool bench add_sub --url http://localhost:8000 --slo p99=20ms
  moonpool bench add_sub --url http://localhost:8000 --runs 5 --save results --export html,jsonl
  moonpool bench compare old/add_sub.json new/add_sub.json --fail-if 'requests_per_s<0.9x'
"""

add_arguments = command_line.add_arguments


def run(arguments: argparse.Namespace) -> int:
    if compare.is_meant(arguments):
        return compare.run(arguments)
    options = command_line.checked(arguments)
    if options.loadgen is not None:
        return _loadgen(options, options.loadgen)
    if options.save is not None:
        results.check_free(options.save, options.file_name, _endings(options), overwrite=options.overwrite)
    earlier = results.read(options.against_file) if options.against_file else None
    with contextlib.ExitStack() as stack:
        asked = _asked(stack, options)
        abouts = [_about(options, asked, subject) for subject in asked.subjects]
        if earlier is not None:
            check_requests(abouts[0], earlier, str(options.against_file))
        show_requests(
            Terminal(sys.stdout),
            abouts[0],
            asked.size_bytes,
            is_made_up=options.requests.is_made_up and options.replay is None,
        )
        differing = [] if options.isolation or options.hosts else abouts[1:]
        for other in [*differing, *([earlier] if earlier is not None else [])]:
            _warn_of_differences(abouts[0], other)
        if options.resources:
            for subject in asked.subjects:
                subject.measure_resources(options.metrics_url)
        faults = None
        if options.fault is not None:
            subject = asked.subjects[0]
            faults = FaultInjector(options.fault, subject.instance_pids, subject.answered)
        with faults or contextlib.nullcontext():
            points = _measured_in_runs(options, asked)
        if faults is not None:
            faults.check()
            abouts[0]["faults"] = faults.as_dict()
    found, *others = [results.result(about, each, options.slo) for about, each in zip(abouts, points, strict=True)]
    if options.isolation:
        found["isolation"] = [results.over(other, found) for other in others]
    elif options.hosts:
        measured = [found, *others]
        found["hosts"] = [
            results.over(other, measured[first]) for other, first in zip(others, asked.compared_with[1:], strict=True)
        ]
    elif others:
        found["against"], found["in_turns"] = others[0], True
    elif earlier is not None:
        found["against"] = {key: earlier[key] for key in earlier if key != "against"}
    results.compare(found, in_turns=bool(others))
    show(Terminal(sys.stdout), found, in_turns=bool(others))
    for warning in warnings(found):
        print(f"moonpool: {warning}", file=sys.stderr)
    if options.save is not None:
        _save(options, found, points[0])
    code = _told_of_failures([point for each in points for point in each])
    # With faults, some requests fail.
    return 0 if options.fault is not None else code


def _loadgen(options: Options, plan: LoadGenPlan) -> int:
    """Run a scenario of LoadGen, and show its summary; return 1 if its result is not valid."""
    load_generator()
    name = f"{options.file_name}-{plan.scenario}"
    target = None if options.save is None else options.save / name
    if target is not None and target.exists() and not options.overwrite:
        raise results.BadResult(f"{target} exists already: give another --label, or --overwrite")
    with contextlib.ExitStack() as stack:
        asked = _asked(stack, options)
        subject = asked.subjects[0]
        if not isinstance(subject, InProcess | MeasuredServer):
            raise UsageError("--loadgen needs REPO or --url")
        about = _about(options, asked, subject)
        is_made_up = options.requests.is_made_up
        show_requests(Terminal(sys.stdout), about, asked.size_bytes, is_made_up=is_made_up)
        load, length_s = Concurrency(plan.threads), options.warm_up_s or options.seconds
        # The first window also starts the generator's processes, so its rate may be far too low.
        subject.window(load, length_s)
        guess = subject.window(load, length_s)
        if not guess.requests_per_s:
            return _told_of_failures([Point(load, [guess], stable=False)])
        folder = target or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        found = run_loadgen(plan, subject.ask, asked.count, guess.requests_per_s, folder)
    for line in found.summary.splitlines():
        print(harmless(line))
    if target is not None:
        facts = {**about, "scenario": plan.scenario, "threads": plan.threads, **facts_of(found)}
        (target / "moonpool.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        for path in sorted(target.iterdir()):
            print(path)
    for text, count in found.errors.most_common(1):
        print(harmless(f"moonpool: {found.errors.total()} requests failed, {count} with: {text}"), file=sys.stderr)
    if found.complaint is not None:
        print(harmless(f"moonpool: {found.complaint}"), file=sys.stderr)
    return 0 if found.is_valid else 1


def _warn_of_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    if found := differences(ours, theirs):
        words = f"the two differ in {'; '.join(found)}"
        print(f"moonpool: {harmless(words)}", file=sys.stderr)


def _measured_in_runs(options: Options, asked: _Asked) -> list[list[Point]]:
    """Measure all loads in each run; return the points of each subject."""
    subject, timeline = asked.subjects[0], options.timeline
    traced = subject if isinstance(subject, InProcess | MeasuredServer) else None
    if timeline is not None and traced is not None:
        traced.begin_traces()
    runs = [_measured(options, asked) for _ in range(options.runs)]
    if timeline is not None and traced is not None:
        measured = [point for run in runs for point in run[0]]
        write_timeline(timeline, measured, traced.traces(), options.model)
    if len(runs) == 1:
        return runs[0]
    # From runs of subjects of loads to subjects of loads of runs.
    return [[of_runs(points) for points in zip(*of_subject, strict=True)] for of_subject in zip(*runs, strict=True)]


def _measured(options: Options, asked: _Asked) -> list[list[Point]]:
    """Measure all loads; return the points of each subject."""
    subjects = asked.subjects
    points: list[list[Point]] = [[] for _ in subjects]
    loads: Sequence[Load] | RateSearch = asked.loads
    if options.slo is not None and not loads:
        # One caller's rate is a guess that no model is far from.
        guess = subjects[0].window(Concurrency(1), options.warm_up_s or options.seconds)
        loads = RateSearch(options.slo, guess.requests_per_s, options.distribution, options.seconds)
    progress = _Progress(options)
    try:
        for measured in sweep(
            subjects,
            loads,
            seconds=options.seconds,
            warm_up_s=options.warm_up_s,
            most_windows=options.most_windows,
            stable_percent=options.stable_percent,
            tell=progress.tell,
        ):
            progress.done(measured)
            for mine, point in zip(points, measured, strict=True):
                mine.append(point)
            if isinstance(loads, RateSearch):
                loads.saw(measured[0])
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
    # Bytes of the first request, and the number of different ones.
    size_bytes: int
    count: int
    loads: Sequence[Load]
    # With --hosts, how each subject was started, and the number of the one that it is compared with.
    hosts: Sequence[OpenHost] = ()
    compared_with: Sequence[int] = ()


def _asked(stack: contextlib.ExitStack, options: Options) -> _Asked:
    hosts: list[OpenHost] = []
    servers = [
        _server(stack, options, endpoint) for endpoint in (options.endpoint, options.against) if endpoint is not None
    ]
    if options.repository is None:
        if options.openai is None:
            mix, schedule = _data(options, servers[0].interface())
        else:
            mix = openai_mix(options.openai, options.model, options.requests.input_data, options.requests.values)
            schedule = None
        subjects: list[Subject] = []
    else:
        levels: list[str | None] = [*options.isolation] or [None]
        found = [_in_process(stack, options, level) for level in levels]
        (mix, schedule), subjects = found[0][0], [subject for _, subject in found]
        if options.hosts:
            hosts = _open_hosts(stack, options, found[0][1], mix)
            subjects = [host.subject for host in hosts]
    for server in servers:
        _prepare(server, options, mix)
    return _Asked(
        [*subjects, *servers],
        {tensor.name: [tensor.datatype, *tensor.shape] for tensor in mix.requests[0].inputs},
        results.digest_of_requests(tensor for number in mix.order for tensor in mix.requests[number].inputs),
        sum(len(tensor.data) for tensor in mix.requests[0].inputs),
        len(mix.requests),
        [schedule] if schedule is not None else options.loads,
        hosts,
        _first_alike(hosts),
    )


def _first_alike(hosts: Sequence[OpenHost]) -> list[int]:
    """Return for each host the number of the first one that is called in the same way: over HTTP, or in process."""
    ways = [isinstance(host.subject, MeasuredServer) for host in hosts]
    return [ways.index(way) for way in ways]


def _open_hosts(stack: contextlib.ExitStack, options: Options, here: InProcess, mix: DataMix) -> list[OpenHost]:
    """Open the hosts that can be opened here, and say which cannot and why. Those in process come last."""
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-hosts-")))
    model = here.model
    copy_of_model(Path(model.source.model_directory), scratch / options.model, options.instances)
    backend_folder = BackendDirectory(options.hosting["backend_directory"]).python_folder()
    start = start_of(model, f"{model.name}_0", "CPU", 0, "serve", backend_dir=backend_folder, log=LogSettings())
    start_file = scratch / "start.json"
    start_file.write_text(json.dumps(start), encoding="utf-8")
    task = Task(
        model=options.model,
        folder=scratch / options.model,
        start_file=start_file,
        instances=sum(group.count for group in model.config.instance_groups),
        mix=mix,
        packages=options.host_packages,
        serve_options=_serve_options(options),
        timeout_s=options.timeout_s,
        processes=options.processes,
        most_connections=options.most_connections,
    )
    terminal = Terminal(sys.stderr)
    found = []
    for name in sorted(options.hosts, key="processpool".__eq__):
        terminal.line(f"moonpool: starts {name}")
        with contextlib.ExitStack() as its:
            try:
                if name == "processpool" and not all(isinstance(load, Concurrency) for load in options.loads):
                    raise Unavailable("callers in this process cannot send requests at a rate")
                host = open_host(its, name, task)
            except Unavailable as error:
                terminal.line(harmless(f"moonpool: {name} is left out: {error}"))
                continue
            stack.push(its.pop_all())
        if name == "processpool" and "moonpool" in options.hosts:
            found.append(OpenHost("moonpool", here, f"moonpool {__version__}", "Runtime.infer"))
        found.append(host)
    if not found:
        raise Unavailable("none of the hosts can be measured here; the reasons are above")
    return found


def _serve_options(options: Options) -> list[str]:
    """Return the options for `moonpool serve` that host the model as it is hosted in this process."""
    hosting = options.hosting
    found = [] if hosting["sandbox"] is None else [f"--sandbox={hosting['sandbox']}"]
    if hosting["backend_directory"] is not None:
        found.append(f"--backend-directory={hosting['backend_directory']}")
    found += [f"--sandbox-grants={grant}" for grant in hosting["sandbox_grants"]]
    found += [
        f"--model-option={pattern}:{key}={value}"
        for pattern, given in hosting["model_options"].items()
        for key, value in given.items()
    ]
    return found


def _in_process(
    stack: contextlib.ExitStack, options: Options, level: str | None
) -> tuple[tuple[DataMix, Schedule | None], InProcess]:
    """Load the model, at that level of the sandbox if one is given; return its requests and what is measured."""
    hosting = options.hosting if level is None else {**options.hosting, "sandbox": level}
    # With several runtimes, the first one's session shows the log and the progress of all.
    is_first = level is None or level == options.isolation[0]
    runtime = stack.enter_context(
        session(
            options.repository, hosting, verbose=options.verbose and is_first, quiet=not is_first, progress=is_first
        )
    )
    runtime.load(options.model, instances=options.instances)
    mix, schedule = _data(options, runtime.config(options.model))
    subject = InProcess(
        runtime, options.model, mix, is_async=options.is_async, timeout_s=options.timeout_s, sandbox=level
    )
    # Mistakes in the inputs are reported once, before the measurement.
    subject.check()
    return (mix, schedule), subject


def _server(stack: contextlib.ExitStack, options: Options, endpoint: Endpoint) -> MeasuredServer:
    server = MeasuredServer(
        endpoint,
        options.model,
        options.version,
        headers=options.headers,
        timeout_s=options.timeout_s,
        server_pid=options.server_pid if endpoint is options.endpoint else None,
    )
    stack.callback(server.close)
    return server


def _data(options: Options, interface: TakesInputs) -> tuple[DataMix, Schedule | None]:
    """Read or make up the requests; return their times, too, if they were captured with them."""
    if options.replay is not None:
        return read_capture(options.replay, options.model, options.speed)
    return options.requests.mix_for(interface), None


def _prepare(server: MeasuredServer, options: Options, mix: DataMix) -> None:
    if options.openai is None:
        found: Interface = server.interface()
        if found.decoupled and not options.is_stream:
            raise UsageError(f"model '{options.model}' at {server.where} is decoupled: measure it with --streaming")
    server.prepare(
        mix,
        processes=options.processes,
        most_connections=options.most_connections,
        shared_memory=options.shared_memory,
        is_stream=options.is_stream,
        is_json=options.is_json and server.scheme == "http",
        openai=options.openai,
        cancelled=options.cancelled,
        sequences=options.sequences,
    )


def _about(options: Options, asked: _Asked, subject: Subject) -> dict[str, Any]:
    fields = subject.configuration_fields()
    is_ours = subject is asked.subjects[0]
    about = {
        "label": options.label if is_ours else None,
        "model": options.model,
        "model_version": options.version,
        "where": subject.where,
        "shared_memory": "system" if options.shared_memory else "none",
        "streaming": options.is_stream,
        "json_tensors": options.is_json,
        "openai": options.openai,
        "processes": options.processes,
        "load_average": round(os.getloadavg()[0], 2),
        "instances": options.instances,
        "window_s": options.seconds,
        "inputs": asked.inputs,
        "different_requests": asked.count,
        "sequences": options.sequences,
        "cancel": options.cancelled,
        "requests_digest": asked.requests_digest,
        "configuration_digest": None if fields is None else results.digest_of_fields(fields),
        "configuration_fields": fields,
    }
    for host in asked.hosts:
        if host.subject is subject:
            about["host"] = host.as_dict()
    return about


class _Progress:
    """Says what is being measured: in the last line of a terminal, elsewhere with a line for each load that is done."""

    def __init__(self, options: Options) -> None:
        self._terminal = Terminal(sys.stderr)
        self._options = options
        self._begin_s = time.monotonic()

    def tell(self, load: Load, turn: int, last: Sequence[Window]) -> None:
        if not self._terminal.is_terminal:
            return
        loads = self._options.loads if load in self._options.loads else []
        number = f"load {loads.index(load) + 1} of {len(loads)}, " if loads else ""
        words = [f"{number}{load.words}"]
        words.append(f"window {turn} of at most {self._options.most_windows}" if turn else "warm-up")
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
            f"{point.whole.requests_per_s:,.0f} requests/s in {len(point.windows)} windows" for point in points
        )
        self._terminal.line(f"moonpool: {load.words}: {rates}")

    def clear(self) -> None:
        if self._terminal.is_terminal:
            self._terminal.replace_line("")


def _endings(options: Options) -> list[str]:
    return [WRITERS[each][0] if each in WRITERS else f".{each}" for each in options.export]


def _save(options: Options, found: Mapping[str, Any], points: Sequence[Point]) -> None:
    if options.save is None:
        return
    name = options.file_name
    for path in results.write(options.save, name, found, overwrite=options.overwrite):
        print(path)
    for each, ending in zip(options.export, _endings(options), strict=True):
        path = options.save / f"{name}{ending}"
        if each in WRITERS:
            WRITERS[each][1](path, points)
        else:
            path.write_text(page_of(found), encoding="utf-8")
        print(path)
    if not can_plot(found):
        return
    if has_matplotlib():
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
