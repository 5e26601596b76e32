"""A client that sends sequences to a model "m", for tests of sequences and of their states."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.e2e.hosting import tensor
from tests.inside import hosted_in
from tests.waiting import wait_until

import moonpool
from moonpool import ResponseStream

START, END = 1, 2
PATIENCE_S = 60.0
HOUR_US = 3_600_000_000

Told = dict[str, Any]
Serve = Callable[..., Any]


def sequence_config(max_batch_size: int, **batching: Any) -> dict[str, Any]:
    batching.setdefault("max_sequence_idle_microseconds", HOUR_US)
    return {
        "max_batch_size": max_batch_size,
        "input": [tensor("X", "FP32", 1)],
        "output": [tensor("Y", "STRING", 1)],
        "sequence_batching": batching,
    }


class SequenceClient:
    """Sends requests of sequences."""

    def __init__(self, runtime: moonpool.Runtime, folder: Path, max_batch_size: int = 4) -> None:
        self.runtime = runtime
        self.gate = folder / "gate"
        self._shape = (1, 1) if max_batch_size else (1,)

    @property
    def scheduler(self) -> Any:
        return hosted_in(self.runtime, "m").scheduler

    def begin(
        self, which: int | str, x: float, flags: int, *, held: bool, request_id: str = "", **parameters: Any
    ) -> ResponseStream:
        """Send a request, and return before its answer. `held` keeps the instance until the gate is there."""
        stream = self.runtime.stream(
            "m",
            {"X": np.full(self._shape, x, np.float32)},
            timeout_s=PATIENCE_S,
            request_id=request_id,
            correlation_id=which,
            flags=flags,
            parameters={**parameters, **({"gate": str(self.gate)} if held else {})},
        )
        if held:
            wait_until(lambda: self.scheduler.executing, PATIENCE_S, "the request to be executed")
        return stream

    def open(self) -> None:
        self.gate.touch()


def told(stream: ResponseStream) -> Told:
    (response,) = stream
    assert set(response.outputs) == {"Y"}
    found: Told = json.loads(response.outputs["Y"].flat[0])
    return found
