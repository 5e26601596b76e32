"""`--model-config-name`: models with a configuration for one kind of machine, from the option to the load."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.inside import registry_of
from tests.server.repositories import CONFIG, write
from tests.server.running import running

import moonpool
from moonpool.runtime.server.options.sources import BadOption, read_options
from moonpool.runtime.server.repository_control import RepositoryControl


def named(folder: Path, text: str, name: str = "h100") -> Path:
    file = folder / "m" / "configs" / f"{name}.pbtxt"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "With `--model-config-name=<name>`, the file `configs/<name>.pbtxt` of a model is its configuration, if it has "
    "one.",
)
def test_a_model_is_configured_by_the_file_of_that_name(tmp_path: Path) -> None:
    write(tmp_path, "m")
    write(tmp_path, "other")
    named(tmp_path, CONFIG.replace("max_batch_size: 4", "max_batch_size: 3"))
    named(tmp_path, "this is not read", "a100")
    with running(tmp_path, "--model-config-name=h100") as server:
        sizes = {name: server.get(f"/v2/models/{name}/config")[1]["max_batch_size"] for name in ("m", "other")}
    assert sizes == {"m": 3, "other": 4}


def test_its_instances_change_while_it_serves(tmp_path: Path) -> None:
    write(tmp_path, "m")
    file = named(tmp_path, CONFIG)
    with moonpool.Runtime(tmp_path, models=[]) as runtime:
        registry_of(runtime).repositories.config_name = "h100"
        control = RepositoryControl(runtime, mode="poll")
        control.poll()
        (before,) = runtime.instances("m")
        # The other configurations are no part of the model.
        named(tmp_path, "whatever", "a100")
        (tmp_path / "m" / "config.pbtxt").write_text("whatever")
        file.write_text(CONFIG.replace("[{ kind", "[{ count: 2 kind"))
        control.poll()
        assert before["pid"] in [each["pid"] for each in runtime.instances("m")]
        assert len(runtime.instances("m")) == 2

        file.write_text("nonsense")
        with pytest.raises(moonpool.LoadFailed, match="h100"):
            RepositoryControl(runtime).load("m")
        assert len(runtime.instances("m")) == 2


@pytest.mark.parametrize("name", ["a b", "../secret", "a/b", ".hidden", "é"])
def test_a_name_that_is_no_files_is_refused(name: str) -> None:
    with pytest.raises(BadOption, match="must be a name of letters"):
        read_options({"model-config-name": [name]}, {})
