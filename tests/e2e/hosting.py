"""Loading a model file for the length of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import moonpool

MODELS = Path(__file__).parent.parent / "models"

Config = dict[str, Any]


def tensor(name: str, datatype: str, *dims: int) -> Config:
    return {"name": name, "data_type": f"TYPE_{datatype}", "dims": list(dims)}


def options(**values: object) -> Config:
    """Parameters of a configuration: `options(RETRY="yes")` sets `MOONPOOL_RETRY`."""
    parameters = {f"MOONPOOL_{key}": {"string_value": str(v)} for key, v in values.items()}
    return {"parameters": parameters}


ECHO: Config = {"input": [tensor("X", "FP32", -1)], "output": [tensor("OUT_X", "FP32", -1)]}


@contextlib.contextmanager
def hosted(
    runtime: moonpool.Runtime,
    name: str,
    source: Path,
    config: Mapping[str, Any],
    instances: int | None = None,
) -> Iterator[None]:
    """The model, loaded, and unloaded in the end."""
    runtime.load(name, source, config=config, instances=instances)
    try:
        yield
    finally:
        runtime.unload(name)
