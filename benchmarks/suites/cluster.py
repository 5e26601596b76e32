"""A cluster that cannot be had here, simulated: 10,000 models on 100 nodes, asked by Zipf's law.

Start times and sizes are measured first, with real models. The rest is a simulation, whose requests depend on a seed
alone. Each node decides by moonpool's own policy which models stay in its memory. What is compared is the router before
the nodes.

A request that finds its model ready waits for those before it, which one instance executes one after the other. If the
model is not in memory, the request waits until the policy lets others go, until one of the node's cores is free for the
start, and until the start is over.
"""

from __future__ import annotations

import heapq
import logging
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

import moonpool
from moonpool import Resident
from moonpool.benchmarks.suites.hosted import MODELS, option
from moonpool.benchmarks.suites.report import Report, main
from moonpool.runtime.residency.policy import Act, Need, Sieve, decide

_SEED = 21
_MIB = 1 << 20
_TIMEOUT_S = 60.0
# The least pause after which a request that found no room asks again.
_LOOK_S = 0.01


class Load(NamedTuple):
    """The cluster and its requests."""

    nodes: int
    models: int
    requests: int
    rate_per_s: float
    node_bytes: int
    cores: int
    """Starts that a node makes at the same time."""
    execute_s: float
    skew: float = 1.0


_WHOLE = Load(100, 10_000, 100_000, 2_500.0, 8 << 30, 16, 0.005)
_QUICK = Load(5, 100, 1_000, 50.0, 4 << 30, 16, 0.005)
# Sizes of weights: lognormal, with this median, and this standard deviation of the logarithm; none is larger than a
# quarter of a node.
_MEDIAN_BYTES, _SPREAD = 60 * _MIB, 1.2


class Start(NamedTuple):
    """A start as it was measured, without weights, and what a byte of weights adds."""

    seconds: float
    size_bytes: float
    seconds_a_byte: float


class Model(NamedTuple):
    """A model of the simulation."""

    need: Need
    start_s: float


class Step(NamedTuple):
    """A request, and the time at which it is looked at next."""

    now_s: float
    request: int
    came_s: float
    model: int
    node: Node | None = None
    """The node that it was sent to; None if it has just come."""


@dataclass(slots=True)
class Hosted:
    """A model in the memory of a node. It has what `decide` asks of a `Candidate`, as of the node's clock."""

    node: Node
    need: Need
    start_s: float
    ready_s: float
    uses: int = 0
    # The end of the last request that waits or executes.
    free_s: float = 0.0
    # The ends of those requests.
    ends_s: list[float] = field(default_factory=list)
    stays_because: str = "stay"
    is_dormant: bool = False

    @property
    def stays_until_s(self) -> float:
        """The time until which it starts, is in use, or came a moment ago."""
        least_s = max(self.node.limits.least_stay_s, self.start_s)
        return max(self.free_s, self.ready_s + least_s)

    @property
    def may_go(self) -> bool:
        """True after that time."""
        return self.stays_until_s <= self.node.now_s

    def open_requests(self, now_s: float) -> int:
        """Return the number of requests that have not ended."""
        del self.ends_s[: bisect_right(self.ends_s, now_s)]
        return len(self.ends_s)


class LastUsed(Sieve[int]):
    """The order of last use in place of SIEVE's, for comparison."""

    def __init__(self) -> None:
        super().__init__()
        self._used: dict[int, None] = {}

    def add(self, key: int, uses: int = 0) -> None:
        """Take in a model, or note that it was used."""
        super().add(key, uses)
        self._used.pop(key, None)
        self._used[key] = None

    def remove(self, key: int) -> None:
        """Forget a model."""
        super().remove(key)
        self._used.pop(key, None)

    def choose(self, uses: Callable[[int], int], may_go: Callable[[int], bool]) -> int | None:  # noqa: ARG002
        """Return the model that was not used for the longest time."""
        return next(filter(may_go, self._used), None)


class Node:
    """One machine: the models in its memory, and the cores that start others."""

    def __init__(self, load: Load, order: Sieve[int], holders: dict[int, list[Node]]) -> None:
        """`holders` has the nodes that have each model, of all nodes."""
        self.limits = Resident(memory=load.node_bytes)
        self.hosted: dict[int, Hosted] = {}
        self.now_s = 0.0
        self.requests = 0
        self.holders = holders
        # The models that wait for room, each with the requests behind its first one.
        self.waiting: dict[int, list[Step]] = {}
        self._order = order
        self._execute_s = load.execute_s
        # The times from which on each core is free for a start.
        self._cores = [0.0] * load.cores

    def ask(self, number: int, model: Model, now_s: float) -> tuple[float, bool] | None:
        """Execute a request. Returns the time for which it waits, and True if its model was ready; None if there is no
        room now.
        """
        self.now_s = now_s
        found = self.hosted.get(number)
        is_hit = found is not None and found.ready_s <= now_s
        if found is None:
            if not self._makes_room(model.need):
                return None
            found = self._begin(number, model)
        elif isinstance(self._order, LastUsed):
            self._order.add(number)
        self.requests += 1
        found.uses += 1
        begins_s = max(now_s, found.ready_s, found.free_s)
        found.free_s = begins_s + self._execute_s
        found.ends_s.append(found.free_s)
        return begins_s - now_s, is_hit

    def _makes_room(self, need: Need) -> bool:
        while True:
            # It has what is read of a candidate.
            verdict = decide(self.limits, self._order, cast("Any", self.hosted), need)
            if verdict.victim is None:
                return verdict.act is Act.ADMIT
            self._order.remove(verdict.victim)
            del self.hosted[verdict.victim]
            self.holders[verdict.victim].remove(self)

    def _begin(self, number: int, model: Model) -> Hosted:
        begins_s = max(self.now_s, heapq.heappop(self._cores))
        ready_s = begins_s + model.start_s
        heapq.heappush(self._cores, ready_s)
        # The request that starts it is no reason to stay.
        self._order.add(number, 1)
        self.hosted[number] = Hosted(self, model.need, model.start_s, ready_s)
        self.holders.setdefault(number, []).append(self)
        return self.hosted[number]

    def look_again_s(self) -> float:
        """Return the time at which there may be room again."""
        soonest_s = min(each.stays_until_s for each in self.hosted.values())
        return max(soonest_s, self.now_s + _LOOK_S)

    def open_requests(self, number: int, now_s: float) -> int:
        """Return the number of requests to a model that have not ended; 0 for one that is not in memory."""
        found = self.hosted.get(number)
        return 0 if found is None else found.open_requests(now_s)


class AnyNode:
    """A balancer that does not look into requests, such as a Service of Kubernetes."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes, self._chance = nodes, random.Random(_SEED)

    def __call__(self, model: int, now_s: float) -> Node:  # noqa: ARG002
        """Return any node."""
        return self._chance.choice(self._nodes)


class ByName:
    """A balancer that hashes the model's name: a model has its nodes in an order of its own, and the first one gets all
    requests.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._orders: dict[int, list[Node]] = {}

    def order(self, model: int) -> list[Node]:
        """Return the model's nodes, the first one first."""
        found = self._orders.get(model)
        if found is None:
            chance = random.Random(_SEED * 1_000_003 + model)
            found = self._orders[model] = chance.sample(self._nodes, len(self._nodes))
        return found

    def __call__(self, model: int, now_s: float) -> Node:  # noqa: ARG002
        """Return the model's first node."""
        return self.order(model)[0]


class ByNameOrNext(ByName):
    """The same, but a node at which requests of the model wait is passed over for the next one in the model's order."""

    most_open = 4

    def __call__(self, model: int, now_s: float) -> Node:
        """Return the first node at which few requests of the model are open."""
        order = self.order(model)
        few = (node for node in order if node.open_requests(model, now_s) < self.most_open)
        return next(few, order[0])


class WhereLoaded:
    """Ray Serve's rule for multiplexed models: a node that has the model, else one with the fewest models. Of two of
    these, the less busy one.
    """

    most_open = 64

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes, self._chance = nodes, random.Random(_SEED)

    def __call__(self, model: int, now_s: float) -> Node:
        """Return the node."""
        having = [
            node for node in self._nodes[0].holders.get(model, ()) if node.open_requests(model, now_s) < self.most_open
        ]
        if not having:
            fewest = min(len(node.hosted) for node in self._nodes)
            having = [node for node in self._nodes if len(node.hosted) == fewest]
        two = self._chance.sample(having, min(2, len(having)))
        return min(two, key=lambda node: node.open_requests(model, now_s))


_ROUTERS: dict[str, Callable[[Sequence[Node]], Callable[[int, float], Node]]] = {
    "any node": AnyNode,
    "by the model's name": ByName,
    "by name, or the next": ByNameOrNext,
    "where it is loaded": WhereLoaded,
}


def made_nodes(load: Load, order: Callable[[], Sieve[int]]) -> list[Node]:
    """Return nodes without models, which keep to this order."""
    holders: dict[int, list[Node]] = {}
    return [Node(load, order(), holders) for _ in range(load.nodes)]


class Outcome:
    """The figures of the second half of a run. The first half fills the memory."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []
        self.hits = self.starts = self.refused = 0

    @property
    def hit_rate(self) -> float:
        """The part of the requests whose model was ready."""
        return self.hits / (len(self.waits_s) + self.refused)


def simulate(load: Load, models: Sequence[Model], nodes: Sequence[Node], router: str) -> Outcome:
    """Send all requests through one router to the nodes."""
    route = _ROUTERS[router](nodes)
    outcome = Outcome()
    half_s = load.requests / load.rate_per_s / 2
    steps = requests(load)
    while steps:
        step = heapq.heappop(steps)
        now_s, came_s, number = step.now_s, step.came_s, step.model
        node = step.node or route(number, now_s)
        if step.node is None and number in node.waiting:
            # As in a node of moonpool's, one of them makes room, and the others wait with it.
            node.waiting[number].append(step._replace(node=node))
            continue
        is_start = number not in node.hosted
        answer = node.ask(number, models[number], now_s)
        if answer is None and now_s - came_s < node.limits.patience_s:
            node.waiting.setdefault(number, [])
            heapq.heappush(steps, step._replace(now_s=node.look_again_s(), node=node))
            continue
        for each in node.waiting.pop(number, ()):
            heapq.heappush(steps, each._replace(now_s=now_s))
        if came_s < half_s:
            continue
        if answer is None:
            outcome.refused += 1
            continue
        wait_s, is_hit = answer
        outcome.waits_s.append(now_s - came_s + wait_s)
        outcome.hits += is_hit and now_s == came_s
        outcome.starts += is_start
    return outcome


def requests(load: Load) -> list[Step]:
    """Return the requests in the order in which they come."""
    chance = np.random.default_rng(_SEED)
    times = np.cumsum(chance.exponential(1 / load.rate_per_s, load.requests)).tolist()
    weights = 1 / np.arange(1, load.models + 1) ** load.skew
    numbers = chance.choice(load.models, load.requests, p=weights / weights.sum()).tolist()
    return [Step(came_s, at, came_s, number) for at, (came_s, number) in enumerate(zip(times, numbers, strict=True))]


def made_models(load: Load, start: Start) -> list[Model]:
    """Return models of all sizes. The size of a model says nothing about how often it is asked."""
    chance = np.random.default_rng(_SEED + 1)
    sizes = chance.lognormal(np.log(_MEDIAN_BYTES), _SPREAD, load.models)
    return [
        Model(Need(int(start.size_bytes + weights)), start.seconds + weights * start.seconds_a_byte)
        for weights in np.minimum(sizes, load.node_bytes / 4).tolist()
    ]


def measure_starts(report: Report, quick: bool) -> Start:
    """Start real models with few and with many weights again and again, and measure time and memory as the policy
    does.
    """
    sizes_mib = (1, 10 if quick else 200)
    found: dict[int, tuple[list[float], list[float]]] = {mib: ([], []) for mib in sizes_mib}
    with moonpool.Runtime(resident=Resident(models=1, memory=1 << 50)) as runtime:
        for mib in sizes_mib:
            runtime.load(f"m{mib}", MODELS / "weights.py", config=_config(mib))
        # Each one puts the other one to sleep.
        for _ in range(1 if quick else 10):
            for mib, (seconds, sizes) in found.items():
                runtime.infer(f"m{mib}", {"X": np.zeros(1, np.float32)}, timeout_s=_TIMEOUT_S)
                residence = runtime._models.find(f"m{mib}").residence
                if residence is None:
                    raise RuntimeError("the model has no place in memory")
                seconds.append(residence.start_s)
                sizes.append(residence.need.memory_bytes)
    for mib, (seconds, sizes) in found.items():
        what = f"a real model with {mib} MiB of weights"
        report.figure("start", "ms", [each * 1e3 for each in seconds], column=what, headline=True)
        report.figure("memory", "MiB", [each / _MIB for each in sizes], column=what, headline=True)
    (few_s, few), (many_s, _) = (
        (statistics.median(seconds), statistics.median(sizes)) for seconds, sizes in found.values()
    )
    return Start(few_s, few, max(0.0, many_s - few_s) / ((sizes_mib[1] - sizes_mib[0]) * _MIB))


def _config(mib: int) -> dict[str, Any]:
    return {
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "PID", "data_type": "TYPE_INT64", "dims": [1]}],
        "parameters": {"mib": option(mib)},
    }


def measure(report: Report, quick: bool) -> None:
    """Measure starts, and simulate each router; and the order of last use in place of SIEVE's with the first one."""
    logging.getLogger("moonpool").setLevel(logging.CRITICAL)
    load = _QUICK if quick else _WHOLE
    models = made_models(load, measure_starts(report, quick))
    for router in _ROUTERS:
        nodes = made_nodes(load, Sieve)
        _report(report, load, nodes, simulate(load, models, nodes, router), router)
    last_used = simulate(load, models, made_nodes(load, LastUsed), "any node")
    rate = [100 * last_used.hit_rate]
    report.figure("hit rate, by last use", "%", rate, column="any node", headline=True)
    total = sum(model.need.memory_bytes for model in models)
    report.note(
        f"{load.models:,} models of {total / (1 << 30):,.0f} GiB together, on {load.nodes} nodes with {load.node_bytes >> 30} GiB for models each; "
        f"{load.rate_per_s:,.0f} requests/s by Zipf {load.skew:g}, {load.execute_s * 1e3:g} ms each, one instance a model; {load.cores} starts at a time on a node."
    )


def _report(report: Report, load: Load, nodes: Sequence[Node], outcome: Outcome, router: str) -> None:
    waits_ms = sorted(each * 1e3 for each in outcome.waits_s)
    kept = [number for node in nodes for number in node.hosted]
    asked = [node.requests for node in nodes]
    half_s = load.requests / load.rate_per_s / 2
    used = sum(each.need.memory_bytes for node in nodes for each in node.hosted.values())
    for name, unit, value in (
        ("hit rate", "%", 100 * outcome.hit_rate),
        ("wait, p50", "ms", statistics.median(waits_ms)),
        ("wait, p99", "ms", waits_ms[int(0.99 * len(waits_ms))]),
        ("refused", "requests", outcome.refused),
        ("starts", "/s", outcome.starts / half_s),
        ("in memory", "models", len(set(kept))),
        ("copies of each of these", "", len(kept) / len(set(kept))),
        ("memory in use", "GiB", used / (1 << 30)),
        ("requests of the busiest node over the mean", "", max(asked) / statistics.mean(asked)),
    ):
        report.figure(name, unit, [value], column=router, headline=True)


if __name__ == "__main__":
    main("cluster", "What do the router and the policy of the nodes do to 10,000 models on 100 nodes?", measure)
