"""Tests of `auto_complete_config`: the changes that it may make to a configuration, and its mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import moonpool

pytestmark = pytest.mark.promise(
    "Backends",
    "`auto_complete_config` changes tensors, the largest batch, the transaction policy and, "
    "where none is configured, the scheduler; nothing else.",
)

MODEL = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(c):
        c.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [4]})
        c.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [4]})
        CHANGE
        return c

    def execute(self, requests):
        return []
"""


@pytest.fixture(scope="module")
def runtime() -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime() as runtime:
        yield runtime


class Completion:
    """Load a model that changes its configuration in some way."""

    def __init__(self, runtime: moonpool.Runtime, folder: Path) -> None:
        self._runtime = runtime
        self._folder = folder

    def load(self, change: str, config: str = "") -> dict[str, Any]:
        (self._folder / "m" / "1").mkdir(parents=True)
        (self._folder / "m" / "1" / "model.py").write_text(MODEL.replace("CHANGE", change))
        (self._folder / "m" / "config.pbtxt").write_text('backend: "python" ' + config)
        self._runtime.load("m", self._folder / "m")
        return self._runtime.config("m").raw


@pytest.fixture
def completion(runtime: moonpool.Runtime, tmp_path: Path) -> Iterator[Completion]:
    yield Completion(runtime, tmp_path)
    if "m" in runtime.models():
        runtime.unload("m")


@pytest.mark.parametrize(
    ("change", "config", "field", "value"),
    [
        ("c.set_max_batch_size(8)", "", "max_batch_size", 8),
        ('c.as_dict()["max_batch_size"] = 2', "max_batch_size: 8", "max_batch_size", 2),
        ('c.set_model_transaction_policy({"decoupled": True})', "", "model_transaction_policy", {"decoupled": True}),
        (
            'c.as_dict()["model_transaction_policy"] = {"decoupled": False}',
            "model_transaction_policy { decoupled: true }",
            "model_transaction_policy",
            {"decoupled": False},
        ),
    ],
)
def test_a_model_completes_these_fields(
    completion: Completion, change: str, config: str, field: str, value: object
) -> None:
    assert completion.load(change, config)[field] == value


def test_a_mistake_of_the_file_is_told_with_its_place(completion: Completion) -> None:
    config = 'input [\n{ name: "Z"\n dims: [ 4 ] } ]'
    with pytest.raises(moonpool.ConfigError, match=r"config\.pbtxt:1: input\[0\]\.data_type"):
        completion.load("pass", config)


@pytest.mark.promise("At the limits", "A value that does not fit …")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("return", "auto_complete_config function in model 'm' must return a valid pb.ModelConfig"),
        ('c.as_dict()["x"] = object()', "TypeError: Object of type object is not JSON serializable"),
        ('c.as_dict()["parameters"] = {"a": {"string_value": "x" * (1 << 22)}}', "and 4194304 is the most"),
        ("raise KeyError('k')", "KeyError: 'k'\n\nAt:\n"),
        ("import sys; sys.exit(3)", "SystemExit: 3\n\nAt:\n"),
        ('c.as_dict()["max_batch_size"] = float("nan")', "max_batch_size: must be an integer"),
        (
            'c.as_dict()["input"][0]["dims"] = [0]',
            "input[0].dims: model input 'X' dimension must be integer >= 1, or -1 to indicate a "
            "variable-size dimension for m (said by auto_complete_config)",
        ),
        ('c.as_dict()["input"][0]["data_type"] = "TYPE_INVALID"', "model input 'X' must specify 'data_type' for m"),
    ],
)
def test_a_mistake_in_it_fails_the_load(completion: Completion, change: str, text: str) -> None:
    with pytest.raises(moonpool.MoonpoolError) as caught:
        completion.load(change)
    assert text in str(caught.value)


@pytest.mark.promise(
    "The sandbox: grants",
    "A configuration that a model completes in `auto_complete_config` needs the grants of a written one.",
)
@pytest.mark.promise("Hostile models", "A configuration that a model completes needs the grants of one that …")
def test_a_contained_model_completes_nothing_that_needs_a_grant(tmp_path: Path) -> None:
    change = 'c.as_dict()["sequence_batching"] = {"max_sequence_idle_microseconds": 10**15}'
    asked = f"m:SEQUENCE_IDLE_US={10**15}"
    with moonpool.Runtime(sandbox="strict") as runtime:
        what = rf'Runtime\(sandbox_grants=\["{asked}"\]\) \(said by auto_complete_config\)$'
        with pytest.raises(moonpool.ConfigError, match=what):
            Completion(runtime, tmp_path).load(change)
        assert runtime.models() == {}
    with moonpool.Runtime(tmp_path, sandbox="strict", sandbox_grants=[asked]) as runtime:
        batching = runtime.config("m").sequence_batching
        assert batching is not None
        assert batching.max_idle_us == 10**15
