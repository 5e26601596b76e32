"""`moonpool bench` says if another instance would help, on a machine with room or without."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from tests.runtime.cli.shell import write_model

from moonpool.benchmarks import callers
from moonpool.runtime.cli.main import main
from moonpool.runtime.observe import another_instance
from moonpool.runtime.process.usage import Reading

pytestmark = pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "If another instance would help under a load, the report names the load and the line to "
    "write, on the screen and in the file.",
)

MODEL = """
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.02)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
ADVICE = "another instance would help: its instance spends its time waiting, as for I/O"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model that takes a while and no processor."""
    write_model(tmp_path / "models", "m", MODEL, CONFIG)
    return tmp_path / "models"


def bench(repository: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_idle: bool) -> int:
    """Measure with one caller and with six, on a machine of which every processor is idle, or none."""

    def reading() -> Reading:
        now_s = time.monotonic()
        idle_s = dict.fromkeys(os.sched_getaffinity(0), now_s if is_idle else 0.0)
        return Reading(now_s, idle_s, ())

    monkeypatch.setattr(callers, "reading", reading)
    # On a busy machine the runtime takes its time between two batches.
    monkeypatch.setattr(another_instance, "_EXECUTING", (0.3, 0.2))
    return main(
        [
            "bench", str(repository), "m", "--concurrency", "1,6", "--seconds", "0.3",
            "--windows", "3", "--save", str(folder),
        ]
    )  # fmt: skip


def test_it_is_said_of_the_load_under_which_requests_wait(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(repository, tmp_path, monkeypatch, is_idle=True) == 0

    lines = capsys.readouterr().out.splitlines()
    (said,) = [line for line in lines if ADVICE in line]
    assert said.startswith("with 6 callers another instance would help")
    assert "in config.pbtxt: instance_group [{ count: 2 kind: KIND_CPU }]" in lines
    alone, six = json.loads((tmp_path / "m.json").read_text())["series"]
    assert alone["advice"] is None
    assert six["advice"]["reason"] == "waiting"
    assert six["advice"]["line"] == "instance_group [{ count: 2 kind: KIND_CPU }]"


def test_nothing_is_said_where_no_core_is_free(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(repository, tmp_path, monkeypatch, is_idle=False) == 0

    assert "another instance" not in capsys.readouterr().out
    series = json.loads((tmp_path / "m.json").read_text())["series"]
    assert [point["advice"] for point in series] == [None, None]
