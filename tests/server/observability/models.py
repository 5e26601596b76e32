"""A repository with models to watch: one that doubles, one that calls it, one with many responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TENSORS = """
input [{ name: "IN", data_type: TYPE_FP32, dims: [4] }]
output [{ name: "OUT", data_type: TYPE_FP32, dims: [4] }]
"""
_MODELS = {
    "doubles": (
        f"max_batch_size: 8 {_TENSORS}",
        """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if (values == 13).any():
                raise ValueError("no thirteen")
            if (values == 99).any():
                os.kill(os.getpid(), signal.SIGKILL)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values * 2)]))
        return responses
""",
    ),
    "asks": (
        f"max_batch_size: 8 {_TENSORS}",
        """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            hands_on = {"trace": request.trace()} if request.request_id() != "alone" else {}
            asked = pb_utils.InferenceRequest(
                model_name="doubles",
                requested_output_names=["OUT"],
                inputs=[pb_utils.get_input_tensor_by_name(request, "IN")],
                **hands_on,
            )
            responses.append(pb_utils.InferenceResponse(asked.exec().output_tensors()))
        return responses
""",
    ),
    "counts": (
        f"model_transaction_policy {{ decoupled: true }} {_TENSORS}",
        """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            sender = request.get_response_sender()
            for number in range(int(values[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values + number)]))
            if values[1]:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("not this one")))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
    ),
}
_IMPORTS = "import os\nimport signal\n\nimport triton_python_backend_utils as pb_utils\n"


def trace_entries(file: Path) -> list[dict[str, Any]]:
    """Return the contents of a file of traces; nothing while it is being written."""
    try:
        found: list[dict[str, Any]] = json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    return found


def write(folder: Path, *names: str) -> Path:
    """Write the repository with these models, by default all."""
    for name in names or _MODELS:
        config, source = _MODELS[name]
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(f'backend: "python"\n{config}')
        (folder / name / "1" / "model.py").write_text(_IMPORTS + source)
    return folder
