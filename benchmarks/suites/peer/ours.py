"""moonpool, with the same `model.py` that Triton gets."""

from __future__ import annotations

import moonpool
from moonpool.benchmarks.suites.hosted import MODELS
from moonpool.benchmarks.suites.peer.peer import Floats, Peer, rate_of_threads


class Moonpool(Peer):
    """`infer` with ordinary arrays."""

    def __init__(self) -> None:
        self._runtime = moonpool.Runtime()
        self._runtime.load("add_sub", MODELS / "add_sub")

    def call(self, a: Floats, b: Floats) -> tuple[Floats, Floats]:
        outputs = self._runtime.infer("add_sub", {"INPUT0": a, "INPUT1": b})
        return outputs["OUTPUT0"], outputs["OUTPUT1"]

    def rate(self, callers: int, total: int) -> float:
        return rate_of_threads(self, callers, total)

    def close(self) -> None:
        self._runtime.close()


class MoonpoolInPlace(Moonpool):
    """`infer` with arrays in shared memory from `empty`, so that nothing is copied on the way in."""

    def inputs(self, elements: int) -> tuple[Floats, Floats]:
        a = self._runtime.empty("add_sub", "INPUT0", (1, elements))
        b = self._runtime.empty("add_sub", "INPUT1", (1, elements))
        a[:], b[:] = 1, 2
        return a, b
