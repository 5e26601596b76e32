"""The models of the benchmarks in a runtime."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import moonpool

MODELS = Path(__file__).resolve().parents[1] / "models"
DEADLINE_S = 60.0
# By default restarts pause longer and longer, and end after the sixth.
RESTARTS = {"MOONPOOL_MAX_RESTARTS": "100000", "MOONPOOL_RESTART_BACKOFF_S": "0"}


def pids(runtime: moonpool.Runtime, model: str) -> list[int]:
    """The process numbers of a model's stubs."""
    return [instance["pid"] for instance in runtime.instances(model)]


def folder_of(model: str) -> tuple[str, Path]:
    """The name and the folder of a model: `FOLDER`, or `NAME=FOLDER` for one that is served under another name."""
    name, _, folder = model.partition("=")
    return name, MODELS / (folder or name)


def folders_of(models: Sequence[str]) -> dict[str, Path]:
    """The folders of models by name, each named as `folder_of` says."""
    return dict(map(folder_of, models))


def option(value: object) -> dict[str, str]:
    """A parameter of a configuration."""
    return {"string_value": str(value)}


def first_answer_ms(runtime: moonpool.Runtime, model: str, ask: Callable[[], object]) -> list[float]:
    """Kill the only stub of a model; return the time until a caller that asks again and again is answered."""
    before = time.perf_counter()
    os.kill(pids(runtime, model)[0], signal.SIGKILL)
    while True:
        try:
            ask()
        except (moonpool.StubDied, moonpool.ModelUnavailable):
            if time.perf_counter() > before + DEADLINE_S:
                raise
        else:
            return [(time.perf_counter() - before) * 1000]
