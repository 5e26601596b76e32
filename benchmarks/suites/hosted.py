"""The models of the benchmarks in a runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import moonpool

MODELS = Path(__file__).resolve().parents[1] / "models"


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
