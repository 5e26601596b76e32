"""The most that a configuration may ask for, whichever way it comes, and how an operator raises it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.server.repositories import CONFIG, ECHO, write

import moonpool
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.limits import ConfigLimits
from moonpool.runtime.model.config.model import ConfigError, ModelConfig, Source, minimal
from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.model.source import ModelSource
from moonpool.runtime.server.options.sources import BadOption
from moonpool.runtime.server.process import config_limits
from moonpool.runtime.server.repository_control import RepositoryControl
from moonpool.runtime.stubs.start_message import completed

pytestmark = pytest.mark.promise(
    "Models",
    "A configuration that asks for more instances, versions, tensors, levels or list entries "
    "than an operator allows is refused, and so is one that is too long or too deep, wherever "
    "it comes from. The error names the field and the option.",
)

TENSOR = {"data_type": "TYPE_FP32", "dims": [4]}
WHOLE = {"backend": "python", "input": [{"name": "IN", **TENSOR}], "output": [{"name": "OUT", **TENSOR}]}


def tensors(count: int) -> list[dict[str, Any]]:
    return [{"name": f"T{number}", **TENSOR} for number in range(count)]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# A change of a configuration in JSON, the field that the error names, and the limit that it names.
TOO_MUCH: list[tuple[dict[str, Any], str, str]] = [
    ({"instance_group": [{"count": 2_000_000_000}]}, "instance_group[0].count", "instances"),
    ({"instance_group": [{"count": 512}] * 3}, "instance_group[2].count", "instances"),
    ({"instance_group": [{}] * 1025}, "instance_group[1024].count", "instances"),
    ({"instance_group": [{}] * 5000}, "instance_group", "items"),
    ({"instance_group": [{"gpus": [0] * 5000}]}, "instance_group[0].gpus", "items"),
    ({"input": tensors(4097)}, "input", "inputs"),
    ({"sequence_batching": {"oldest": {"max_candidate_sequences": 65537}}},
     "sequence_batching.oldest.max_candidate_sequences", "sequences"),
    ({"sequence_batching": {"direct": {}}, "max_batch_size": 65537}, "max_batch_size", "sequences"),
    ({"output": tensors(4097)}, "output", "outputs"),
    ({"input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1] * 5000}]}, "input[0].dims", "items"),
    ({"dynamic_batching": {"preferred_batch_size": [1] * 5000}},
     "dynamic_batching.preferred_batch_size", "items"),
    ({"dynamic_batching": {"priority_levels": 2**63, "default_priority_level": 1}},
     "dynamic_batching.priority_levels", "priority_levels"),
    ({"dynamic_batching": {"priority_levels": str(2**63), "default_priority_level": 1}},
     "dynamic_batching.priority_levels", "priority_levels"),
    ({"version_policy": {"specific": {"versions": [1] * 5000}}},
     "version_policy.specific.versions", "items"),
    ({"parameters": {str(n): {"string_value": ""} for n in range(5000)}}, "parameters", "items"),
    ({"metric_tags": {f"t{n}": "" for n in range(5000)}}, "metric_tags", "items"),
    ({"sequence_batching": {"control_input": [{}] * 5000}}, "sequence_batching.control_input", "items"),
]  # fmt: skip


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write(tmp_path / "models", "m")
    return tmp_path / "models"


@pytest.mark.parametrize(("change", "field", "limit"), TOO_MUCH)
def test_a_configuration_beyond_a_limit_is_refused_with_its_field_and_the_option(
    models: Path, change: dict[str, Any], field: str, limit: str
) -> None:
    with moonpool.Runtime(models, models=()) as runtime:
        with pytest.raises(ConfigError) as caught:
            runtime.load("m", config=change)
        assert caught.value.field == field
        assert f'Runtime(config_limits=["{limit}=NUMBER"])' in str(caught.value)
        # A client's load has the same limits, with a configuration alone and with files.
        whole = json.dumps({**WHOLE, **change})
        for files in (None, {"file:1/model.py": ECHO.encode()}):
            with pytest.raises(LoadFailed) as failed:
                RepositoryControl(runtime).load("m", whole, files)
            assert f"{field}: asks for " in str(failed.value)
        assert runtime.models() == {}


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("instance_group [{ count: 2000000000 }]", 2, "instance_group[0].count: asks for 2000000000"),
        ("input { }\n" * 4097, 2, "input: asks for 4097 entries, and 4096 is the most"),
        ("dynamic_batching { priority_levels: 9999 default_priority_level: 1 }", 2,
         "dynamic_batching.priority_levels: asks for 9999 levels, and 1024 is the most"),
    ],
)  # fmt: skip
def test_a_file_that_asks_for_too_much_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, what: str
) -> None:
    file = write(tmp_path, "m", config=f'backend: "python"\n{text}')
    with moonpool.Runtime(tmp_path, models=()) as runtime, pytest.raises(ConfigError) as caught:
        runtime.load("m")
    assert str(caught.value).startswith(f"{file.parent.parent}/config.pbtxt:{line}: {what}")


@pytest.mark.parametrize(
    "change", [each for each in TOO_MUCH if each[1].split(".")[0] in ("input", "output", "dynamic_batching")]
)  # fmt: skip
def test_a_model_completes_its_configuration_within_the_limits(change: tuple[dict[str, Any], str, str]) -> None:
    config = ModelConfig.from_dict({**minimal("m"), "max_batch_size": 4}, partial=True)
    answer, field, limit = change
    source = ModelSource("triton", Path("model.py"), None, Path(), Path())
    model = Model(config, ModelOptions(), 1, source)
    with pytest.raises(ConfigError) as caught:
        completed(model, {**config.raw, **answer})
    assert caught.value.field == field
    assert limit in str(caught.value)


COMPLETES = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        for number in range(5000):
            config.add_output({"name": f"O{number}", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [4]})
        return config

    def execute(self, requests):
        return []
"""


def test_outputs_that_a_model_adds_are_bounded_as_an_operator_says(tmp_path: Path) -> None:
    write(tmp_path, "m", COMPLETES, 'backend: "python"')
    with (
        moonpool.Runtime(tmp_path, models=()) as runtime,
        pytest.raises(ConfigError, match="output: asks for 5000 entries, and 4096 is the most"),
    ):
        runtime.load("m")
    with moonpool.Runtime(tmp_path, config_limits=["outputs=5000"]) as runtime:
        assert len(runtime.config("m").outputs) == 5000


def test_versions_and_the_instances_of_all_are_counted(tmp_path: Path) -> None:
    policy = f"{CONFIG}\nversion_policy {{ all {{ }} }}"
    for version in (1, 2, 3):
        write(tmp_path, "m", config=policy, version=version)
    with (
        moonpool.Runtime(tmp_path, models=(), config_limits=["versions=2"]) as runtime,
        pytest.raises(ConfigError, match="version_policy: asks for 3 versions, and 2 is the most"),
    ):
        runtime.load("m")
    with (
        moonpool.Runtime(tmp_path, models=(), config_limits=["instances=2"]) as runtime,
        pytest.raises(ConfigError, match="asks for 3 instances, and 2 is the most"),
    ):
        runtime.load("m")
    with moonpool.Runtime(tmp_path, config_limits=["versions=3", "instances=3"]) as runtime:
        assert runtime.models() == {"m": [1, 2, 3]}


def test_a_configuration_that_is_too_long_is_not_parsed(models: Path) -> None:
    with moonpool.Runtime(models, models=(), config_limits=["config_bytes=1000"]) as runtime:
        control = RepositoryControl(runtime)
        # The size is checked before the text is parsed, so the error is not about JSON.
        with pytest.raises(LoadFailed, match="is longer than 1000 bytes; an operator raises it"):
            control.load("m", "x" * 1001)
        write(models, "m", config=CONFIG + "x" * 1001)
        with pytest.raises(LoadFailed, match=r"config\.pbtxt: is longer than 1000 bytes"):
            control.load("m")


@pytest.mark.parametrize("depth", [40, 900])
def test_a_configuration_that_is_nested_without_reason_is_refused(models: Path, depth: int) -> None:
    config = {**WHOLE, "parameters": {"a": nested(depth)}}
    with moonpool.Runtime(models, models=()) as runtime, pytest.raises(LoadFailed, match="is nested more than 32 deep"):
        RepositoryControl(runtime).load("m", json.dumps(config))


def test_an_operator_raises_limits_by_name() -> None:
    limits = ConfigLimits().raised(["instances=5000", "items=1"])
    assert (limits.instances, limits.items, limits.inputs) == (5000, 1, 4096)
    limits.check_instances(ModelConfig.from_dict(minimal("m"), partial=True).instance_groups, 5000, Source())


@pytest.mark.parametrize("text", ["", "instances", "instances=", "instances=0", "instances=-1", "option=1",
                                  "instances=99999999999", "instances=9999999999", "bogus=1"])  # fmt: skip
def test_a_limit_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        ConfigLimits().raised([text])


def test_a_server_takes_limits_from_its_command_line() -> None:
    assert config_limits(["instances=2000", "outputs=7"]).instances == 2000
    with pytest.raises(BadOption, match="--model-config-limit must be one of config_bytes, instances"):
        config_limits(["count=2000"])


def test_texts_of_errors_are_no_longer_than_somebody_reads(models: Path) -> None:
    write(models, "m", config=f"{CONFIG}\n{'x' * 500_000}: 1")
    with moonpool.Runtime(models, models=()) as runtime:
        for change in ({}, {"y" * 500_000: 1}, {"parameters": {"z" * 500_000: 1}}):
            with pytest.raises(ConfigError) as caught:
                runtime.load("m", config=change)
            assert len(str(caught.value)) < 3000
