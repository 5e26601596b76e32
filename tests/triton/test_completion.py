"""A model may change some parts of its configuration, and not others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.triton.both import Both

pytestmark = pytest.mark.triton

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "CONFIG", "data_type": "TYPE_STRING", "dims": [1]})
        raw = config.as_dict()
        CHANGE
        return config

    def initialize(self, args):
        self.config = np.array([args["model_config"].encode()], object)

    def execute(self, requests):
        rows = [pb_utils.get_input_tensor_by_name(request, "X").shape() for request in requests]
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("CONFIG", self.config.reshape([1] * len(shape)))]
            )
            for shape in rows
        ]
"""
CHANGES = {
    "what_is_not_its_own": (
        """raw.update(
            name="other",
            parameters={"a": {"string_value": "b"}},
            instance_group=[{"count": 2, "kind": "KIND_CPU"}],
            version_policy={"all": {}},
            default_model_filename="other.py",
            optimization={"priority": "PRIORITY_MAX"},
            response_cache={"enable": True},
        )""",
        "",
    ),
    "batches": ("config.set_max_batch_size(8); config.set_dynamic_batching()", ""),
    "another_batcher": (
        'raw["dynamic_batching"] = {"preferred_batch_size": [2]}',
        "max_batch_size: 8 dynamic_batching { preferred_batch_size: 4 }",
    ),
    "less": ('raw["max_batch_size"] = 2; raw["input"][0]["dims"] = [4]', "max_batch_size: 8"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_changes_the_same_of_its_configuration(both: Both, repository: Path, name: str) -> None:
    change, config = CHANGES[name]
    folder = repository / f"changes_{name}"
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "1" / "model.py").write_text(MODEL.replace("CHANGE", change))
    (folder / "config.pbtxt").write_text('backend: "python" ' + config)
    shape = (1, 4) if "batch" in change + config else (4,)
    inputs = {"X": np.zeros(shape, np.float32)}

    with both.hosted(folder.name):
        theirs, ours = (json.loads(_text(side.infer(folder.name, inputs))) for side in (both.triton, both.moonpool))

    assert ours == theirs


def _text(outcome: Any) -> str:
    (text,) = outcome.outputs["CONFIG"].data
    return str(text.decode() if isinstance(text, bytes) else text)
