"""A model through moonpool inside a Ray Serve replica, against Ray's own deployments; and deaths of a stub and of a
replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from moonpool.benchmarks.callers import measure_async
from moonpool.benchmarks.suites.hosted import MODELS
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import in_turns, time_us_async

_A, _B = np.ones((1, 4), np.float32), np.full((1, 4), 2, np.float32)
_INPUTS = {"INPUT0": _A, "INPUT1": _B}
_CALLERS = 16
_DEADLINE_S = 120.0
_EMPTY, _OWN, _MOONPOOL = "Ray's empty deployment", "Ray's deployment", "moonpool in a replica"


class Empty:
    """Returns what it gets."""

    async def infer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Answer one request."""
        return inputs


class AddSub:
    """The model `add_sub` as a deployment of Ray's, without moonpool."""

    async def infer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Answer one request."""
        a, b = inputs["INPUT0"], inputs["INPUT1"]
        return {"OUTPUT0": a + b, "OUTPUT1": a - b}


Ask = Callable[[], Awaitable[Any]]


class Bench:
    """Callers of three applications in one event loop."""

    def __init__(self, quick: bool) -> None:
        self._quick = quick
        self._loop = asyncio.new_event_loop()

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine to its end."""
        return self._loop.run_until_complete(coroutine)

    def close(self) -> None:
        """Close the loop."""
        self._loop.close()

    def latency_ms(self, ask: Ask) -> Sequence[float]:
        """Time calls one after another."""

        return [took_us / 1000 for took_us in self.run(time_us_async(ask, 20 if self._quick else 200))]

    def rate(self, ask: Ask) -> Sequence[float]:
        """Count the requests per second of callers at the same time."""
        return [self.run(measure_async(ask, _CALLERS, 0.1 if self._quick else 0.5)).requests_per_s]

    def until_answered_ms(self, ask: Ask, find: Callable[[], int]) -> Sequence[float]:
        """Kill a process, and return the time until a request is answered again."""
        from moonpool import MoonpoolError

        async def recover() -> float:
            pid = await asyncio.to_thread(find)
            before = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            while True:
                try:
                    await ask()
                except MoonpoolError:
                    if time.perf_counter() - before > _DEADLINE_S:
                        raise
                else:
                    return (time.perf_counter() - before) * 1e3

        return [self.run(recover())]


@contextlib.contextmanager
def _applications() -> Iterator[tuple[Ask, Ask, Ask, Any]]:
    """Start Ray, and yield callers of the three deployments, and Ray's handle of moonpool's."""
    import ray
    from ray import serve

    import moonpool.ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    # Ray's workers have the niceness 15 otherwise, so other programs of the machine would be measured, too.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        # No client comes over a port.
        serve.start(proxy_location="Disabled")
        handles = []
        for kind in (Empty, AddSub):
            options = {"max_ongoing_requests": 256, "ray_actor_options": {"num_cpus": 0.1}}
            deployment = serve.deployment(kind).options(**options)
            name = kind.__name__
            handles.append(serve.run(deployment.bind(), name=name, route_prefix=None))
        parameters = {"MOONPOOL_MAX_RESTARTS": "100000", "MOONPOOL_RESTART_BACKOFF_S": "0"}
        model = moonpool.ray.Options(num_cpus=0.1, options=parameters)
        app = moonpool.ray.application(MODELS, models={"add_sub": model})
        serve.run(app, name="moonpool", route_prefix=None)
        empty, own = handles
        mine = moonpool.ray.get("moonpool", "add_sub")
        yield (
            lambda: empty.infer.remote(_INPUTS),
            lambda: own.infer.remote(_INPUTS),
            lambda: mine.infer(_INPUTS, timeout_s=_DEADLINE_S),
            serve.get_deployment_handle("add_sub", "moonpool"),
        )
    finally:
        serve.shutdown()
        ray.shutdown()


def measure(report: Report, quick: bool) -> None:
    """Calls, rates and deaths, each in turns."""
    if importlib.util.find_spec("ray") is None:
        report.skipped("Ray Serve", "Ray is not installed here; `bash .ci/run ray` makes .venv-ray")
        return
    bench, rounds = Bench(quick), 1 if quick else 15
    with contextlib.closing(bench), _applications() as (empty, own, mine, target):
        ways = {_EMPTY: empty, _OWN: own, _MOONPOOL: mine}
        calls = in_turns({k: partial(bench.latency_ms, a) for k, a in ways.items()}, rounds)
        rates = in_turns({k: partial(bench.rate, a) for k, a in ways.items()}, rounds)

        def stub() -> int:
            found: int = target.processes.remote().result(timeout_s=_DEADLINE_S)["add_sub"][0]
            return found

        def replica() -> int:
            found: int = target.process.remote().result(timeout_s=_DEADLINE_S)
            return found

        deaths = in_turns(
            {
                "kill -9 of the stub": lambda: bench.until_answered_ms(mine, stub),
                "kill -9 of the replica": lambda: bench.until_answered_ms(mine, replica),
            },
            1 if quick else 5,
        )
    for name, series in calls.items():
        report.figure(f"one call, {name}", "ms", series.values)
    for name, series in rates.items():
        report.figure(f"{_CALLERS} callers, {name}", "1/s", series.values)
    over = calls[_MOONPOOL].over(calls[_EMPTY])
    report.ratio(f"one call, {_MOONPOOL} over {_EMPTY}", over, goal="≤ 1.1", headline=True)
    for other in (_EMPTY, _OWN):
        over = rates[_MOONPOOL].over(rates[other])
        report.ratio(f"{_CALLERS} callers, {_MOONPOOL} over {other}", over, headline=True)
    for name, series in deaths.items():
        goal = "≤ 300 ms" if "stub" in name else ""
        what = f"{name}, to the first answer"
        report.figure(what, "ms", series.values, goal=goal, headline=True)
    report.note("A handle in the driver asks one replica of each deployment on the same machine.")


if __name__ == "__main__":
    main("ray_serve", "What does moonpool inside a replica of Ray Serve cost and save?", measure)
