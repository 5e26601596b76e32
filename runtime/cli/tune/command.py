"""`moonpool tune`: the settings with which a model answers most within limits of latency, as lines of its `config.pbtxt`."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from moonpool.runtime.bench.loads import BadLoad, seconds_of
from moonpool.runtime.bench.slo import Slo
from moonpool.runtime.bench.tuning.settings import SETTINGS, SettingBounds
from moonpool.runtime.bench.tuning.tuner import BudgetSpent, Measured, Plan, Tuner
from moonpool.runtime.cli.bench.command import requests_of
from moonpool.runtime.cli.bench.options import read_option, read_shape, sequence_lengths
from moonpool.runtime.cli.inputs import parse_inputs
from moonpool.runtime.cli.shared import UsageError, add_hosting, figure
from moonpool.runtime.cli.tune.report import Report, introduce, line_of
from moonpool.runtime.process.terminal import Terminal
from moonpool.runtime.repository.repository import ModelRepository

NAME = "tune"
HELP = "find the settings with which a model answers most requests within limits of latency"
DESCRIPTION = """\
Try a model with other numbers of instances and threads, larger batches, delays, templates and front ends, and print
the settings with which it answers most requests a second within the limits of --slo, as a diff of its config.pbtxt.
If it is an ensemble or asks other models, their settings are tried, too.

A server of its own, on a free port of this machine, hosts the models; other servers are not touched, but anything else that runs
here disturbs the figures. docs/TUNING.md explains the search.
"""
EXAMPLES = """\
examples:
  moonpool tune models add_sub --slo p99=20ms
  moonpool tune models add_sub --slo p99=20ms --budget 10m --html tuned.html --write
  moonpool tune models pipeline --slo p95=50ms --settings instances,max_batch,delay --input-data data.json
"""
_BUDGET = "5m"


@dataclass(frozen=True, slots=True)
class _Requests:
    """The options of the requests, read."""

    values: dict[str, object]
    input_data: list[str]
    shapes: dict[str, tuple[int, ...]]
    batch: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "moonpool tune REPO MODEL [--slo FIGURE=TIME] [--FLAG VALUE ...]"
    add = parser.add_argument
    add("repository", metavar="REPO", help="the directory of the models")
    add("model", metavar="MODEL", help="the model's name")
    _add_search(parser.add_argument_group("the search"))
    _add_load(parser.add_argument_group("the load"))
    hosting = parser.add_argument_group("hosting")
    add_hosting(hosting)
    hosting.add_argument(
        "--load-model",
        metavar="NAME",
        action="append",
        default=[],
        help="load only MODEL and the models named like this, may be given many times; by default all of REPO, as `moonpool serve` does",
    )
    results = parser.add_argument_group("the results")
    results.add_argument(
        "--write", action="store_true", help="change the files config.pbtxt as the diff says"
    )
    results.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page with all that was measured"
    )


def _add_search(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--slo",
        metavar="FIGURE=TIME,…",
        help="limits such as p99=20ms; FIGURE is p50, p90, p95, p99, max or mean. Without it, only the rate counts",
    )
    add(
        "--budget",
        metavar="TIME|N",
        default=_BUDGET,
        help="how long the search may take, as 10m, or how many settings it may try, as 40; default %(default)s",
    )
    add(
        "--settings",
        metavar="NAME,…",
        default=",".join(SETTINGS),
        help="the settings to change; default %(default)s",
    )
    add("--most-instances", metavar="N", type=int, help="default twice the processors, at least 8")
    add("--most-batch", metavar="N", type=int, default=64, help="default %(default)s")
    add(
        "--restarts",
        metavar="N",
        type=int,
        default=4,
        help="end after so many restarts in a row that found nothing better; default %(default)s",
    )
    add("--seed", metavar="N", type=int, default=0, help="the order of the search; default 0")


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--most-callers", metavar="N", type=int, default=64, help="default %(default)s")
    for flag, metavar, default, words in (
        ("--seconds", "S", 0.5, "the length of a window"),
        ("--warm-up", "S", 0.3, "the seconds before the first window, which do not count"),
        ("--stable", "PERCENT", 10.0, "how far the last three windows may differ from their mean"),
    ):
        add(flag, metavar=metavar, type=float, default=default, help=f"{words}; default {default}")
    add("--windows", metavar="N", type=int, default=6, help="the most of a load; default 6")
    add(
        "--input",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="the value of an input, as NAME=JSON or NAME=@FILE.npy; made up by default",
    )
    add(
        "--input-data",
        metavar="PATH[=WEIGHT]",
        action="append",
        default=[],
        help="the data of requests, as for `moonpool bench`",
    )
    add(
        "--shape",
        metavar="NAME=N,N",
        action="append",
        default=[],
        help="the size of a made-up input, without the batch dimension",
    )
    add("--batch", metavar="N", type=int, default=1, help="rows of a made-up request; default 1")
    add(
        "--sequences",
        metavar="N|N-N",
        help="send sequences of that length, or between two lengths",
    )


def run(arguments: argparse.Namespace) -> int:
    names, requests = _checked(arguments)
    slo = read_option("--slo", Slo.parse, arguments.slo)
    budget = _Budget(arguments.budget)
    repository = ModelRepository(arguments.repository)
    repository.find(arguments.model)
    plan = Plan(
        model=arguments.model,
        serve=_serve_arguments(arguments),
        names=names,
        bounds=_bounds(arguments, slo),
        most_callers=arguments.most_callers,
        slo=slo,
        seconds=arguments.seconds,
        warm_up_s=arguments.warm_up,
        most_windows=arguments.windows,
        stable_percent=arguments.stable,
        sequences=None if arguments.sequences is None else sequence_lengths(arguments.sequences),
        requests=lambda interface: requests_of(interface, requests),
        step=budget.step,
    )
    was_interrupted = False
    try:
        with Tuner(plan) as tuner:
            introduce(tuner)
            budget.begin(tuner)
            pairs: list[tuple[Measured, Measured]] = []
            try:
                with contextlib.suppress(BudgetSpent):
                    tuner.search(
                        seed=arguments.seed, most=budget.places, restarts=arguments.restarts
                    )
                budget.has_end = False
                pairs = tuner.confirm()
            except KeyboardInterrupt:
                was_interrupted = True
            budget.clear()
            code = Report(tuner, plan.slo, repository.path).show(
                pairs, is_written=arguments.write and not was_interrupted, html=arguments.html
            )
    finally:
        budget.clear()
    return 128 + signal.SIGINT if was_interrupted else code


def _checked(arguments: argparse.Namespace) -> tuple[list[str], _Requests]:
    """Raises `UsageError`."""
    names = arguments.settings.split(",")
    if unknown := [name for name in names if name not in SETTINGS]:
        raise UsageError(f"--settings: {unknown[0]!r} is none of {', '.join(SETTINGS)}")
    for name in ("seconds", "windows", "stable", "batch", "most_callers", "most_batch"):
        value = getattr(arguments, name)
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"--{name.replace('_', '-')} must be more than 0, not {value}")
    if arguments.most_instances is not None and arguments.most_instances < 1:
        raise UsageError("--most-instances must be more than 0")
    if not 0 <= arguments.warm_up < math.inf or arguments.restarts < 0:
        raise UsageError("--warm-up and --restarts must be 0 or more")
    values, shapes = parse_inputs(arguments.input), dict(map(read_shape, arguments.shape))
    if values and shapes:
        raise UsageError("--shape is for made-up inputs; leave it out with --input")
    if values and arguments.input_data:
        raise UsageError("--input and --input-data are two sources of requests; give one")
    return names, _Requests(values, arguments.input_data, shapes, arguments.batch)


def _bounds(arguments: argparse.Namespace, slo: Slo | None) -> SettingBounds:
    cores = len(os.sched_getaffinity(0))
    # A request that waits for longer than a limit allows breaks it.
    delay_us = min(slo.limits_us.values(), default=math.inf) if slo else math.inf
    return SettingBounds(
        arguments.most_instances or max(8, 2 * cores), arguments.most_batch, delay_us, cores
    )


def _serve_arguments(arguments: argparse.Namespace) -> list[str]:
    """Write the options of hosting as `moonpool serve` takes them."""
    words = [f"--model-repository={arguments.repository}", "--exit-on-error=false"]
    loaded = [arguments.model, *arguments.load_model] if arguments.load_model else ["*"]
    words += [f"--load-model={name}" for name in loaded]
    for flag in ("backend_directory", "sandbox"):
        if getattr(arguments, flag):
            words.append(f"--{flag.replace('_', '-')}={getattr(arguments, flag)}")
    words += [f"--sandbox-grants={grant}" for grant in arguments.sandbox_grants]
    words += [f"--model-option={option}" for option in arguments.model_option]
    return words


class _Budget:
    """The time of the search, and the line that shows how it goes."""

    def __init__(self, text: str) -> None:
        """Read a time, or a number of places. Raises `UsageError`."""
        self.places: int | None = int(text) if text.isdecimal() else None
        try:
            self._seconds = math.inf if self.places is not None else seconds_of(text)
        except BadLoad as error:
            raise UsageError(f"--budget: {error}, and no number of settings") from error
        if self.places == 0 or self._seconds == 0:
            raise UsageError("--budget must be more than 0")
        self.has_end = True
        self._terminal = Terminal(sys.stderr)
        self._begin_s = time.monotonic()
        self._tuner: Tuner | None = None
        self._seen = 0

    def begin(self, tuner: Tuner) -> None:
        self._tuner, self._begin_s = tuner, time.monotonic()

    def step(self, what: str) -> None:
        """Show what is measured now. Raises `BudgetSpent`."""
        taken_s = time.monotonic() - self._begin_s
        tuner = self._tuner
        if tuner is None:
            return
        if self.has_end and tuner.measured and taken_s >= self._seconds:
            raise BudgetSpent
        if not self._terminal.is_terminal:
            for each in tuner.measured[self._seen :]:
                self._terminal.line(f"moonpool: {line_of(tuner, each)}")
            self._seen = len(tuner.measured)
            return
        places = len({each.place for each in tuner.measured})
        best = "" if tuner.best is None else f", best {figure(tuner.best.rate)}/s"
        line = f"{places} settings, {taken_s:.0f} s{best}: {what}"
        self._terminal.replace_line(line[: self._terminal.width - 1])

    def clear(self) -> None:
        if self._terminal.is_terminal:
            self._terminal.replace_line("")
