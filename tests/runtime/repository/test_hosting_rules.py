"""The operator's rules hold for all models of a runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.inside import registry_of
from tests.server.repositories import CONFIG, write

import moonpool
from moonpool.runtime.repository.grants import Grants
from moonpool.runtime.repository.loading import HostingRules, Wanted, prepare
from moonpool.runtime.repository.repository import ModelRepositories

COMPLETES = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [4]})
        raise ValueError("was asked")

    def execute(self, requests):
        return []
"""


def says(sandbox: str | None) -> str:
    if sandbox is None:
        return CONFIG
    value = f'key: "MOONPOOL_SANDBOX" value {{ string_value: "{sandbox}" }}'
    return f"{CONFIG}\nparameters {{ {value} }}"


@pytest.mark.promise(
    "The server (`moonpool serve`)", "A model may raise the level of its sandbox above the server's, but not lower it."
)
@pytest.mark.parametrize(
    ("rule", "said", "level"),
    [
        (None, None, "standard"),
        (None, "off", "off"),
        ("off", None, "off"),
        ("standard", None, "standard"),
        ("strict", None, "strict"),
        ("standard", "off", "standard"),
        ("standard", "strict", "strict"),
        ("strict", "standard", "strict"),
        ("off", "standard", "standard"),
    ],
)
def test_a_model_may_raise_the_level_of_its_sandbox_but_not_lower_it(
    tmp_path: Path, rule: str | None, said: str | None, level: str
) -> None:
    write(tmp_path, "m", config=says(said))
    prepared = prepare(Wanted("m"), ModelRepositories([tmp_path]), lambda _: None, HostingRules(rule))

    assert prepared.models[0].options.sandbox == level


def test_a_model_is_not_asked_to_complete_its_configuration_where_that_is_off(tmp_path: Path) -> None:
    write(tmp_path, "whole", COMPLETES)
    write(tmp_path, "partial", COMPLETES, 'backend: "python"')
    with moonpool.Runtime(tmp_path, models=()) as runtime:
        with pytest.raises(moonpool.LoadFailed, match="was asked"):
            runtime.load("whole")
        registry_of(runtime).rules = HostingRules(completes=False)
        runtime.load("whole")
        assert [tensor.name for tensor in runtime.config("whole").outputs] == ["OUT"]
        with pytest.raises(moonpool.ConfigError, match="must specify"):
            runtime.load("partial")


def linked_version(models: Path, outside: Path) -> None:
    (models / "m" / "1" / "model.py").rename(outside / "model.py")
    (models / "m" / "1").rmdir()
    (models / "m" / "1").symlink_to(outside)


def linked_file(models: Path, outside: Path) -> None:
    (models / "m" / "1" / "model.py").rename(outside / "model.py")
    (models / "m" / "1" / "model.py").symlink_to(outside / "model.py")


@pytest.mark.promise(
    "The model repository of a server",
    "Under a server-wide sandbox, a link below a model's folder gives the model nothing outside of it.",
)
@pytest.mark.parametrize("link", [linked_version, linked_file])
def test_a_server_that_contains_its_models_lets_none_have_more_by_a_link(
    tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    write(tmp_path / "models", "m")
    (tmp_path / "outside").mkdir()
    link(tmp_path / "models", tmp_path / "outside")

    def load(rules: HostingRules) -> None:
        prepare(Wanted("m"), ModelRepositories([tmp_path / "models"]), lambda _: None, rules)

    with pytest.raises(moonpool.ConfigError, match="the files at the end of the link") as caught:
        load(HostingRules("strict"))
    assert "--sandbox-grants=m" in str(caught.value)
    load(HostingRules("strict", grants=Grants(["m"])))
    load(HostingRules("standard"))
    # The folders at the top of a repository are the operator's.
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "m").symlink_to(tmp_path / "other" / "m")
    write(tmp_path / "other", "m")
    prepare(Wanted("m"), ModelRepositories([tmp_path / "linked"]), lambda _: None, HostingRules("strict"))
