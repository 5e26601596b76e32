"""Models in environments of other versions of Python, where neither moonpool nor msgpack is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import other_pythons
from tests.runtime.adders import CONFIG, rows, write_model
from tests.runtime.recorder import PATIENCE_S

from moonpool import Runtime

# These are the oldest supported version and new ones. `tests/e2e/test_interpreters.py` tries all between if it has
# environments of them.
VERSIONS = ("3.9", "3.13", "3.14")
NATIVE = """
import sys
from typing import Annotated, TypedDict

import numpy as np
from moonpool import Batch, Bytes, Float32, Int32, Outputs


class Doubler:
    max_batch_size = 8

    def __call__(self, X: Float32[Batch, :], NAME: Bytes[Batch]) -> Outputs(
        Y=Float32[Batch, :], NAME_OUT=Bytes[Batch], PYTHON=Int32[Batch, 1]
    ):
        assert "msgpack" not in sys.modules
        minor = np.full((len(X), 1), sys.version_info.minor, np.int32)
        return {"Y": X * 2, "NAME_OUT": NAME, "PYTHON": minor}
"""


def _interpreter(version: str) -> str | None:
    """Find a Python of this version, on the path or pyenv's."""
    candidates = [Path(folder) / f"python{version}" for folder in os.get_exec_path()]
    candidates += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in candidates:
        if os.access(path, os.X_OK) and "shims" not in path.parts:
            return str(path)
    return None


@pytest.fixture(scope="session", params=VERSIONS)
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a virtual environment with numpy and nothing else."""
    version: str = request.param
    made = other_pythons.of_version(version)
    if made is not None:
        return made
    python = _interpreter(version)
    if python is None or version == ".".join(map(str, sys.version_info[:2])):
        pytest.skip(f"there is no other Python {version}")
    folder: Path = tmp_path_factory.mktemp("environments") / version
    # The newest pip refuses Pythons before 3.10, so those use the pip that they came with.
    has_pip = version == "3.9"
    without = [] if has_pip else ["--without-pip"]
    subprocess.run([python, "-m", "venv", *without, str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    if not has_pip:
        pip = [sys.executable, "-m", "pip", "--python", str(folder)]
    command = [*pip, "install", "-q", "--disable-pip-version-check", "numpy"]
    installed = subprocess.run(["timeout", "100", *command], capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"numpy cannot be installed for Python {version}: {installed.stderr[-200:]}")
    return folder


def within(environment: Path) -> dict[str, Any]:
    return {"parameters": {"EXECUTION_ENV_PATH": {"string_value": str(environment)}}}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_models_of_both_kinds_run_under_another_python(environment: Path, tmp_path: Path) -> None:
    file = tmp_path / "doubler.py"
    file.write_text(NATIVE)
    write_model(tmp_path, "add", 1, config=CONFIG)
    policy = {"preferred_batch_size": [5], "max_queue_delay_microseconds": 60_000_000}
    with Runtime(tmp_path, models=[]) as runtime:
        runtime.load("add", config=within(environment))
        runtime.load("doubler", file, config={**within(environment), "dynamic_batching": policy})
        for name in runtime.models():
            pid = runtime.instances(name)[0]["pid"]
            assert os.readlink(f"/proc/{pid}/exe") == os.path.realpath(environment / "bin/python")
        for i in range(20):
            assert runtime.infer("add", rows(i, 2))["SUM"].tolist() == [[i + 1, 3]]
        batch = [(np.full((n, 3), n, np.float32), [[f"é{n}"]] * n) for n in (2, 3)]
        futures = [runtime.submit("doubler", {"X": x, "NAME": texts}) for x, texts in batch]
        minor = int(environment.name.split(".")[1])
        for (x, texts), future in zip(batch, futures, strict=True):
            outputs = future.result(PATIENCE_S).outputs
            assert outputs["Y"].tolist() == (x * 2).tolist()
            assert outputs["NAME_OUT"].tolist() == [[text.encode()] for (text,) in texts]
            assert outputs["PYTHON"].tolist() == [[minor]] * len(x)
        large = {key: np.ones((8, 1 << 16), np.float32) for key in "AB"}
        assert runtime.infer("add", large)["SUM"].sum() == 16 << 16
