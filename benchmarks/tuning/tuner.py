"""Measures a model with other settings: a server of its own takes them, and gets load.

For each place in the search, the models whose settings differ from the last place are loaded with them. The server
changes instances and delays while it serves, and starts new processes for all else. Then the number of callers doubles,
starting from that of the best place so far: too few callers show no throughput, too many only make requests wait. The
score of a place is that of its best load.

If the limits hold, the score is the rate of answers. Otherwise it is negative: a load that did not settle is better
than one that breaks a limit, and that is better the less it does so. So the climb finds its way to places that hold.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.benchmarks.data import DataMix
from moonpool.benchmarks.hosts.kserve import MoonpoolHost
from moonpool.benchmarks.loads import Concurrency
from moonpool.benchmarks.server import MeasuredServer
from moonpool.benchmarks.slo import Slo
from moonpool.benchmarks.tuning.search import Place, climb, front, is_better
from moonpool.benchmarks.tuning.settings import SETTINGS, Setting, SettingBounds, Value, settings_of, with_values
from moonpool.benchmarks.windows import PERCENTILES, Point, sweep
from moonpool.runtime.client.control_client import HttpControlClient, Interface, Refused, understood
from moonpool.runtime.client.request import Endpoint, Unreachable
from moonpool.runtime.model.config.model import normalise
from moonpool.runtime.model.config.schema import Raw

# A place is better only if its score is greater by this share: windows of one load differ by about as much.
MARGIN = 0.03
# A load that exceeds its limits by less than this share is measured once more: other programs may have done that.
_NEAR = 0.05
_TIMEOUT_S = 60.0


class BudgetSpent(Exception):
    """The time for the search is over."""


class Unmeasurable(Refused):
    """The model cannot be measured at all. The text says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of a search that do not change."""

    model: str
    # The arguments of `moonpool serve`.
    serve: Sequence[str]
    # The names of the settings that may change.
    names: Sequence[str]
    bounds: SettingBounds
    most_callers: int
    slo: Slo | None
    seconds: float
    warm_up_s: float
    most_windows: int
    stable_percent: float
    sequences: tuple[int, int] | None
    # Makes the requests for the inputs that the server tells.
    requests: Callable[[Interface], DataMix]
    # Raises `BudgetSpent` when the time is over, and shows what is measured.
    step: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """A place under one load, or the reason why it does not work."""

    place: Place
    callers: int
    score: float
    rate: float = math.nan
    latency_us: float = math.nan
    # The reason why the load does not hold, or None.
    broken: str | None = None


class Confirmation(NamedTuple):
    """The start and the best place, measured again in turns; no pairs if the start is the best one, or was not found to
    be worse.
    """

    pairs: tuple[tuple[Measured, Measured], ...] = ()
    # The load under which the present settings are as good.
    as_good: Measured | None = None

    @property
    def is_within_limits(self) -> bool:
        """True if the best place kept the limits in each turn."""
        return all(best.broken is None for _, best in self.pairs)

    @property
    def holds(self) -> bool:
        """True if the best place was better in each turn, and kept the limits."""
        return self.is_within_limits and all(best.score > start.score for start, best in self.pairs)


def confirm(
    start: Place, best: Measured, measured: Sequence[Measured], measure: Callable[[Place, int], Measured]
) -> Confirmation:
    """Measure the start and the best place again in turns, A B B A, with a function of place and callers.

    The start is first measured with the callers of the best load, too, and goes on with those that suit it better.
    Otherwise the settings would be credited with what more callers brought.
    """
    if best.place == start:
        return Confirmation()
    mine = [each for each in measured if each.place == start]
    if all(each.callers != best.callers for each in mine):
        mine.append(measure(start, best.callers))
    first = max(mine, key=lambda each: each.score)
    if not is_better(best.score, first.score, MARGIN):
        return Confirmation(as_good=first)
    pairs = []
    for turn in (0, 1):
        pair = {each.place: each for each in (first, best)}
        for each in (first, best) if turn == 0 else (best, first):
            pair[each.place] = measure(each.place, each.callers)
        pairs.append((pair[start], pair[best.place]))
    return Confirmation(tuple(pairs))


# Models may take long to load.
_LOAD_S = 600.0
# The kernel kills the server if this process ends without ending it (PR_SET_PDEATHSIG).
_SERVER = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"
    "if os.getppid() != int(sys.argv.pop(1)): sys.exit(1)\n"
    "from moonpool.__main__ import main\n"
    "sys.exit(main())\n"
)


class OwnServer(MoonpoolHost):
    """A `moonpool serve` over HTTP alone, which loads models on request. For one thread."""

    health = "live"

    def __init__(self, options: Sequence[str]) -> None:
        """Start it with these options, and wait until its models are loaded. Raises `Unavailable`."""
        self.program = ("-c", _SERVER, str(os.getpid()))
        alone = ("--allow-grpc=false", "--allow-metrics=false", "--model-control-mode=explicit")
        super().__init__(None, (*alone, *options))
        self.endpoint = Endpoint("http", "127.0.0.1", self.http_port)
        self.client = HttpControlClient(self.endpoint, (), _LOAD_S)


class Tuner:
    """The search for one model. A context manager; for one thread.

    Making it starts a server and finds the models that a request reaches. Raises `Unavailable`, `Unmeasurable`,
    `Refused`, `Unreachable` and errors of the requests.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._cleanup = contextlib.ExitStack()
        self._server: OwnServer | None = None
        self._subject: MeasuredServer | None = None
        # The configuration of each model at the start, and the values that it has now where they differ from the
        # start's.
        self.raws: dict[str, Raw] = {}
        self._applied: dict[str, dict[str, Value]] = {}
        self.settings: list[Setting] = []
        # The settings that cannot change, by model and name, with the reasons.
        self.left_out: dict[tuple[str, str], str] = {}
        self.measured: list[Measured] = []
        self.best: Measured | None = None
        self._callers = 0
        try:
            self._serve()
            self._find_settings()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Tuner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and the load."""
        self._cleanup.close()
        self._subject = self._server = None

    @property
    def start(self) -> Place:
        """The place of the present configuration."""
        return tuple(setting.start for setting in self.settings)

    @property
    def figure(self) -> str:
        """The name of the latency that is shown: the first one with a limit, else p99."""
        names = self._plan.slo.limits_us if self._plan.slo else ()
        return next((name for name in names if name in PERCENTILES or name == "mean"), "p99")

    def values_at(self, place: Place) -> dict[str, dict[str, Value]]:
        """Return the values that differ from the start, by model and name; those of the server have the model ""."""
        found: dict[str, dict[str, Value]] = {}
        for setting, index in zip(self.settings, place, strict=True):
            if index != setting.start:
                found.setdefault(setting.model, {})[setting.name] = setting.values[index]
        return found

    def front(self) -> list[Measured]:
        """Return the loads that settled and that no other one beats in rate and latency."""
        found = [each for each in self.measured if each.rate == each.rate and each.score > -1]
        return [found[number] for number in front([(m.rate, m.latency_us) for m in found])]

    def search(self, *, seed: int, most: int | None, restarts: int) -> None:
        """Search from the present configuration; the results are in `measured` and `best`. Raises what `step`
        raises.
        """
        sizes = [len(setting.values) for setting in self.settings]
        climb(sizes, self.start, self._measure, seed=seed, most=most, restarts=restarts, margin=MARGIN)

    def confirm(self) -> Confirmation:
        """Measure the start and the best place again."""
        if self.best is None or self.best.broken is not None:
            return Confirmation()
        return confirm(self.start, self.best, self.measured, self._measure_again)

    def _measure_again(self, place: Place, callers: int) -> Measured:
        self._apply_again(place)
        return self._load(place, callers)

    def _apply_again(self, place: Place) -> None:
        """Apply settings that were applied before. Raises `Unmeasurable`."""
        if (why := self._apply(place)) is not None:
            raise Unmeasurable(f"what worked before fails now: {why}")

    # The server

    def _serve(self) -> None:
        """Start a server in place of the present one, and prepare the requests."""
        self.close()
        self._applied = {}
        server = self._server = OwnServer(self._plan.serve)
        self._cleanup.callback(server.close)
        with understood("the server's list of models"):
            unready = server.client.unready()
        if (why := unready.get(self._plan.model)) is not None:
            raise Unmeasurable(f"model '{self._plan.model}' is not ready: {why}")
        subject = MeasuredServer(server.endpoint, self._plan.model, "", timeout_s=_TIMEOUT_S)
        self._subject = subject
        self._cleanup.callback(subject.close)
        found = subject.interface()
        if found.decoupled:
            raise Unmeasurable(
                f"model '{self._plan.model}' is decoupled, and tune measures models with one response to each request"
            )
        subject.prepare(
            self._plan.requests(found),
            processes=1,
            most_connections=self._plan.most_callers,
            sequences=self._plan.sequences,
        )

    def _find_settings(self) -> None:
        """Find the models that a request reaches, and what may change in them."""
        server, subject = self._server, self._subject
        if server is None or subject is None:
            raise ValueError("the server is closed")
        with understood("what the server says of its models"):
            before = server.client.served()
            whole = subject.window(Concurrency(1), self._plan.warm_up_s or self._plan.seconds)
            if not len(whole.latencies_ns):
                reason = next(iter(whole.errors), "no request was answered in time")
                raise Unmeasurable(f"requests to model '{self._plan.model}' fail: {reason}")
            after = server.client.served()
            reached = [name for name in sorted(after) if after[name] > before.get(name, 0)]
            reached.sort(key=lambda name: name != self._plan.model)
            for name in reached:
                self._add_model(name, normalise(server.client.configuration(name, "") or {}))
        if not self.settings:
            raise Unmeasurable(f"nothing about model '{self._plan.model}' can change")

    def _add_model(self, name: str, raw: Raw) -> None:
        self.raws[name] = raw
        found, left_out = settings_of(raw, self._plan.bounds)
        self.settings += [setting for setting in found if setting.name in self._plan.names]
        for setting in SETTINGS:
            if setting in left_out and setting in self._plan.names:
                self.left_out[name, setting] = left_out[setting]

    # A place

    def _measure(self, place: Place) -> float:
        """Return the score of a place under its best load."""
        if (why := self._apply(place)) is not None:
            self.measured.append(Measured(place, 0, -math.inf, broken=why))
            return -math.inf
        levels = [1 << power for power in range(self._plan.most_callers.bit_length())]
        scores: dict[int, float] = {}

        def score(at: Place) -> float:
            found = self._load(place, levels[at[0]])
            self.measured.append(found)
            if self.best is None or is_better(found.score, self.best.score, MARGIN):
                self.best, self._callers = found, at[0]
            scores[at[0]] = found.score
            return found.score

        begin = min(self._callers, len(levels) - 1)
        climb((len(levels),), (begin,), score, margin=MARGIN)
        return max(scores.values())

    def _load(self, place: Place, callers: int) -> Measured:
        """Measure the applied place under one load, once more if it just misses its limits."""
        found = self._load_once(place, callers)
        is_near = -1 - _NEAR <= found.score < -1
        return self._load_once(place, callers) if is_near else found

    def _load_once(self, place: Place, callers: int) -> Measured:
        plan, load = self._plan, Concurrency(callers)
        if self._subject is None:
            raise ValueError("the server is closed")
        try:
            ((point,),) = sweep(
                [self._subject],
                [load],
                seconds=plan.seconds,
                warm_up_s=plan.warm_up_s,
                most_windows=plan.most_windows,
                stable_percent=plan.stable_percent,
                tell=lambda _, turn, __: plan.step(f"{load.words}, window {turn}"),
            )
        except (Unreachable, Refused) as error:
            return Measured(place, callers, -math.inf, broken=self._ended(str(error)))
        whole, slo = point.whole, plan.slo
        broken = (slo or Slo({})).broken(point)
        latency_us = (slo or Slo({})).figure_us(whole, self.figure)
        return Measured(place, callers, _score(point, slo, broken), whole.requests_per_s, latency_us, broken)

    def _ended(self, why: str) -> str:
        """Start a new server if the present one has ended; return the reason with its last lines."""
        if self._server is not None and not self._server.process.is_running:
            why = f"the server ended: {self._server.process.said()}"
            self._serve()
        return why

    def _apply(self, place: Place) -> str | None:
        """Give the server these settings; return the reason if it cannot."""
        self._plan.step("loading")
        wanted = self.values_at(place)
        for name, raw in self.raws.items():
            values = wanted.get(name, {})
            if values == self._applied.get(name, {}) or self._server is None:
                continue
            try:
                self._server.client.load(name, with_values(raw, values, raw["backend"]))
            except (Refused, Unreachable) as error:
                return self._ended(str(error))
            self._applied[name] = values
        return None


def _score(point: Point, slo: Slo | None, broken: str | None) -> float:
    """Return a number that grows with the quality of a load."""
    whole = point.whole
    if broken is None:
        return whole.requests_per_s
    if whole.failed or not len(whole.latencies_ns):
        return -math.inf
    limits = slo.limits_us.items() if slo else ()
    excess = max((slo.figure_us(whole, name) / limit for name, limit in limits if slo), default=0.0)
    if math.isnan(excess):
        return -math.inf
    return -excess if excess > 1 else -1 / (2 + whole.requests_per_s)
