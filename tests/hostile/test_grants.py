"""Granted acts succeed and others do not, and no model grants itself anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.hostile.attacker import FOLDER, Attacker, answers, load_attacker
from tests.hostile.conftest import Attackers
from tests.server.running import RunningServer, running

import moonpool


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders and a file, of which a model is granted something."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("readable", "writable"):
        (folder / name).mkdir()
        (folder / name).chmod(0o777)
        (folder / name / "file").write_text("data")
        (folder / name / "file").chmod(0o666)
    (folder / "file").write_text("data")
    (folder / "file").chmod(0o644)
    return folder


@pytest.fixture(scope="module")
def granted(runtime: moonpool.Runtime, model_folder: Path, data: Path) -> Iterator[Attacker]:
    paths = f"{data}/readable, rw:{data}/writable"
    yield load_attacker(runtime, "strict", model_folder, "granted", SANDBOX_PATHS=paths, SANDBOX_SYSCALLS="fork")
    runtime.unload("granted")


@pytest.mark.promise("The sandbox: grants", "What is granted works, and nothing beside it does.")
def test_a_granted_folder_can_be_read_and_one_that_is_granted_so_written(granted: Attacker, data: Path) -> None:
    assert granted.finds("files.read", path=f"{data}/readable/file") == 4
    assert granted.finds("files.read", path=f"{data}/writable/file") == 4
    assert granted.tries("files.create", path=f"{data}/writable/new").word == "done"
    for path in ("readable/file", "readable/new"):
        assert granted.tries("files.create", path=f"{data}/{path}").word != "done"
    assert granted.tries("files.open_to_write", path=f"{data}/readable/file").word != "done"


@pytest.mark.promise("The sandbox: grants", "What is granted …")
def test_the_neighbours_of_a_granted_folder_are_not_granted(granted: Attacker, data: Path) -> None:
    for path in (f"{data}/file", f"{data}/readable/../file", "/etc/passwd"):
        assert granted.tries("files.read", path=path).word in ("EACCES", "ENOENT")


@pytest.mark.promise("The sandbox: grants", "What is granted …")
def test_a_granted_call_is_one_call(granted: Attacker) -> None:
    assert granted.tries("processes.fork").word == "done"
    assert granted.tries("processes.execute_program").word in ("EPERM", "EACCES")
    assert granted.tries("network.tcp", port=80).word == "EPERM"
    # A child is in the same sandbox as its parent.
    assert granted.tries("processes.fork_and_read", path="/etc/passwd").done == "EACCES"


@pytest.mark.promise("The sandbox: grants", "Grants are logged and shown.")
def test_grants_are_shown(runtime: moonpool.Runtime, granted: Attacker, data: Path) -> None:
    told = runtime.instances(granted.name)[0]["sandbox"]

    assert isinstance(told, dict)
    assert told["granted"] == [f"read {data}/readable", f"write {data}/writable", "call fork"]


# Models that load models

LOOSER = {
    "a lower level": {"MOONPOOL_SANDBOX": "off"},
    "files": {"MOONPOOL_SANDBOX": "strict", "MOONPOOL_SANDBOX_PATHS": "/etc"},
    "ports": {"MOONPOOL_SANDBOX": "strict", "MOONPOOL_SANDBOX_PORTS": "80"},
    "calls": {"MOONPOOL_SANDBOX": "strict", "MOONPOOL_SANDBOX_SYSCALLS": "execve"},
    "variables": {"MOONPOOL_SANDBOX": "strict", "MOONPOOL_ENVIRONMENT": "AWS_*"},
    "an interpreter": {"MOONPOOL_SANDBOX": "strict", "EXECUTION_ENV_PATH": "/usr"},
    "memory": {"MOONPOOL_SANDBOX": "strict", "MOONPOOL_MEMORY_LIMIT_BYTES": "64G"},
}


def config_of(**parameters: str) -> str:
    return json.dumps(
        {
            "backend": "python",
            "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],
            "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [1]}],
            "instance_group": [{"kind": "KIND_CPU"}],
            "parameters": {key: {"string_value": text} for key, text in parameters.items()},
        }
    )


@pytest.fixture(scope="module")
def loading(runtime: moonpool.Runtime, model_folder: Path) -> Iterator[Attacker]:
    """One that may load and unload a model of one name."""
    yield load_attacker(runtime, "strict", model_folder, "loading", SANDBOX_MODELS="loaded")
    runtime.unload("loading")


@pytest.mark.promise("The sandbox: `strict`", "It asks, loads …")
@pytest.mark.parametrize("how", LOOSER)
def test_a_model_cannot_load_one_that_may_do_more(runtime: moonpool.Runtime, loading: Attacker, how: str) -> None:
    outcome = loading.tries(
        "protocol.load_model", name="loaded", config=config_of(**LOOSER[how]), file="class TritonPythonModel: pass"
    )

    assert outcome.word not in ("done", "died"), outcome
    assert "cannot" in outcome.text
    assert "loaded" not in runtime.models()


@pytest.mark.promise("The sandbox: `strict`", "It asks, loads …")
def test_a_model_asks_loads_and_unloads_only_what_it_was_granted(
    runtime: moonpool.Runtime, attackers: Attackers
) -> None:
    attacker = attackers("strict")
    config = config_of(MOONPOOL_SANDBOX="strict")
    attempts: list[tuple[str, dict[str, object]]] = [
        ("ask", {"model": "sibling", "count": 16}),
        ("unload_model", {"name": "sibling"}),
        ("load_model", {"name": "new", "config": config, "file": ""}),
    ]

    for what, arguments in attempts:
        outcome = attacker.tries(f"protocol.{what}", **arguments)
        assert outcome.word not in ("done", "died"), outcome
        assert "MOONPOOL_SANDBOX_MODELS" in outcome.text
    assert answers(runtime)
    assert "new" not in runtime.models()


def test_an_ensemble_of_its_own_making_asks_nobody_else_for_a_model(
    runtime: moonpool.Runtime, loading: Attacker
) -> None:
    """The model may load `loaded`, whatever that is, and so it would ask `sibling` through it."""

    def through(member: str) -> str:
        tensors = {"data_type": "TYPE_FP32", "dims": [-1]}
        step = {"model_name": member, "model_version": -1}
        maps = {"input_map": {"X": "A"}, "output_map": {"Y": "B"}}
        config = {
            "platform": "ensemble",
            "input": [{"name": "A", **tensors}],
            "output": [{"name": "B", **tensors}],
            "ensemble_scheduling": {"step": [step | maps]},
            "parameters": {"MOONPOOL_SANDBOX": {"string_value": "strict"}},
        }
        return json.dumps(config)

    refused = loading.tries("protocol.load_model", name="loaded", config=through("sibling"), file="")
    granted = loading.tries("protocol.load_model", name="loaded", config=through("loaded"), file="")

    assert "does not let it ask for model 'sibling'" in refused.text
    # What it was granted is refused for another reason: the check asks for the model of each step.
    assert "circular dependency" in granted.text
    assert "loaded" not in runtime.models()


# A server with a level for all

GREEDY = {
    "paths": 'MOONPOOL_SANDBOX_PATHS" value: { string_value: "/etc',
    "ports": 'MOONPOOL_SANDBOX_PORTS" value: { string_value: "443',
    "calls": 'MOONPOOL_SANDBOX_SYSCALLS" value: { string_value: "fork',
    "models": 'MOONPOOL_SANDBOX_MODELS" value: { string_value: "*',
    "variables": 'MOONPOOL_ENVIRONMENT" value: { string_value: "AWS_*',
    "memory": 'MOONPOOL_MEMORY_LIMIT_BYTES" value: { string_value: "64G',
    "lines": 'MOONPOOL_LOG_LINES_PER_S" value: { string_value: "1000000',
    "tasks": 'MOONPOOL_TASK_LIMIT" value: { string_value: "100000',
    "template": 'MOONPOOL_PREFORK" value: { string_value: "imports',
    "interpreter": 'EXECUTION_ENV_PATH" value: { string_value: "/',
}
CONFIG = """
backend: "python"
input [{ name: "ATTEMPT" data_type: TYPE_STRING dims: [1] }]
output [{ name: "SAID" data_type: TYPE_STRING dims: [1] }]
instance_group [{ kind: KIND_CPU }]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    parameters = {**GREEDY, "lower": 'MOONPOOL_SANDBOX" value: { string_value: "off', "trusted": GREEDY["paths"]}
    for name, parameter in parameters.items():
        folder = repository / name
        shutil.copytree(FOLDER, folder / "1", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "config.pbtxt").write_text(f'{CONFIG}\nparameters {{ key: "{parameter}" }} }}\n')
    flags = ("--sandbox=strict", "--sandbox-grants=trusted", "--exit-on-error=false")
    with running(repository, *flags) as server:
        yield server


def asked(server: RunningServer, model: str, what: str, **arguments: object) -> dict[str, object]:
    text = json.dumps([what, arguments])
    inputs = [{"name": "ATTEMPT", "datatype": "BYTES", "shape": [1], "data": [text]}]
    body = json.dumps({"inputs": inputs}).encode()
    status, reply = server.get(f"/v2/models/{model}/infer", "POST", body)
    assert status == 200, reply
    said: dict[str, object] = json.loads(reply["outputs"][0]["data"][0])
    return said


@pytest.mark.promise("The sandbox: grants", "Where the operator …")
@pytest.mark.parametrize("what", GREEDY)
def test_under_a_server_s_level_no_model_opens_its_own_door(server: RunningServer, what: str) -> None:
    status, _ = server.get(f"/v2/models/{what}/ready")

    assert status != 200
    assert f"--sandbox-grants={what}" in server.text()


@pytest.mark.promise(
    "The sandbox: grants", "A configuration that asks for less than the server's level gets the server's."
)
def test_a_model_that_asks_for_less_is_in_the_server_s_level(server: RunningServer) -> None:
    assert asked(server, "lower", "files.read", path="/etc/passwd")["refused"] == "EACCES"
    assert asked(server, "lower", "processes.fork")["refused"] == "EPERM"


@pytest.mark.promise("The sandbox: grants", "Where the operator …")
def test_a_model_that_the_operator_named_has_what_it_asks_for(server: RunningServer) -> None:
    hostname = next(path for path in ("/etc/hostname", "/etc/hosts") if Path(path).exists())

    assert "done" in asked(server, "trusted", "files.read", path=hostname)
    assert asked(server, "trusted", "processes.fork")["refused"] == "EPERM"


@pytest.mark.promise("The sandbox: `strict`", "Its error texts …")
def test_a_client_is_told_no_paths_of_a_model_that_fails(server: RunningServer) -> None:
    inputs = [{"name": "ATTEMPT", "datatype": "BYTES", "shape": [1], "data": ["no JSON"]}]
    body = json.dumps({"inputs": inputs}).encode()

    status, reply = server.get("/v2/models/lower/infer", "POST", body)

    assert status == 500
    assert "JSONDecodeError" in str(reply)
    assert "model.py" in str(reply)
    assert "/" not in str(reply)
    # The log is for operators, and has the place in the model itself.
    server.wait_for("(model.py:")
