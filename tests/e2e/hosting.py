"""Functions to load a model file for the length of a test, and to look at its processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

import moonpool

MODELS = Path(__file__).parent.parent / "models"

Config = dict[str, Any]


def tensor(name: str, datatype: str, *dims: int) -> Config:
    return {"name": name, "data_type": f"TYPE_{datatype}", "dims": list(dims)}


def options(**values: object) -> Config:
    """Make parameters of a configuration: `options(RETRY="yes")` sets `MOONPOOL_RETRY`."""
    parameters = {f"MOONPOOL_{key}": {"string_value": str(v)} for key, v in values.items()}
    return {"parameters": parameters}


ECHO: Config = {"input": [tensor("X", "FP32", -1)], "output": [tensor("OUT_X", "FP32", -1)]}


@contextlib.contextmanager
def hosted(
    runtime: moonpool.Runtime, name: str, source: Path, config: Mapping[str, Any], instances: int | None = None
) -> Iterator[None]:
    """Load a model, and unload it in the end."""
    runtime.load(name, source, config=config, instances=instances)
    try:
        yield
    finally:
        runtime.unload(name)


def open_to_all(*files: Path) -> None:
    """Make files that instances may write to: at `strict` under root, each instance is another user."""
    for file in files:
        file.touch()
        file.chmod(0o666)


def is_running(pid: int) -> bool:
    """Return True if a process exists and has not ended: an orphan may wait to be reaped for a while."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Check that two arrays have the same bits, NaN included, the same shape and the same dtype."""
    if a.dtype == object or b.dtype == object:
        return a.shape == b.shape and a.tolist() == b.tolist()
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
