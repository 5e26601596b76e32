"""`moonpool tune`: the settings with which a model answers most within limits of latency, as lines of its
`config.pbtxt`.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from pathlib import Path

from moonpool.benchmarks.commands.load_options import (
    RequestSource,
    add_requests,
    add_sequences,
    add_windows,
    check_positive,
    check_windows,
    read_option,
    sequence_lengths,
)
from moonpool.benchmarks.commands.tune_report import Report, introduce, line_of
from moonpool.benchmarks.loads import BadLoad, seconds_of
from moonpool.benchmarks.slo import Slo
from moonpool.benchmarks.tuning.settings import SETTINGS, SettingBounds
from moonpool.benchmarks.tuning.tuner import BudgetSpent, Confirmation, Plan, Tuner
from moonpool.runtime.cli.shared import UsageError, add_hosting, figure
from moonpool.runtime.process.terminal import Terminal
from moonpool.runtime.repository.repository import ModelRepository, suggesting

HELP = "find the settings with which a model answers most requests within limits of latency"
DESCRIPTION = """\
Try a model with other numbers of instances and threads, larger batches, delays and templates, and print the settings
with which it answers most requests a second within the limits of --slo, as a diff of its config.pbtxt. If it is an
ensemble or asks other models, their settings are tried, too.

A server of its own, on a free port of this machine, hosts the models; other servers are not touched, but anything else
that runs here disturbs the figures. docs/TUNING.md explains the search.
"""
EXAMPLES = """\
examples:
  moonpool tune models add_sub --slo p99=20ms
  moonpool tune models add_sub --slo p99=20ms --budget 10m --html tuned.html --write
  moonpool tune models pipeline --slo p95=50ms --settings instances,max_batch,delay --input-data data.json
"""
_BUDGET = "5m"


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
        help="load only MODEL and the models named like this, may be given many times; by default all of REPO, as "
        "`moonpool serve` does",
    )
    results = parser.add_argument_group("the results")
    results.add_argument("--write", action="store_true", help="change the files config.pbtxt as the diff says")
    results.add_argument("--html", metavar="FILE", type=Path, help="write a page with all that was measured")


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
    add("--settings", metavar="NAME,…", default=",".join(SETTINGS), help="the settings to change; default %(default)s")
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
    add_windows(group, seconds=0.5, windows=6)
    add_requests(group)
    add_sequences(group)


def run(arguments: argparse.Namespace) -> int:
    names = _checked(arguments)
    slo = read_option("--slo", Slo.parse, arguments.slo)
    budget = _Budget(arguments.budget)
    repository = ModelRepository(arguments.repository)
    with suggesting(arguments.model, repository.models):
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
        sequences=sequence_lengths(arguments.sequences),
        requests=RequestSource.of(arguments).mix_for,
        step=budget.step,
    )
    was_interrupted = was_cut = False
    try:
        with Tuner(plan) as tuner:
            introduce(tuner)
            budget.begin(tuner)
            confirmation = Confirmation()
            try:
                try:
                    tuner.search(seed=arguments.seed, most=budget.places, restarts=arguments.restarts)
                except BudgetSpent:
                    was_cut = True
                budget.has_end = False
                confirmation = tuner.confirm()
            except KeyboardInterrupt:
                if tuner.best is None:  # there is nothing to show
                    raise
                was_interrupted = True
            budget.clear()
            code = Report(tuner, plan.slo, repository.path).show(
                confirmation, was_cut=was_cut, is_written=arguments.write and not was_interrupted, html=arguments.html
            )
    finally:
        budget.clear()
    return 128 + signal.SIGINT if was_interrupted else code


def _checked(arguments: argparse.Namespace) -> list[str]:
    """Check the numbers; return the names of the settings. Raises `UsageError`."""
    names: list[str] = arguments.settings.split(",")
    if unknown := [name for name in names if name not in SETTINGS]:
        raise UsageError(f"--settings: {unknown[0]!r} is none of {', '.join(SETTINGS)}")
    check_windows(arguments)
    check_positive(arguments, ("most_callers", "most_batch"))
    if arguments.most_instances is not None:
        check_positive(arguments, ("most_instances",))
    if arguments.restarts < 0:
        raise UsageError(f"--restarts must be 0 or more, not {arguments.restarts}")
    return names


def _bounds(arguments: argparse.Namespace, slo: Slo | None) -> SettingBounds:
    cores = len(os.sched_getaffinity(0))
    # A request that waits for longer than a limit allows breaks it.
    delay_us = min(slo.limits_us.values(), default=math.inf) if slo else math.inf
    return SettingBounds(arguments.most_instances or max(8, 2 * cores), arguments.most_batch, delay_us, cores)


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
