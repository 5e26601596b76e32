"""The example program asks models of the stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.hub import tiny
from tests.hub.stand_in import Hub

PROGRAM = Path(__file__).parents[2] / "examples" / "hub_model.py"
pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed: bash .ci/run hub"),
    pytest.mark.skipif(not PROGRAM.is_file(), reason="only the tests are here, not the examples"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("task", ["chat", "embeddings", "labels"])
def test_hub_model_answers(hub: Hub, tmp_path: Path, task: str) -> None:
    models = {"chat": tiny.llama, "embeddings": lambda: tiny.bert("BertModel"), "labels": tiny.classifier}
    hub.put("o/m", models[task]())
    command = [sys.executable, str(PROGRAM), "hf://o/m", "the cat is good"]
    own = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=600)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), done.stderr
    if task == "labels":
        assert "so-so" in done.stdout
