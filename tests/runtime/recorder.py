"""A backend without processes that records its calls, and fails or waits where a test says so."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moonpool import Backend, Model, ModelInstance, Response
from moonpool.runtime.model.request import InferenceRequest, Outcome

# The time for which a test waits for another thread before it fails.
PATIENCE_S = 60.0

Call = tuple[str, str]
Execute = Callable[[ModelInstance, Sequence[InferenceRequest]], Any]


class Planned(Exception):
    """The error that the recorder raises where a test says so."""


def echo(_: ModelInstance, requests: Sequence[InferenceRequest]) -> list[Outcome]:
    """Answer every request with its first input."""
    return [Response({"Y": request.inputs[0].data.copy()}) for request in requests]


class Recorder(Backend):
    """A backend that records its calls; `calls` has (function, subject) for each, in order.

    A call that is in `failures` raises. `execute` says what an execution returns.
    """

    def __init__(
        self, name: str = "recorder", *, failures: Mapping[Call, BaseException] | None = None, execute: Execute = echo
    ) -> None:
        super().__init__(name)
        self.calls: list[Call] = []
        self.returned: list[Call] = []
        self.failures = dict(failures or {})
        self.execute = execute
        self.completed: dict[str, Any] = {}
        self._lock = threading.Lock()

    def _call(self, function: str, subject: str) -> None:
        with self._lock:
            self.calls.append((function, subject))
        failure = self.failures.get((function, subject))
        if failure is not None:
            raise failure
        with self._lock:
            self.returned.append((function, subject))

    def initialize(self) -> None:
        self._call("initialize", self.name)

    def finalize(self) -> None:
        self._call("finalize", self.name)

    def model_initialize(self, model: Model) -> None:
        self._call("model_initialize", _version(model))

    def model_finalize(self, model: Model) -> None:
        self._call("model_finalize", _version(model))

    def model_instance_initialize(self, instance: ModelInstance) -> None:
        self._call("model_instance_initialize", _numbered(instance))

    def model_instance_finalize(self, instance: ModelInstance) -> None:
        self._call("model_instance_finalize", _numbered(instance))

    def model_instance_execute(self, instance: ModelInstance, requests: Sequence[InferenceRequest]) -> Any:
        self._call("model_instance_execute", _numbered(instance))
        return self.execute(instance, requests)

    def without_executes(self) -> list[Call]:
        return [call for call in self.calls if call[0] != "model_instance_execute"]

    def check_pairs(self) -> None:
        """Check that every initialize that returned has its finalize, and nothing else has one."""
        began = Counter(
            (function.replace("initialize", "finalize"), subject)
            for function, subject in self.returned
            if function.endswith("initialize")
        )
        ended = Counter(call for call in self.calls if call[0].endswith("finalize"))
        assert ended == began


def _version(model: Model) -> str:
    return f"{model.name}:{model.version}"


def _numbered(instance: ModelInstance) -> str:
    return f"{_version(instance.model)} {instance.name}"


def tensor(name: str, datatype: str, *dims: int) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{datatype}", "dims": list(dims)}


def config(*, max_batch_size: int = 0, backend: str = "recorder", **more: Any) -> dict[str, Any]:
    """Make a configuration with one FP32 input X and one output Y of any size."""
    return {
        "backend": backend,
        "max_batch_size": max_batch_size,
        "input": [tensor("X", "FP32", -1)],
        "output": [tensor("Y", "FP32", -1)],
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        **more,
    }


def counted(count: int) -> dict[str, Any]:
    """Make the part of `config` for so many instances, called m_0_0, m_0_1, ..."""
    return {"instance_group": [{"kind": "KIND_CPU", "count": count}]}


def x(*values: float) -> dict[str, np.ndarray[Any, Any]]:
    """Make inputs for a model that does not batch."""
    return {"X": np.array(values, np.float32)}


def row(*values: float) -> dict[str, np.ndarray[Any, Any]]:
    """Make inputs of one row for a model that batches."""
    return {"X": np.array([values], np.float32)}


def model_directory(folder: Path, *versions: int) -> Path:
    """Write a model whose files only a real backend would run."""
    for version in versions or (1,):
        (folder / str(version)).mkdir(parents=True)
        (folder / str(version) / "model.py").write_text("class TritonPythonModel: ...\n")
    return folder
