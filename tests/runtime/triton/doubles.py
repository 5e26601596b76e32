"""A model that doubles what it gets, as tritonserver describes it."""

from __future__ import annotations

from typing import Any

DOUBLES = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(r, "X").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", v * 2)]) for v in values]
"""


# tritonserver writes dims as texts.
def tensor(name: str) -> dict[str, Any]:
    return {"name": name, "data_type": "TYPE_FP32", "dims": ["-1"]}


CONFIG = {
    "platform": "",
    "backend": "python",
    "runtime": "",
    "max_batch_size": 0,
    "input": [tensor("X")],
    "output": [tensor("Y")],
    "instance_group": [{"name": "m_0", "kind": "KIND_CPU", "count": 1, "gpus": []}],
    "default_model_filename": "model.py",
    "parameters": {},
}


def with_options(**options: str) -> dict[str, Any]:
    parameters = {key: {"string_value": value} for key, value in options.items()}
    return {**CONFIG, "parameters": parameters}
