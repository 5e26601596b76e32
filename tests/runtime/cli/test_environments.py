"""`moonpool env`: what it lists, builds and removes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.cli.shell import CommandLine, write_model
from tests.wheels import variables, write_numpy, write_wheel

CONFIG = """
input [{ name: "X" data_type: TYPE_FP32 dims: [1] }] output [{ name: "Y" data_type: TYPE_FP32 dims: [1] }]
parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "$$TRITON_MODEL_DIRECTORY/requirements.txt" } }
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models with lists, one of which cannot be built, and one without."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_numpy(wheels)
    write_wheel(wheels, "greeting", {"greeting.py": ""})
    for name, value in variables(wheels).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    repository = tmp_path / "models"
    for name, wanted in (("good", "greeting==1"), ("bad", "nowhere==1")):
        write_model(repository, name, "", CONFIG)
        (repository / name / "requirements.txt").write_text(wanted + "\n")
    write_model(repository, "plain", "", CONFIG.split("parameters")[0])
    return repository


@pytest.mark.promise("Environments", "`moonpool env` lists, builds and removes the environments that are kept.")
def test_environments_are_built_listed_and_removed(cli: CommandLine, repository: Path) -> None:
    assert cli("env", "list").stdout == ""

    built = cli("env", "build", repository)

    assert built.returncode == 1
    # Minutes may pass before the next line.
    assert f"builds the environment of {repository / 'good' / 'requirements.txt'} with " in (built.stderr)
    bad, good = sorted(built.stdout.splitlines())
    assert bad.startswith("bad: error: no environment can be built of ")
    assert "nowhere" in bad
    assert good.startswith(f"good: {cli.folder / 'cache' / 'moonpool' / 'environments'}/")
    folder = good.split()[1]
    assert cli("env", "build", repository, "good", "plain").returncode == 0
    head, row = cli("env", "list").stdout.splitlines()
    assert head.split() == ["size", "last", "use", "folder", "of"]
    assert row.endswith(f" MB  0.0 days ago  {folder}  {repository / 'good' / 'requirements.txt'}")
    assert cli("env", "prune", "--older-than", 1).stdout == ""
    assert cli("env", "prune").stdout == f"removed {folder}\n"
    assert cli("env", "list").stdout == ""


def test_an_environment_is_built_as_a_server_with_these_options_wants_it(cli: CommandLine, repository: Path) -> None:
    usual, strict = (
        cli("env", "build", repository, "good", *way).stdout.split()[1] for way in ((), ("--sandbox=strict",))
    )

    assert usual != strict


@pytest.mark.parametrize("arguments", [["build"], ["list", "models"], ["prune", "models"]])
def test_a_repository_is_for_build(cli: CommandLine, arguments: list[str]) -> None:
    ended = cli("env", *arguments)

    assert ended.returncode == 2
    assert "REPO is for build, which needs it" in ended.stderr
