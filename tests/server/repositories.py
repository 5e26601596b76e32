"""Repositories for tests of servers: models that load quickly, and models that cannot be loaded."""

from __future__ import annotations

import os
from pathlib import Path

ECHO = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy())]
            )
            for r in requests
        ]
"""
CONFIG = """
backend: "python"
max_batch_size: 4
input [{ name: "IN" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [4] }]
instance_group [{ kind: KIND_CPU }]
"""
BAD = "raise ValueError('boom')\n"


def write(repository: Path, name: str, text: str = ECHO, config: str = CONFIG, *, version: int = 1) -> Path:
    """Write a model, or write it anew so that a poll sees a change, and return its file."""
    file = repository / name / str(version) / "model.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    before_ns = file.stat().st_mtime_ns if file.exists() else 0
    file.write_text(text)
    if before_ns:
        # Two writes in a moment may bear the same time.
        os.utime(file, ns=(before_ns + 1_000_000_000, before_ns + 1_000_000_000))
    (repository / name / "config.pbtxt").write_text(config)
    return file
