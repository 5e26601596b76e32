"""The models that tests of the HTTP front end ask, and one server that has all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http
from numpy.typing import NDArray
from tests.server.http.serving import Serving

import moonpool

MODELS = Path(__file__).parents[2] / "models"
EXAMPLES = Path(__file__).parents[3] / "examples" / "models"


def tensor(name: str, datatype: str, *dims: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{datatype}", "dims": list(dims), **more}


ECHOED = ("STRING", "FP16", "BF16", "FP32", "FP64", "INT64", "UINT8", "BOOL")
ECHO = {
    "input": [tensor(kind, kind, -1, optional=True) for kind in ECHOED],
    "output": [tensor("OUT_" + kind, kind, -1) for kind in ECHOED],
}
PLAIN = {"input": [tensor("X", "UINT8", -1)], "output": [tensor("OUT_X", "UINT8", -1)]}
TEXT = {"input": [tensor("X", "STRING", 1)], "output": [tensor("OUT_X", "STRING", 1)]}
HOLDS = {"input": [tensor("X", "BOOL", 1)], "output": [tensor("Y", "INT32", 1)]}
NOT_FINITE = {"input": [tensor("X", "STRING", 1)], "output": [tensor("Y", "INT32", 1)]}
SPEAKS = {
    "input": [tensor("text_input", "STRING", 1), tensor("count", "INT32", 1, optional=True)],
    "output": [tensor("text_output", "STRING", -1), tensor("told", "STRING", 1)],
    "model_transaction_policy": {"decoupled": True},
}


SOURCES: dict[str, tuple[Path, dict[str, Any] | None]] = {
    "add_sub": (EXAMPLES / "add_sub", None),
    "echo": (MODELS / "passes.py", ECHO),
    "plain": (MODELS / "echo.py", PLAIN),
    "text": (MODELS / "echo.py", TEXT),
    "holds": (MODELS / "holds.py", HOLDS),
    "speaks": (MODELS / "speaks.py", SPEAKS),
    "not_finite": (MODELS / "not_finite.py", NOT_FINITE),
}


@contextlib.contextmanager
def served(*names: str, **options: Any) -> Iterator[Serving]:
    """Start a server with these models for one test."""
    with moonpool.Runtime() as runtime:
        for name in names:
            source, config = SOURCES[name]
            runtime.load(name, source, config=config)
        with Serving(runtime, **options) as made:
            yield made


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with served(*SOURCES) as made:
        warm_up(made)
        yield made


def warm_up(serving: Serving) -> None:
    """The loop watches every stub, and every region has its size, before the first test counts descriptors."""
    asked: dict[str, list[tuple[str, str, list[int], list[Any]]]] = {
        "add_sub": [("INPUT0", "FP32", [1, 4], [0] * 4), ("INPUT1", "FP32", [1, 4], [0] * 4)],
        "plain": [("X", "UINT8", [1], [0])],
        "text": [("X", "BYTES", [1], [""])],
        "holds": [("X", "BOOL", [1], [False])],
        "not_finite": [("X", "BYTES", [1], ["0.5"])],
    }
    for model, inputs in asked.items():
        given = [dict(zip(("name", "datatype", "shape", "data"), each, strict=True)) for each in inputs]
        reply = serving.post(f"/v2/models/{model}/infer", {"inputs": given})
        if reply.status != 200:
            raise RuntimeError(reply.error)
    # tritonclient would start this process with its first region, and leave it running.
    resource_tracker.ensure_running()
    for _ in range(3):
        triton_echo(serving, arrays_of(LARGE), None)


LARGE = 8_000


def arrays_of(count: int) -> dict[str, NDArray[Any]]:
    return {
        "STRING": np.array([b"a", b"\xff\0", b""] * (count // 3 + 1), object),
        "FP16": (np.arange(count) % 999).astype(np.float16),
        "INT64": np.arange(count, dtype=np.int64),
        "BF16": (np.arange(count) % 999).astype(ml_dtypes.bfloat16),
    }


def triton_echo(
    serving: Serving, arrays: Mapping[str, NDArray[Any]], compression: str | None
) -> dict[str, NDArray[Any]]:
    """Return the outputs of the model `echo` for these inputs, read by Triton's client."""
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{serving.port}")
    try:
        inputs = []
        for name, array in arrays.items():
            datatype = "BYTES" if name == "STRING" else name
            inputs.append(tritonclient.http.InferInput(name, list(array.shape), datatype))
            inputs[-1].set_data_from_numpy(array)
        result = client.infer(
            "echo",
            inputs,
            request_id="r",
            request_compression_algorithm=compression,
            response_compression_algorithm=compression,
        )
        return {name: result.as_numpy("OUT_" + name) for name in arrays}
    finally:
        client.close()
