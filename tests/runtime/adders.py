"""A model that adds, for the repositories of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool import Runtime

MODEL = """
import json

import numpy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])

    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, n).as_numpy() for n in "AB")
            outputs = [
                pb_utils.Tensor("SUM", a + b),
                pb_utils.Tensor("VERSION", numpy.full((len(a), 1), self.version, numpy.int32)),
                pb_utils.Tensor("TOGETHER", numpy.full((len(a), 1), len(requests), numpy.int32)),
            ]
            parameters = json.loads(request.parameters())
            wanted = request.requested_output_names()
            responses.append(
                pb_utils.InferenceResponse(
                    [output for output in outputs if output.name() in wanted],
                    parameters={"id": request.request_id(), **parameters},
                )
            )
        return responses
"""
CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: [ -1 ] },
        { name: "B" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "SUM" data_type: TYPE_FP32 dims: [ -1 ] },
         { name: "VERSION" data_type: TYPE_INT32 dims: [ 1 ] },
         { name: "TOGETHER" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""


def write_model(repository: Path, name: str, *versions: int, config: str = CONFIG) -> Path:
    folder = repository / name
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    for version in versions:
        (folder / str(version)).mkdir()
        (folder / str(version) / "model.py").write_text(MODEL)
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    one = "instance_group [ { kind: KIND_CPU count: 1 } ]"
    write_model(folder, "add", 1, config=f"{CONFIG} dynamic_batching {{}} {one}")
    write_model(folder, "versions", 1, 2, 10, config=f"{CONFIG} version_policy {{ all {{}} }} {one}")
    return folder


@pytest.fixture(scope="module")
def runtime(repository: Path) -> Iterator[Runtime]:
    with Runtime(repository) as runtime:
        yield runtime


def rows(*values: float) -> dict[str, Any]:
    """Make inputs: one row for A, and ones for B."""
    a = np.array([values], np.float32)
    return {"A": a, "B": np.ones_like(a)}
