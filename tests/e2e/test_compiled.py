"""Stubs serve by compiled code, or without, as the operator says."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import Config, hosted, options, tensor
from tests.other_pythons import WHY_NONE, made
from tests.stub.sandbox.children import NOBODY

import moonpool
from moonpool.runtime.model.config.model import ConfigError
from moonpool.stub.sandbox.granted import closed_above

# Answers whether its process has loaded the compiled port, or anything of moonpool's that is compiled.
MODEL = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        compiled = {name for name in sys.modules if name.startswith("moonpool") and "._" in name}
        assert not compiled or "moonpool.stub.peers._stub_port" in compiled
        is_compiled = np.array([bool(compiled)])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", is_compiled)]) for _ in requests]
"""
CONFIG: Config = {"input": [tensor("X", "FP32", 1)], "output": [tensor("Y", "BOOL", 1)]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "model.py"
    made.write_text(MODEL)
    return made


@pytest.mark.promise(
    "Containment",
    "With `MOONPOOL_PURE=contained`, Python alone decodes what contained models say, and their processes have no "
    "compiled code of moonpool; with `MOONPOOL_PURE=1`, no compiled extension is used.",
)
@pytest.mark.parametrize(
    ("pure", "level", "expected"),
    [
        ("", "standard", True),
        ("0", "strict", True),
        ("contained", "standard", True),
        ("contained", "strict", False),
        ("1", "standard", False),
        ("1", "strict", False),
    ],
)
def test_the_operator_chooses_the_form(
    runtime: moonpool.Runtime, file: Path, monkeypatch: pytest.MonkeyPatch, pure: str, level: str, expected: bool
) -> None:
    if expected:
        pytest.importorskip("moonpool.stub.peers._stub_port")
    monkeypatch.setenv("MOONPOOL_PURE", pure)
    with hosted(runtime, "m", file, {**CONFIG, **options(SANDBOX=level)}):
        for _ in range(3):
            found = runtime.infer("m", {"X": np.zeros(1, np.float32)})["Y"]
            assert found.tolist() == [expected]


# Those that have the compiled forms.
ENVIRONMENTS = [path for path in made() if int(path.name.split(".")[1]) >= 11]


@pytest.mark.skipif(not ENVIRONMENTS, reason=WHY_NONE)
@pytest.mark.parametrize("level", ["standard", "strict"])
@pytest.mark.parametrize("path", ENVIRONMENTS, ids=lambda path: path.name)
def test_a_stub_of_another_python_loads_compiled_code(
    runtime: moonpool.Runtime, file: Path, path: Path, level: str
) -> None:
    pytest.importorskip("moonpool.stub.peers._stub_port")
    if level == "strict" and closed_above(os.path.realpath(path / "bin/python"), NOBODY):
        pytest.skip(f"{path.name} is closed to the users of instances")
    config = {**CONFIG, **options(SANDBOX=level)}
    config["parameters"]["EXECUTION_ENV_PATH"] = {"string_value": str(path)}
    with hosted(runtime, "m", file, config):
        assert runtime.infer("m", {"X": np.zeros(1, np.float32)})["Y"].tolist() == [True]


@pytest.mark.parametrize("level", ["standard", "strict"])
@pytest.mark.parametrize(
    ("name", "value"), [("MOONPOOL_PURE", "yes"), ("MOONPOOL_LOOK_US", "-1"), ("MOONPOOL_LOOK_US", "1001")]
)
def test_a_variable_with_a_wrong_value_is_refused(
    runtime: moonpool.Runtime, file: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, level: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"{name}: must be .* not '{value}'"):
        runtime.load("m", file, config={**CONFIG, **options(SANDBOX=level)})
