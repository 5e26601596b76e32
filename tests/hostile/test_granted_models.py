"""A grant for models is for exactly those that it names, and what a strict model reads of their loads says nothing of
the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.hosting import Config, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.ensemble_repositories import ADDS, A, B, chain, write_ensemble, write_model

import moonpool

CONTROLS = """
import numpy as np
import triton_python_backend_utils as pb_utils

ACTS = {
    "load": lambda name: pb_utils.load_model(name),
    "unload": lambda name: pb_utils.unload_model(name),
    "unload with members": lambda name: pb_utils.unload_model(name, unload_dependents=True),
    "ask": lambda name: _ask(name),
}


def _ask(name):
    x = pb_utils.Tensor("X", np.zeros(3, np.float32))
    response = pb_utils.InferenceRequest(model_name=name, requested_output_names=["Y"], inputs=[x]).exec()
    if response.has_error():
        raise RuntimeError(response.error().message())


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            act, name = pb_utils.get_input_tensor_by_name(request, "ACT").as_numpy()
            try:
                ACTS[act.decode()](name.decode())
                said = "done"
            except Exception as error:
                said = str(error)
            said = pb_utils.Tensor("SAID", np.array([said.encode()], object))
            responses.append(pb_utils.InferenceResponse([said]))
        return responses
"""
SIGNATURE: Config = {"input": [tensor("ACT", "STRING", 2)], "output": [tensor("SAID", "STRING", 1)]}


class Controller:
    """A strict model that was granted some models."""

    def __init__(self, runtime: moonpool.Runtime, folder: Path, name: str, granted: str) -> None:
        file = folder / f"{name}.py"
        file.write_text(CONTROLS)
        settings = options(SANDBOX="strict", SANDBOX_MODELS=granted)
        runtime.load(name, file, config=SIGNATURE | settings)
        self._runtime, self._name = runtime, name

    def tries(self, act: str, name: str) -> str:
        """Return "done", or the error that the model reads."""
        outputs = self._runtime.infer(self._name, {"ACT": [act, name]}, timeout_s=60.0)
        return str(outputs["SAID"][0].decode())


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secret") / "models"
    for name in ("first", "second", "alone"):
        write_model(folder, name)
    write_ensemble(folder, "pipe", chain(["first", "second"]), A, B)
    write_ensemble(folder, "outer", [_step_of("pipe")], A, B)
    write_model(folder, "raises", "import nothing_of_this_name\n" + ADDS)
    write_model(folder, "wrong", more='parameters { key: "MOONPOOL_PIN" value { string_value: "x" } }')
    write_model(folder, "no_file")
    (folder / "no_file" / "1" / "model.py").unlink()
    write_model(folder, "fails", ADDS.replace("        responses = []", "        raise OSError(__file__)"))
    return folder


def _step_of(pipe: str) -> str:
    maps = 'input_map { key: "A" value: "A" } output_map { key: "B" value: "B" }'
    return f'{{ model_name: "{pipe}" model_version: -1 {maps} }}'


@pytest.fixture
def hosts(repository: Path) -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime(repository, models=[], drain_timeout_s=10.0) as runtime:
        yield runtime


def refuses(name: str) -> str:
    return f"does not let it ask for model '{name}'"


@pytest.mark.promise(
    "The sandbox: `strict`",
    "It asks, loads and unloads only the models that were granted, and no others with them, and "
    "gives none of them more than it has itself.",
)
@pytest.mark.promise(
    "Hostile models",
    "A grant for a model covers this model and no other: not the members of an ensemble, and not the ensembles that "
    "depend on it.",
)
def test_what_goes_or_comes_with_a_model_needs_a_grant_of_its_own(hosts: moonpool.Runtime, tmp_path: Path) -> None:
    controller = Controller(hosts, tmp_path, "controller", "pipe, first, alone")
    hosts.load("outer")
    loaded = set(hosts.models())

    # Members that were loaded for it alone, and the ensemble above it.
    assert refuses("second") in controller.tries("unload with members", "pipe")
    assert refuses("outer") in controller.tries("unload", "pipe")
    # The ensembles above a member, also through each other.
    assert refuses("outer") in controller.tries("unload", "first")
    assert set(hosts.models()) == loaded
    hosts.unload("outer")
    hosts.unload("pipe")
    hosts.unload("second")
    # Members that are not loaded.
    assert refuses("second") in controller.tries("load", "pipe")
    assert not {"pipe", "second"} & set(hosts.models())
    hosts.load("second")
    assert controller.tries("load", "pipe") == "done"
    assert controller.tries("load", "alone") == "done"
    assert controller.tries("unload", "alone") == "done"


def test_with_grants_for_all_of_them_they_go_together(hosts: moonpool.Runtime, tmp_path: Path) -> None:
    controller = Controller(hosts, tmp_path, "controller", "pipe, first, second, o*")

    assert controller.tries("load", "outer") == "done"
    assert {"outer", "pipe", "first", "second"} <= set(hosts.models())
    assert controller.tries("unload with members", "outer") == "done"
    assert set(hosts.models()) == {"controller"}


@pytest.mark.promise(
    "The sandbox: `strict`",
    "Its error texts have no paths, addresses or last output when they leave a server. Error "
    "texts that it reads itself, of other models and of loads, have none either.",
)
@pytest.mark.promise(
    "What a stub says",
    "A contained model reads no folder of the machine in the errors of what it asks for, and neither does a client of "
    "a server.",
)
def test_errors_of_what_it_asks_for_have_no_folders(hosts: moonpool.Runtime, repository: Path, tmp_path: Path) -> None:
    controller = Controller(hosts, tmp_path, "controller", "*")
    hosts.load("fails")
    said = {name: controller.tries("load", name) for name in ("raises", "wrong", "no_file", "unknown")}
    said["fails"] = controller.tries("ask", "fails")
    said["absent"] = controller.tries("ask", "absent")

    assert "nothing_of_this_name" in said["raises"]
    assert "config.pbtxt" in said["wrong"]
    assert "MOONPOOL_PIN" in said["wrong"]
    assert "model.py" in said["fails"]
    for text in said.values():
        assert text != "done"
        assert "secret" not in text
        assert str(repository.parent) not in text
