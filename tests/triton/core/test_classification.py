"""Classes of outputs with labels, of models and of ensembles, over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.running import running
from tests.triton.core.conftest import Core
from tests.triton.triton_side import posted

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]

CODE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(each, "X").as_numpy() for each in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", each)]) for each in given]
"""
MODEL = """
backend: "python" max_batch_size: BATCH instance_group [{ kind: KIND_CPU }]
input [{ name: "X" data_type: TYPE_FP32 dims: [3] }] output [{ name: "Y" data_type: TYPE_FP32 dims: [3] LABELS }]
"""
ENSEMBLE = """
platform: "ensemble" max_batch_size: BATCH
input [{ name: "X" data_type: TYPE_FP32 dims: [3] }] output [{ name: "Y" data_type: TYPE_FP32 dims: [3] LABELS }]
ensemble_scheduling { step [{
  model_name: "MEMBER" model_version: -1
  input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }
}] }
"""
# Name, the model of its only step or none, its labels, and its largest batch.
MODELS = [
    ("labelled", "", "cat dog fox", 4),
    ("unlabelled", "", "", 4),
    ("few_labels", "", "cat", 4),
    ("single", "", "cat dog fox", 0),
    ("ensemble_own", "unlabelled", "one two three", 4),
    ("ensemble_member", "labelled", "", 4),
    ("ensemble_both", "labelled", "one two three", 4),
    ("ensemble_none", "unlabelled", "", 4),
    ("ensemble_nested", "ensemble_member", "", 4),
    ("ensemble_single", "single", "", 0),
]


def body(name: str, rows: list[list[float]], count: int) -> dict[str, Any]:
    batches = not name.endswith("single")
    shape, data = ([len(rows), 3], [each for row in rows for each in row]) if batches else ([3], rows[0])
    return {
        "inputs": [{"name": "X", "datatype": "FP32", "shape": shape, "data": data}],
        "outputs": [{"name": "Y", "parameters": {"classification": count}}],
    }


@pytest.mark.promise(
    "Fidelity", "The classes of an output have the same labels as in a real Triton, of ensembles, too."
)
def test_classes_have_the_same_labels(core: Core) -> None:
    for name, member, labels, batch in MODELS:
        config = (ENSEMBLE if member else MODEL).replace("MEMBER", member)
        named = 'label_filename: "labels.txt"' if labels else ""
        config = config.replace("BATCH", str(batch)).replace("LABELS", named)
        core.write(name, config, CODE)
        (core.repository / name / "labels.txt").write_text("\n".join(labels.split()))
    names = [each[0] for each in MODELS]
    members = [name for name, member, _, _ in MODELS if not member]
    flags = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in names)]
    try:
        assert set(core.triton.load_all(members).values()) == {None}
        assert {core.triton.load(name) for name in names if name not in members} == {None}
        with running(core.repository, *flags) as server:
            for name in names:
                for rows in ([[0.1, 0.7, 0.2]], [[0.1, 0.7, 0.2], [3.0, 1.0, 2.0]]):
                    for count in (0, 1, 2, 5):
                        path, asked = f"/v2/models/{name}/infer", body(name, rows, count)
                        theirs = core.triton.post(path, asked)["outputs"]
                        ours = posted(server.ports["http"], path, asked)["outputs"]
                        assert ours == theirs, (name, rows, count)
    finally:
        for name in reversed(names):
            core.triton.unload(name)
