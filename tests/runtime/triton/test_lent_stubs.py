"""A launcher starts processes for a tritonserver with the right environment, arguments and rights."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.triton.conftest import Start, Write
from tests.runtime.triton.doubles import CONFIG, DOUBLES, with_options
from tests.runtime.triton.shim import Shim
from tests.waiting import Deadline

from moonpool.ipc.codec import calls_codec, control_codec, encode
from moonpool.ipc.messages import Kind, Side
from moonpool.runtime.triton.messages import Word

# The load fails, and its error tells what the model saw.
TELLS = """
import json, os, sys
class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("[" + json.dumps({
            "variables": dict(os.environ),
            "files": [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                      if os.path.lexists(f"/proc/self/fd/{fd}")],
            "python": sys.executable,
            "path": sys.path,
            "args": args,
        }) + "]")
"""


@contextmanager
def launched(**options: Any) -> Iterator[Shim]:
    shim = Shim(**options)
    try:
        yield shim
    finally:
        shim.close()


def told(shim: Shim, directory: Path, config: dict[str, Any] = CONFIG) -> dict[str, Any]:
    """Load a model with the text TELLS, and return the facts that it reports."""
    ready = shim.load(directory, config)
    assert ready[0] == Word.MODEL_READY, ready
    shim.begin_start(ready[1], "m_0_0")
    *_, message = shim.hear(Word.STARTED, Word.REFUSED)
    found: dict[str, Any] = json.loads(message[message.index("[") + 1 : message.rindex("]")])
    return found


def seen_with(directory: Path, config: dict[str, Any] = CONFIG, **variables: str) -> dict[str, Any]:
    """Return the environment of a model in a server that has these variables beside this process's."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with launched(environment={**own, **variables}) as shim:
        return told(shim, directory, config)


@pytest.mark.promise("The launcher of a tritonserver", "The server's open files do not …")
def test_a_model_sees_the_environment_of_the_server(write: Write) -> None:
    given = {"MY_ENV": "there", "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}

    seen = seen_with(write(TELLS), CONFIG, **given)

    assert {name: seen["variables"].get(name) for name in given} == given


@pytest.mark.promise("The launcher of a tritonserver", "The server's open files do not …")
def test_a_contained_model_sees_what_it_sees_outside_of_tritonserver(write: Write) -> None:
    options = with_options(MOONPOOL_SANDBOX="strict", MOONPOOL_ENVIRONMENT="MY_*")
    # A contained model may not list its descriptors.
    text = TELLS.replace('os.listdir("/proc/self/fd")', "()")

    seen = seen_with(write(text), options, MY_ENV="granted", KEY="secret", LANG="C.UTF-8")

    assert (seen["variables"]["MY_ENV"], seen["variables"]["LANG"]) == ("granted", "C.UTF-8")
    assert "KEY" not in seen["variables"]


def python_of_the_server(folder: Path, version: str) -> str:
    """A path in which `python3` says that it has this version."""
    folder.mkdir()
    python = folder / "python3"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.promise("The launcher of a tritonserver", "The server's open files do not …")
def test_packages_on_the_servers_path_are_a_models_where_its_python_is_the_servers(
    write: Write, tmp_path: Path
) -> None:
    directory, packages = write(TELLS), str(tmp_path / "packages")
    same = python_of_the_server(tmp_path / "same", "{} {}".format(*sys.version_info))
    other = python_of_the_server(tmp_path / "other", "3 8")

    assert packages in seen_with(directory, PATH=same, PYTHONPATH=packages)["path"]
    for path in (other, python_of_the_server(tmp_path / "broken", "; exit 1")):
        seen = seen_with(directory, PATH=path, PYTHONPATH=packages)
        assert packages not in seen["path"]
        assert "PYTHONPATH" not in seen["variables"]


def test_the_home_of_the_servers_python_is_not_a_models(write: Write) -> None:
    seen = seen_with(write(TELLS), PYTHONHOME="/nowhere")

    assert "PYTHONHOME" not in seen["variables"]


@pytest.mark.promise(
    "The launcher of a tritonserver",
    "The server's open files do not reach a model. It sees the server's environment as in "
    "Triton, except variables that would lead its interpreter to packages of another version.",
)
def test_files_and_sockets_of_the_server_do_not_reach_a_model(write: Write, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, open(tmp_path / "open", "w") as file:
        os.set_inheritable(listening.fileno(), True)
        os.set_inheritable(file.fileno(), True)
        theirs = {os.readlink(f"/proc/self/fd/{each.fileno()}") for each in (listening, file)}
        with launched() as shim:
            os.stat(f"/proc/{shim.process.pid}/fd")
            seen = told(shim, write(TELLS))

    assert set(seen["files"]) & theirs == set()


def test_a_model_gets_the_arguments_that_triton_gives(shim: Shim, write: Write) -> None:
    directory = write(TELLS)

    arguments = told(shim, directory)["args"]

    config = json.loads(arguments.pop("model_config"))
    assert (config["name"], config["input"][0]["dims"]) == ("m", [-1])
    assert arguments == {
        "model_instance_device_id": "0",
        "model_instance_kind": "CPU",
        "model_instance_name": "m_0_0",
        "model_name": "m",
        "model_repository": str(directory),
        "model_version": "1",
    }


@pytest.mark.promise(
    "The launcher of a tritonserver",
    "A model runs in the environment that its configuration names, and in the sandbox that it "
    "or the server's command line asks for.",
)
def test_a_model_runs_in_the_environment_that_its_configuration_names(write: Write, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python3").symlink_to(os.path.realpath(sys.executable))
    (environment / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    import numpy

    (packages / "here.pth").write_text(str(Path(numpy.__file__).parents[1]))

    options = with_options(EXECUTION_ENV_PATH=str(environment))

    seen = seen_with(write(TELLS), options, PYTHONPATH="/nowhere", MY_ENV="there")

    assert seen["python"].startswith(str(environment))
    # PYTHONPATH is for the server's own Python.
    assert "/nowhere" not in seen["path"]
    assert seen["variables"]["MY_ENV"] == "there"


def test_an_environment_that_is_not_there_is_refused(shim: Shim, write: Write) -> None:
    options = with_options(EXECUTION_ENV_PATH="$$TRITON_MODEL_DIRECTORY/none")

    word, _, _, message = shim.load(write(DOUBLES), options)

    assert word == Word.REFUSED
    assert str(write(DOUBLES) / "none") in message


def test_a_backend_that_is_a_python_file_serves_the_models_that_name_it(tmp_path: Path) -> None:
    backend = tmp_path / "backends" / "doubler"
    backend.mkdir(parents=True)
    (backend / "model.py").write_text("from helper import *\n")
    (backend / "helper.py").write_text(DOUBLES)
    (tmp_path / "m" / "1").mkdir(parents=True)
    config = {**CONFIG, "backend": "doubler", "runtime": "model.py"}

    with launched(backend=("doubler", str(backend))) as shim:
        ready = shim.load(tmp_path / "m", config)

        assert shim.start(ready[1]).infer([4]) == [8]


def test_a_model_of_the_backend_moonpool_is_one_of_python(shim: Shim, write: Write) -> None:
    config = {**CONFIG, "backend": "moonpool", "default_model_filename": ""}

    ready = shim.load(write(DOUBLES), config)

    assert shim.start(ready[1]).infer([4]) == [8]


@pytest.mark.promise("The launcher of a tritonserver", "A model runs in the environment …")
def test_a_stub_in_the_sandbox_strict_answers(start: Start) -> None:
    stub = start(config=with_options(MOONPOOL_SANDBOX="strict"))

    assert stub.infer([1]) == [2]
    assert stub.started is not None
    assert stub.started[4].startswith("strict (")
    assert "seccomp" in stub.started[4]


@pytest.mark.promise(
    "The launcher of a tritonserver",
    "Models and Python-based backends may be links to folders elsewhere, also where the model "
    "sees nothing but its own.",
)
def test_models_and_backends_may_be_links_also_in_the_sandbox_strict(write: Write, tmp_path: Path) -> None:
    write("from doubles import TritonPythonModel\n", "real")
    (tmp_path / "real" / "1" / "doubles.py").write_text(DOUBLES)
    (tmp_path / "m").symlink_to(tmp_path / "real")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.py").write_text(DOUBLES)
    backend = tmp_path / "doubler"
    backend.symlink_to(tmp_path / "elsewhere")
    config = with_options(MOONPOOL_SANDBOX="strict")

    with launched(backend=("doubler", str(backend))) as shim:
        of_its_own = shim.load(tmp_path / "m", config)
        shared = shim.load(tmp_path / "m", {**config, "runtime": "model.py"})

        assert shim.start(of_its_own[1], "a").infer([1]) == [2]
        assert shim.start(shared[1], "b").infer([1]) == [2]


@pytest.mark.promise("The launcher of a tritonserver", "A model runs in the environment …")
def test_the_servers_command_line_has_a_sandbox_for_all_models(write: Write) -> None:
    with launched(options={"sandbox": "strict", "auto-complete-config": "true"}) as shim:
        ready = shim.load(write(DOUBLES), CONFIG)

        # A contained model has private texts, may ask no other model, and is not decoupled.
        assert ready[8:] == [True, 1000, None, [], False]
        assert shim.start(ready[1]).infer([1]) == [2]


@pytest.mark.promise("The launcher of a tritonserver", "A model runs in the environment …")
def test_under_it_a_model_does_not_give_itself_more(write: Write) -> None:
    more = with_options(MOONPOOL_SANDBOX_PATHS="/etc")

    with launched(options={"sandbox": "strict"}) as shim:
        word, _, _, message = shim.load(write(DOUBLES), more)
    assert word == Word.REFUSED
    assert message.endswith("start it with --backend-config=python,sandbox-grants=m:MOONPOOL_SANDBOX_PATHS=/etc")
    with launched(options={"sandbox": "strict", "sandbox-grants": "other,m"}) as shim:
        assert shim.load(write(DOUBLES), more)[0] == Word.MODEL_READY


def test_under_it_a_model_has_the_values_that_it_was_granted_and_no_others(write: Write) -> None:
    grants = "m:MOONPOOL_SANDBOX_PATHS=/etc,/usr;other"
    with launched(options={"sandbox": "strict", "sandbox-grants": grants}) as shim:
        asked = with_options(MOONPOOL_SANDBOX_PATHS="/etc")
        assert shim.load(write(DOUBLES), asked)[0] == Word.MODEL_READY
        asked = with_options(MOONPOOL_SANDBOX_PATHS="rw:/etc")
        assert shim.load(write(DOUBLES), asked)[0] == Word.REFUSED
    with launched(options={"sandbox": "strict", "sandbox-grants": "m:MOONPOOL_SANDBOX_PATH=/"}) as shim:
        word, _, _, message = shim.load(write(DOUBLES), CONFIG)
    assert word == Word.REFUSED
    assert 'did you mean "MOONPOOL_SANDBOX_PATHS"' in message


@pytest.mark.promise("Models", "A configuration that asks for more …")
def test_a_configuration_asks_for_no_more_than_the_command_line_lets_it(write: Write) -> None:
    with launched(options={"config-limits": "items=50,config_bytes=10"}) as shim:
        word, _, _, message = shim.load(write(DOUBLES), CONFIG)
    assert word == Word.REFUSED
    assert message.endswith("raises it by --backend-config=python,config-limits=config_bytes=NUMBER")
    with launched(options={"config-limits": "bogus=1"}) as shim:
        word, _, _, message = shim.load(write(DOUBLES), CONFIG)
    assert word == Word.REFUSED
    assert "config-limits: must be one of config_bytes, instances" in message


def test_a_model_is_no_folder_that_it_lies_in(write: Write, tmp_path: Path) -> None:
    write(DOUBLES)
    (tmp_path / "around").symlink_to(".")
    config = with_options(MOONPOOL_SANDBOX="strict")

    with launched() as shim:
        word, _, _, message = shim.load(tmp_path / "around", {**config, "name": "around"})
    assert word == Word.REFUSED
    assert "a folder that it lies in" in message


@pytest.mark.promise("Models", "A model with a repository agent …")
def test_repository_agents_are_the_servers_own(write: Write) -> None:
    agents = {"agents": [{"name": "checksum", "parameters": {}}, {"name": "relocation", "parameters": {}}]}

    with launched() as shim:
        assert shim.load(write(DOUBLES), {**CONFIG, "model_repository_agents": agents})[0] == Word.MODEL_READY


def test_a_sandbox_that_there_is_not_refuses_every_model(write: Write) -> None:
    with launched(options={"sandbox": "srict"}) as shim:
        word, _, code, message = shim.load(write(DOUBLES), CONFIG)

    assert (word, code) == (Word.REFUSED, 3)
    assert message.startswith("--backend-config sandbox: must be one of off, standard, ")


@pytest.mark.promise(
    "The launcher of a tritonserver", "What a model logs and asks for while it initializes reaches the server."
)
def test_log_lines_of_initialize_go_to_the_shim(start: Start) -> None:
    stub = start(
        DOUBLES
        + """
    def initialize(self, args):
        pb_utils.Logger.log_warn("nearly there")
"""
    )

    fields = control_codec(Side.RUNTIME).decode(stub.control.receive())

    assert fields[:3] == [Kind.LOG, 1, "nearly there"]


def test_log_lines_of_a_completion_go_to_the_server_s_log(shim: Shim, write: Write) -> None:
    text = """
    @staticmethod
    def auto_complete_config(config):
        pb_utils.Logger.log_warn("nothing is missing")
        return config
"""
    shim.load(write(DOUBLES + text), CONFIG, completes=True)

    shim.wait_for_note("[m_auto_complete] nothing is missing (model.py:11)", 1)


@pytest.mark.promise("The launcher of a tritonserver", "What a model logs and asks …")
def test_a_model_makes_metrics_while_it_initializes(shim: Shim, write: Write) -> None:
    text = (
        DOUBLES
        + """
    def initialize(self, args):
        self.family = pb_utils.MetricFamily("requests", "how many", pb_utils.MetricFamily.COUNTER)
"""
    )
    ready = shim.load(write(text), CONFIG)
    number = shim.begin_start(ready[1])
    shim.hear(Word.BORN)
    calls = shim.stubs[number].calls

    kind, call, name, *_ = calls_codec(Side.RUNTIME).decode(calls.receive())
    calls.send(encode(Kind.DONE, call, None, {"metric": 1}))

    assert (kind, name) == (Kind.NEW_METRIC, "requests")
    assert shim.hear(Word.STARTED, Word.REFUSED)[0] == Word.STARTED


def test_prints_go_to_the_server_s_output(shim: Shim, start: Start) -> None:
    start("print('printed by the model')\n" + DOUBLES)

    assert shim.process.stderr is not None
    said, deadline = b"", Deadline(60.0)
    while b"[m_0] printed by the model\n" not in said:
        assert select.select([shim.process.stderr], [], [], deadline.remaining_s)[0], said
        said += os.read(shim.process.stderr.fileno(), 4096)


def test_instances_are_forked_from_a_template(start: Start, shim: Shim) -> None:
    stub = start("print('imported')\n" + DOUBLES, with_options(MOONPOOL_PREFORK="imports"))

    assert stub.infer([1]) == [2]
    stub.kill()
    shim.lose(stub)
    shim.hear(Word.STARTED)
    assert shim.stubs[2].infer([2]) == [4]


def test_options_that_only_a_runtime_can_act_on_are_told(shim: Shim, write: Write) -> None:
    shim.load(write(DOUBLES), with_options(MOONPOOL_RETRY="yes"))

    shim.wait_for_note("model 'm': MOONPOOL_RETRY has no effect in Triton", 1)
