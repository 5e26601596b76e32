"""Tests of Python-based backends: one file serves every model whose configuration names its backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import ECHO, MODELS
from tests.runtime.cli.shell import CommandLine
from tests.runtime.recorder import Recorder

import moonpool

pytestmark = pytest.mark.promise(
    "Backends",
    "A Python-based backend is found, imported and given its models as in Triton. If it does "
    "not exist, the error names the places that were searched.",
)

SAYS_WHERE = """
import json
import sys

PATH, NAME = list(sys.path), __name__

import helper
import numpy as np
import shared
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "SAID", "data_type": "TYPE_STRING", "dims": [1]})
        return config

    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        said = {
            "path": PATH,
            "name": NAME,
            "file": __file__,
            "args": self.args,
            "dir": pb_utils.get_model_dir(),
            "helpers": [helper.WHO, shared.WHO],
        }
        text = np.array([json.dumps(said).encode()], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SAID", text)]) for _ in requests]
"""
X = {"X": np.ones(1, np.float32)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make a model repository and a directory of backends."""
    folder = tmp_path_factory.mktemp("folders")
    repository, backends = folder / "models", folder / "backends"
    for file, text in {
        "backends/speaker/model.py": SAYS_WHERE,
        "backends/speaker/other.py": SAYS_WHERE.replace('"SAID"', '"SAID_BY_OTHER"'),
        "backends/speaker/helper.py": "WHO = 'beside the backend'",
        "backends/python/shared.py": "WHO = 'for all'",
        # The user's own version replaces a backend that comes with moonpool.
        "backends/onnxruntime/model.py": SAYS_WHERE,
        "backends/onnxruntime/helper.py": "WHO = 'another'",
        "models/one/1/anything": "",
        "models/one/config.pbtxt": 'backend: "speaker"',
        "models/two/2/anything": "",
        "models/two/3/anything": "",
        "models/two/config.pbtxt": 'backend: "speaker" instance_group { count: 2 kind: KIND_CPU }',
        "models/other/1/anything": "",
        "models/other/config.pbtxt": 'backend: "speaker" runtime: "other.py"',
        "models/onnx/1/anything": "",
        "models/onnx/config.pbtxt": 'platform: "onnxruntime_onnx"',
        "models/unknown/1/anything": "",
        "models/unknown/config.pbtxt": 'backend: "nobody_s"',
    }.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return repository, backends


@pytest.fixture(scope="module")
def runtime(folders: tuple[Path, Path]) -> Iterator[moonpool.Runtime]:
    repository, backends = folders
    models = ["one", "two", "other", "onnx"]
    with moonpool.Runtime(repository, models=models, backend_directory=backends) as runtime:
        yield runtime


def said(runtime: moonpool.Runtime, model: str, output: str = "SAID") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(runtime.infer(model, X, timeout_s=60.0)[output][0])
    return found


def test_a_backend_s_file_serves_all_its_models(runtime: moonpool.Runtime, folders: tuple[Path, Path]) -> None:
    repository, backends = folders
    for model, version in (("one", "1"), ("two", "3")):
        found = said(runtime, model)
        args = found["args"]
        assert found["file"] == str(backends / "speaker" / "model.py")
        assert found["name"] == "model"
        assert found["dir"] == str(repository / model / version)
        assert args["model_name"] == model
        assert args["model_version"] == version
        assert args["model_repository"] == str(repository / model)
        assert args["model_instance_name"].startswith(model)
        config = json.loads(args["model_config"])
        # Triton writes them so, too.
        assert (config["backend"], config["runtime"]) == ("speaker", "model.py")
        assert config["default_model_filename"] == ""


def test_models_import_from_the_backend_and_from_the_python_backend_but_not_from_the_model(
    runtime: moonpool.Runtime, folders: tuple[Path, Path]
) -> None:
    repository, backends = folders
    found = said(runtime, "one")
    # The last one is for processes that the model starts.
    assert found["path"][-3:-1] == [str(backends / "speaker"), str(backends / "python")]
    assert not any(entry.startswith(str(repository)) for entry in found["path"])
    assert found["helpers"] == ["beside the backend", "for all"]


def test_each_instance_is_a_process_of_its_own_and_the_backend_has_its_own_name(runtime: moonpool.Runtime) -> None:
    pids = [one["pid"] for model in ("one", "two") for one in runtime.instances(model)]
    assert len(set(pids)) == 3
    assert runtime.config("two").backend == "speaker"
    assert runtime.statistics("two")["name"] == "two"


def test_the_configuration_may_name_another_file_of_the_backend(runtime: moonpool.Runtime) -> None:
    assert Path(said(runtime, "other", "SAID_BY_OTHER")["file"]).name == "other.py"


def test_a_backend_of_the_user_s_goes_before_one_that_is_built_in(runtime: moonpool.Runtime) -> None:
    assert said(runtime, "onnx")["helpers"] == ["another", "for all"]
    assert runtime.config("onnx").backend == "onnxruntime"


def test_a_backend_that_is_not_there_is_told_with_where_was_looked(
    runtime: moonpool.Runtime, folders: tuple[Path, Path]
) -> None:
    with pytest.raises(moonpool.LoadFailed) as caught:
        runtime.load("unknown")
    text = str(caught.value)
    assert text.startswith(
        "unable to find backend library for backend 'nobody_s', try specifying runtime on the model configuration."
    )
    assert str(folders[1] / "nobody_s" / "model.py") in text
    assert "there are: onnxruntime, python, pytorch, speaker.) Run such a model in a triton" in text
    assert text.endswith("(docs/TRITON_BACKEND.md).")


def test_commands_take_the_directory(folders: tuple[Path, Path], tmp_path: Path) -> None:
    repository, backends = folders
    ended = CommandLine(tmp_path)(
        "infer", repository, "one", "--backend-directory", backends, "--input", "X=[1]", "--json"
    )
    assert ended.returncode == 0, ended.stderr
    assert "beside the backend" in ended.stdout


@pytest.mark.promise(
    "Backends",
    "An absent backend directory is a warning; a model that needs it does not load, and its error names the directory.",
)
class TestADirectoryOfBackendsThatIsNotThere:
    def test_it_is_a_warning_where_no_model_needs_it(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with moonpool.Runtime(backend_directory=tmp_path / "none") as runtime:
            runtime.load("echo", MODELS / "echo.py", config=ECHO)
            said = runtime.infer("echo", {"X": np.ones(2, np.float32)}, timeout_s=60.0)

        assert said["OUT_X"].tolist() == [1.0, 1.0]
        (warning,) = [one for one in caplog.records if "backend directory" in one.getMessage()]
        assert warning.levelname == "WARNING"
        assert f"there is no backend directory {tmp_path}/none:" in warning.getMessage()

    def test_a_model_that_needs_it_says_so_and_loads_when_it_is_there(
        self, tmp_path: Path, folders: tuple[Path, Path]
    ) -> None:
        repository, backends = folders
        late = tmp_path / "late"
        with moonpool.Runtime(repository, models=[], backend_directory=late) as runtime:
            with pytest.raises(moonpool.LoadFailed) as caught:
                runtime.load("one")
            late.symlink_to(backends)
            runtime.load("one")

        text = str(caught.value)
        assert f"There is no {late}/speaker/model.py" in text
        absent = f"; there is no backend directory {late}; there are: onnxruntime, python, pytorch.)"
        assert absent in text

    def test_a_file_is_no_directory(self, tmp_path: Path, folders: tuple[Path, Path]) -> None:
        file = tmp_path / "file"
        file.touch()
        with (
            moonpool.Runtime(folders[0], models=[], backend_directory=file) as runtime,
            pytest.raises(moonpool.LoadFailed, match=f"; there is no backend directory {file};"),
        ):
            runtime.load("unknown")

    def test_a_command_says_so_of_a_model_that_needs_it(self, folders: tuple[Path, Path], tmp_path: Path) -> None:
        repository, _ = folders
        directory = tmp_path / "none"
        ended = CommandLine(tmp_path)("infer", repository, "one", "--backend-directory", directory, "--input", "X=[1]")

        assert ended.returncode != 0
        assert f"there is no backend directory {directory}" in ended.stderr


def test_a_backend_written_against_the_interface_goes_before_both(folders: tuple[Path, Path]) -> None:
    repository, backends = folders
    speaker = Recorder("speaker")
    config = {
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]}],
    }
    with moonpool.Runtime(repository, models=[], backends=[speaker], backend_directory=backends) as runtime:
        runtime.load("one", config=config)
        assert runtime.infer("one", X, timeout_s=60.0)["Y"].shape == (1,)
