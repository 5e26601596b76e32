"""`--model-config-name`: which configuration a model has."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.server.running import running
from tests.triton.triton_side import asked

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]

CODE = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""
CONFIG = """
backend: "python" max_batch_size: SIZE instance_group [{ kind: KIND_CPU }]
input [{ name: "X" data_type: TYPE_FP32 dims: [1] }] output [{ name: "Y" data_type: TYPE_FP32 dims: [1] }]
"""
# The maximal batch sizes in files of a model. A size of 0 stands for a file that cannot be read.
MODELS: dict[str, dict[str, int]] = {
    "both": {"config.pbtxt": 2, "configs/mine.pbtxt": 3, "configs/other.pbtxt": 4},
    "usual": {"config.pbtxt": 2, "configs/other.pbtxt": 4},
    "only_named": {"configs/mine.pbtxt": 3},
    "usual_is_bad": {"config.pbtxt": 0, "configs/mine.pbtxt": 3},
    "named_is_bad": {"config.pbtxt": 2, "configs/mine.pbtxt": 0},
}


@pytest.mark.promise("Fidelity", "`--model-config-name` chooses the same file as in a real Triton.")
def test_the_same_file_is_the_configuration(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for name, files in MODELS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(CODE)
        for file, size in files.items():
            (repository / name / file).parent.mkdir(exist_ok=True)
            text = CONFIG.replace("SIZE", str(size)) if size else "nonsense"
            (repository / name / file).write_text(text)
    options = ["--model-config-name=mine"]
    (tmp_path / "server").mkdir()
    with asked(repository, tmp_path / "server", options) as triton:
        theirs = {
            name: None if failure else triton.config(name)["max_batch_size"]
            for name, failure in triton.load_all(list(MODELS)).items()
        }
    ours = {}
    with running(repository, *options, "--model-control-mode=explicit") as server:
        for name in MODELS:
            status, _ = server.get(f"/v2/repository/models/{name}/load", "POST", b"{}")
            _, config = server.get(f"/v2/models/{name}/config")
            ours[name] = config["max_batch_size"] if status == 200 else None
    assert ours == theirs
    assert ours == {"both": 3, "usual": 2, "only_named": 3, "usual_is_bad": 3, "named_is_bad": None}
