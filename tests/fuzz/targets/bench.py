"""Files with the data of requests for the load generator."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from moonpool.benchmarks.data import BadData, read_capture, read_mix
from moonpool.benchmarks.loads import BadLoad
from moonpool.runtime.model.config.model import TensorConfig

_INPUTS = (TensorConfig("X", "FP32", (-1, 2)), TensorConfig("TEXT", "BYTES", (-1,)))


def input_data(data: bytes) -> None:
    """Read a file in perf_analyzer's form, for a model of one input and for one of two."""
    for inputs in (_INPUTS[:1], _INPUTS):
        _read("data.json", data, partial(_mix, inputs=inputs))


def npz(data: bytes) -> None:
    """Read a file of numpy with an array for each input."""
    _read("data.npz", data, partial(_mix, inputs=_INPUTS))


def replay(data: bytes) -> None:
    """Read requests that a server has captured."""
    _read("capture", data, lambda path: read_capture(path, "m", 2.0))


def _mix(path: Path, inputs: tuple[TensorConfig, ...]) -> None:
    mix = read_mix([str(path)], inputs, {}, is_batched=True)
    for request in mix.requests:
        request.arrays()


def _read(name: str, data: bytes, read: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory(prefix="moonpool-fuzz-") as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        try:
            read(path)
        except (BadData, BadLoad) as error:
            str(error)
