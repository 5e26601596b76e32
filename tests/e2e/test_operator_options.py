"""Tests of options that a program sets for the models that it hosts: they get nothing beyond them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.inside import hosted_in

import moonpool

OPENS = """
import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.parameters = json.loads(args["model_config"])["parameters"]

    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(r, "PATH")) for r in requests]

    def answer(self, path):
        try:
            with open(path.as_numpy()[0].decode()) as file:
                said = file.read()
        except OSError:
            said = "refused"
        color = self.parameters.get("color", {}).get("string_value", "")
        said = np.array([said.encode(), color.encode()], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", said)])
"""
LOADS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            name = pb_utils.get_input_tensor_by_name(request, "PATH").as_numpy()[0].decode()
            pb_utils.load_model(name)
        said = pb_utils.Tensor("SAID", pb_utils.get_input_tensor_by_name(request, "PATH").as_numpy())
        return [pb_utils.InferenceResponse([said])]
"""
CONFIG = """
backend: "python"
input [{ name: "PATH" data_type: TYPE_STRING dims: [1] }]
output [{ name: "SAID" data_type: TYPE_STRING dims: [-1] }]
instance_group [{ kind: KIND_CPU }]
"""


def write(repository: Path, name: str, text: str = OPENS, **parameters: str) -> Path:
    folder = repository / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "1" / "model.py").write_text(text)
    said = "".join(
        f"parameters {{ key: {json.dumps(key)} value: {{ string_value: {json.dumps(value)} }} }}\n"
        for key, value in parameters.items()
    )
    (folder / "config.pbtxt").write_text(CONFIG + said)
    return folder


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data"
    file.write_text("data")
    file.chmod(0o644)
    return file


def asked(runtime: moonpool.Runtime, model: str, path: object) -> list[str]:
    said = runtime.infer(model, {"PATH": np.array([str(path).encode()], np.object_)})["SAID"]
    return [text.decode() for text in said]


@pytest.mark.promise("The sandbox: grants", "Where the operator …")
@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "Options that the operator sets of a model go before what its configuration says, option by "
    "option, and so do parameters and plain values in a program's `load`.",
)
def test_a_stranger_s_model_has_what_the_program_says_and_not_what_it_asks_for(models: Path, data: Path) -> None:
    greedy = write(models, "greedy", MOONPOOL_SANDBOX_PATHS="/")
    plain = write(models, "plain", MOONPOOL_SANDBOX="off", color="red", shape="round")
    with moonpool.Runtime(sandbox="strict") as runtime:
        with pytest.raises(moonpool.ConfigError, match=r'Runtime\(sandbox_grants=\["greedy:MOON'):
            runtime.load("greedy", greedy)
        runtime.load("plain", plain)
        assert asked(runtime, "plain", data) == ["refused", "red"]

        options: Mapping[str, str | float] = {"MOONPOOL_SANDBOX_PATHS": str(data), "MOONPOOL_OPEN_FILES": 64}
        runtime.load("plain", plain, options=options, parameters={"color": "blue"})
        assert asked(runtime, "plain", data) == ["data", "blue"]
        assert runtime.config("plain").parameters == {
            "MOONPOOL_SANDBOX": "off",
            "color": "blue",
            "shape": "round",
            "MOONPOOL_SANDBOX_PATHS": str(data),
            "MOONPOOL_OPEN_FILES": "64",
        }
        # It replaces what the model asks for.
        runtime.load("greedy", greedy, options=options)
        assert asked(runtime, "greedy", data) == ["data", ""]
        assert asked(runtime, "greedy", "/etc/passwd") == ["refused", ""]


def test_a_level_that_a_load_sets_is_set_also_where_nothing_else_has_changed(models: Path, data: Path) -> None:
    folder = write(models, "m")
    with moonpool.Runtime() as runtime:
        for level, said in (("standard", "data"), ("strict", "refused")):
            runtime.load("m", folder, sandbox=level)
            assert asked(runtime, "m", data) == [said, ""]
        write(models, "m", MOONPOOL_SANDBOX_PORTS="443")
        with pytest.raises(moonpool.ConfigError, match="MOONPOOL_SANDBOX_PORTS"):
            runtime.load("m", folder)


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "Options that the operator set stay in effect when the model is loaded again, by a poll, a "
    "client, a model or the program, also after an unload.",
)
def test_the_options_of_a_load_hold_for_later_loads_by_anybody(models: Path, data: Path) -> None:
    write(models, "m")
    write(models, "loads", LOADS)
    with moonpool.Runtime(models, models=["loads"]) as runtime:
        runtime.load("m", sandbox="strict", parameters={"color": "blue"})
        for number, who in enumerate(("program", "model", "model after an unload")):
            write(models, "m", f"{OPENS}\n# version {number}\n")
            if who == "program":
                runtime.load("m")
            elif who == "model":
                asked(runtime, "loads", "m")
            else:
                runtime.unload("m")
                asked(runtime, "loads", "m")
            assert asked(runtime, "m", data) == ["refused", "blue"]
        runtime.load("m", sandbox="standard")
        assert asked(runtime, "m", data) == ["data", ""]


@pytest.mark.promise("The server (`moonpool serve`)", "Options that the operator set stay …")
def test_the_options_of_a_load_hold_even_if_it_failed(models: Path, data: Path) -> None:
    """Check that a later load does not run the model with less protection than the program wanted."""
    write(models, "m")
    with moonpool.Runtime(models, models=[]) as runtime:
        with pytest.raises(moonpool.LoadFailed, match="which is not there"):
            runtime.load("m", sandbox="strict", options={"MOONPOOL_SANDBOX_PATHS": f"{data}/none"})
        with pytest.raises(moonpool.LoadFailed, match="which is not there"):
            runtime.load("m")
        runtime.load("m", options={})
        assert asked(runtime, "m", data) == ["data", ""]


@pytest.mark.promise("The server (`moonpool serve`)", "Options that the operator sets of …")
def test_options_by_name_are_there_for_what_a_runtime_loads_itself(models: Path, data: Path) -> None:
    write(models, "one")
    write(models, "two")
    said = {
        "*": {"MOONPOOL_SANDBOX": "strict"},
        "one": {"MOONPOOL_SANDBOX_PATHS": str(data), "MOONPOOL_MEMORY_LIMIT_BYTES": "1G"},
    }
    with moonpool.Runtime(models, model_options=said) as runtime:
        assert asked(runtime, "one", data) == ["data", ""]
        assert asked(runtime, "two", data) == ["refused", ""]
        assert hosted_in(runtime, "one").model.options.memory_limit_bytes == 1 << 30


@pytest.mark.promise("The sandbox: grants", "A client or …")
def test_a_model_that_loads_others_gives_its_files_none_of_their_grants(models: Path, data: Path) -> None:
    """Check that code which another model loads under the name does not get the model's grants."""
    config = '{"backend": "python", "parameters": {"MOONPOOL_SANDBOX": {"string_value": "strict"}}}'
    files = '{"file:1/model.py": b"class TritonPythonModel: pass"}'
    bad = LOADS.replace("load_model(name)", f"load_model(name, {config!r}, {files})")
    write(models, "m")
    write(models, "loads", bad)
    said = {"m": {"MOONPOOL_SANDBOX_PATHS": str(data)}, "loads": {"MOONPOOL_SANDBOX_MODELS": "m"}}
    with moonpool.Runtime(models, sandbox="strict", model_options=said) as runtime:
        with pytest.raises(moonpool.ModelError, match="cannot set this for another"):
            asked(runtime, "loads", "m")
        assert asked(runtime, "m", data) == ["data", ""]
