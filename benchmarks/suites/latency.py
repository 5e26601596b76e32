"""Latency of one caller that has four floats added in a stub, against the bare ping-pong."""

from __future__ import annotations

import numpy as np

import moonpool
from moonpool.benchmarks.suites.hosted import MODELS, pids
from moonpool.benchmarks.suites.placement import placed, placements
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import calls_in_turns
from moonpool.runtime.cli.demo import PingPong


def measure(report: Report, quick: bool) -> None:
    """Time `infer` and ping-pong in turns, with every placement of the two sides."""
    rounds, calls = (1, 20) if quick else (40, 400)
    a, b = np.ones((1, 4), np.float32), np.full((1, 4), 2, np.float32)
    with moonpool.Runtime() as runtime, PingPong() as peer:
        runtime.load("add_sub", MODELS / "add_sub")

        def infer() -> None:
            runtime.infer("add_sub", {"INPUT0": a, "INPUT1": b})

        for placement in placements():
            with placed(placement, [peer.pid, *pids(runtime, "add_sub")]):
                series = calls_in_turns({"floor": peer, "infer": infer}, rounds, calls)
            where = placement.name
            floor, ours = series["floor"], series["infer"]
            report.figure("ping-pong", "µs", floor.values, column=where, headline=True)
            name = "infer, add_sub of 4 floats"
            report.figure(name, "µs", ours.values, column=where, headline=True)
            goal = "≤ 2" if placement.cores is None else ""
            ratio = ours.over(floor)
            report.ratio("infer over ping-pong", ratio, column=where, goal=goal, headline=True)
            report.figure("infer less ping-pong", "µs", ours.minus(floor), column=where)


if __name__ == "__main__":
    main("latency", "How long does one caller wait for a call that does next to nothing?", measure)
