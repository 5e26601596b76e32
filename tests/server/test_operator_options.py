"""The operator of a server sets options of its models, and neither clients nor new versions get more."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_operator_options import OPENS, write
from tests.server.running import RunningServer, running
from tests.waiting import wait_until

from moonpool.runtime.server.options.sources import BadOption, read_options


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make two files, one of which is granted to a model."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("granted", "other"):
        (folder / name).write_text(name)
        (folder / name).chmod(0o644)
    return folder


def asked(server: RunningServer, model: str, path: Path) -> str:
    """Return the contents of a file as the model reads it, or "refused"."""
    inputs = [{"name": "PATH", "datatype": "BYTES", "shape": [1], "data": [str(path)]}]
    status, reply = server.get(f"/v2/models/{model}/infer", "POST", json.dumps({"inputs": inputs}).encode())
    assert status == 200, reply
    return str(reply["outputs"][0]["data"][0])


def load(server: RunningServer, model: str, config: dict[str, Any] | None = None, file: str = "") -> tuple[int, Any]:
    parameters: dict[str, object] = {}
    if config is not None:
        parameters["config"] = json.dumps({"backend": "python", **TENSORS, **config})
    if file:
        parameters["file:1/model.py"] = base64.b64encode(file.encode()).decode()
    body = json.dumps({"parameters": parameters}).encode()
    return server.get(f"/v2/repository/models/{model}/load", "POST", body)


TENSORS = {
    "input": [{"name": "PATH", "data_type": "TYPE_STRING", "dims": [1]}],
    "output": [{"name": "SAID", "data_type": "TYPE_STRING", "dims": [-1]}],
    "instance_group": [{"kind": "KIND_CPU"}],
}


def parameters(**texts: str) -> dict[str, Any]:
    return {"parameters": {key: {"string_value": text} for key, text in texts.items()}}


# New versions

MODES = {
    "poll": ("--model-control-mode=poll", "--repository-poll-secs=0"),
    "explicit": ("--model-control-mode=explicit", "--load-model=*"),
}


def again(server: RunningServer, mode: str) -> None:
    if mode == "poll":
        server.tell(signal.SIGHUP)
    else:
        status, reply = load(server, "stranger")
        assert (status, "cannot give it more" in str(reply)) == (500, True), reply
    server.wait_for("stranger/config.pbtxt:6: parameters[MOONPOOL_SANDBOX_PATHS]: a model's conf")


@pytest.mark.promise("The sandbox: grants", "A grant of …")
@pytest.mark.parametrize("mode", ["poll", "explicit"])
def test_a_new_version_has_no_more_than_was_granted(tmp_path: Path, folder: Path, mode: str) -> None:
    write(tmp_path, "stranger", MOONPOOL_SANDBOX_PATHS=f"{folder}/granted")
    flags = (
        "--sandbox=strict",
        f"--sandbox-grants=stranger:MOONPOOL_SANDBOX_PATHS={folder}/granted",
        "--exit-on-error=false",
    )
    with running(tmp_path, *flags, *MODES[mode]) as server:
        assert asked(server, "stranger", folder / "granted") == "granted"
        assert asked(server, "stranger", folder / "other") == "refused"

        write(tmp_path, "stranger", OPENS + "\n# 2\n", MOONPOOL_SANDBOX_PATHS=f"rw:{folder}")
        again(server, mode)
        # The old version serves on as before.
        assert asked(server, "stranger", folder / "granted") == "granted"
        assert asked(server, "stranger", folder / "other") == "refused"
    with running(tmp_path, *flags, *MODES[mode]) as server:
        server.wait_for("cannot give it more")
        assert server.get("/v2/models/stranger/ready")[0] != 200

        # A version that asks for the same or for less needs no new grant.
        write(tmp_path, "stranger", OPENS + "\n# 3\n")
        file = tmp_path / "stranger" / "1" / "model.py"
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))
        if mode == "poll":
            server.tell(signal.SIGHUP)
        else:
            assert load(server, "stranger")[0] == 200
        wait_until(lambda: server.get("/v2/models/stranger/ready")[0] == 200)
        assert asked(server, "stranger", folder / "granted") == "refused"


@pytest.mark.promise(
    "The sandbox: grants", "A value that the operator sets holds for every version, whatever its configuration says."
)
def test_a_value_that_the_operator_sets_is_that_of_every_version(tmp_path: Path, folder: Path) -> None:
    write(tmp_path, "stranger", MOONPOOL_SANDBOX_PATHS="/etc")
    option = f"--model-option=stranger:MOONPOOL_SANDBOX_PATHS={folder}/granted"
    with running(tmp_path, "--sandbox=strict", option, *MODES["explicit"]) as server:
        for number in range(2):
            assert asked(server, "stranger", folder / "granted") == "granted"
            assert asked(server, "stranger", folder / "other") == "refused"
            write(tmp_path, "stranger", f"{OPENS}\n# {number}", MOONPOOL_SANDBOX_PATHS=f"rw:{folder}")
            assert load(server, "stranger")[0] == 200


# Clients


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    write(repository, "m")
    write(repository, "whole", MOONPOOL_SANDBOX_PATHS=f"{folder}/granted")
    flags = (
        "--model-option=*:MOONPOOL_SANDBOX=strict",
        "--model-option=*:MOONPOOL_LOG_LINES_PER_S=10",
        f"--model-option=m*:MOONPOOL_SANDBOX_PATHS={folder}/granted",
        "--sandbox-grants=whole",
        *MODES["explicit"],
    )
    with running(repository, *flags) as server:
        yield server


@pytest.mark.promise("The sandbox: grants", "A client or …")
@pytest.mark.promise("The server (`moonpool serve`)", "Options that the operator set stay …")
def test_a_client_s_configuration_overrules_nothing_that_the_operator_set(server: RunningServer, folder: Path) -> None:
    config = parameters(MOONPOOL_SANDBOX="off", MOONPOOL_SANDBOX_PATHS=f"rw:{folder}", MOONPOOL_LOG_LINES_PER_S="99")
    assert load(server, "m", config)[0] == 200

    assert asked(server, "m", folder / "granted") == "granted"
    assert asked(server, "m", folder / "other") == "refused"
    served = server.get("/v2/models/m/config")[1]["parameters"]
    assert served["MOONPOOL_SANDBOX_PATHS"] == {"string_value": f"{folder}/granted"}
    assert served["MOONPOOL_LOG_LINES_PER_S"] == {"string_value": "10"}
    # The option still holds after an unload.
    assert server.get("/v2/repository/models/m/unload", "POST", b"{}")[0] == 200
    wait_until(lambda: load(server, "m", config)[0] == 200)
    assert asked(server, "m", folder / "other") == "refused"


@pytest.mark.promise("The sandbox: grants", "A client or …")
@pytest.mark.parametrize("name", ["m", "whole"])
def test_a_client_s_configuration_asks_for_no_more(server: RunningServer, folder: Path, name: str) -> None:
    for greedy in (
        parameters(MOONPOOL_SANDBOX_PORTS="443"),
        parameters(MOONPOOL_MEMORY_LIMIT_BYTES="64T"),
        parameters(EXECUTION_ENV_PATH="/usr"),
        {"instance_group": [{"kind": "KIND_GPU"}]},
    ):
        status, reply = load(server, name, greedy)
        assert (status, "cannot give it" in str(reply)) == (500, True), reply
    assert asked(server, name, folder / "granted") == "granted"


@pytest.mark.promise("The sandbox: grants", "A client or …")
@pytest.mark.parametrize("name", ["m", "made-up"])
def test_a_client_s_files_have_nothing_that_was_granted_to_a_name(
    server: RunningServer, folder: Path, name: str
) -> None:
    status, reply = load(server, name, {}, OPENS)

    assert (status, "not for those that a load brings" in str(reply)) == (500, True), reply
    assert asked(server, "m", folder / "granted") == "granted"


def test_a_client_s_files_of_a_name_without_grants_are_at_the_operator_s_level(
    server: RunningServer, folder: Path
) -> None:
    assert load(server, "new", parameters(MOONPOOL_SANDBOX="off"), OPENS)[0] == 200

    assert asked(server, "new", folder / "other") == "refused"


def test_whole_grants_are_for_what_the_repository_says(server: RunningServer, folder: Path) -> None:
    assert asked(server, "whole", folder / "granted") == "granted"
    greedy = parameters(MOONPOOL_SANDBOX_PATHS=f"{folder}/other")
    status, reply = load(server, "whole", greedy)
    assert (status, "cannot give it more" in str(reply)) == (500, True), reply


# Where options come from

FILE = """
sandbox = "strict"
[models.one]
MOONPOOL_THREADS = 1
MOONPOOL_MEMORY_LIMIT_BYTES = "1G"
[models."t*"]
MOONPOOL_THREADS = 2
"""


@pytest.mark.promise("The server (`moonpool serve`)", "An exact name takes precedence …")
def test_the_command_line_overrides_the_environment_and_that_the_file_option_by_option(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(FILE)
    arguments = {"config": [str(file)], "model-option": ["one:MOONPOOL_THREADS=3", "*:MOONPOOL_RETRY=yes"]}
    environment = {"MOONPOOL_SERVE_MODEL_OPTION": "one:MOONPOOL_THREADS=4;one:MOONPOOL_OPEN_FILES=9"}

    options, _ = read_options(arguments, environment)

    assert [str(option) for option in options.model_option] == [
        "one:MOONPOOL_THREADS=1",
        "one:MOONPOOL_MEMORY_LIMIT_BYTES=1G",
        "t*:MOONPOOL_THREADS=2",
        "one:MOONPOOL_THREADS=4",
        "one:MOONPOOL_OPEN_FILES=9",
        "one:MOONPOOL_THREADS=3",
        "*:MOONPOOL_RETRY=yes",
    ]


@pytest.mark.promise("The server (`moonpool serve`)", "An option that does not exist, …")
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("models = 1", "models: must be tables such as [models.NAME]"),
        ("[models]\none = 1", "models.one: must be a table of options"),
        ("[models.one]\nMOONPOOL_THREAD = 1", "models.one.MOONPOOL_THREAD: there is no option"),
        ("[models.one]\nMOONPOOL_THREADS = [1]", "models.one.MOONPOOL_THREADS: must be a text"),
        ("[models.one]\nMOONPOOL_RETRY = true", 'MOONPOOL_RETRY must be "yes" or "no"'),
        ('[models."a:b"]\nMOONPOOL_THREADS = 1', "models.a:b.MOONPOOL_THREADS: there is no"),
        ("[model.one]\nMOONPOOL_THREADS = 1", 'did you mean "models"'),
        ("[models.a.b]\nMOONPOOL_THREADS = 1", 'needs quotes, as in [models."a.b"]'),
        ('[models.a]\nMOONPOOL_SANDBOX_PATHS = ["/a", "/b"]', "with commas between several"),
    ],
)
def test_a_mistake_in_the_file_is_an_error_with_its_place(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)

    with pytest.raises(BadOption) as caught:
        read_options({"config": [str(file)]}, {})
    assert what in str(caught.value)


def test_the_file_is_heard_by_a_server(tmp_path: Path, folder: Path) -> None:
    write(tmp_path / "models", "one")
    file = tmp_path / "server.toml"
    file.write_text('[models."o*"]\nMOONPOOL_SANDBOX = "strict"\n[models.none]\nMOONPOOL_THREADS = 1')
    with running(tmp_path / "models", f"--config={file}") as server:
        assert asked(server, "one", folder / "other") == "refused"
        assert "options are set for model 'none'" in server.text()
