"""The answers of a server about itself and its models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.server.repositories import BAD, CONFIG, write

import moonpool
from moonpool.runtime.server.metadata import Metadata
from moonpool.runtime.server.repository_control import RepositoryControl


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[moonpool.Runtime]:
    models = tmp_path_factory.mktemp("models")
    write(models, "two", config=f"{CONFIG}\nversion_policy {{ all {{}} }}")
    write(models, "two", config=f"{CONFIG}\nversion_policy {{ all {{}} }}", version=3)
    write(models, "flat", config=CONFIG.replace("max_batch_size: 4", ""))
    write(models, "bad", BAD)
    with moonpool.Runtime(Path(models), models=()) as runtime:
        RepositoryControl(runtime).load_all()
        yield runtime


@pytest.fixture
def metadata(runtime: moonpool.Runtime) -> Metadata:
    return Metadata(runtime, server_id="me")


def test_a_server_says_who_it_is_and_what_it_can(metadata: Metadata) -> None:
    said = metadata.server_metadata()

    assert (said["name"], said["version"]) == ("me", moonpool.__version__)
    assert {"binary_tensor_data", "statistics", "model_repository"} < set(said["extensions"])


def test_metadata_has_all_versions_and_the_batch_dimension(metadata: Metadata) -> None:
    assert metadata.model_metadata("two") == {
        "name": "two",
        "versions": ["1", "3"],
        "platform": "python",
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [-1, 4]}],
    }
    assert metadata.model_metadata("two", "1")["versions"] == ["1"]
    assert metadata.model_metadata("flat")["inputs"][0]["shape"] == [4]


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [
        # The one that was meant is not named: a client may be one that must not see the index.
        ("twoo", "", "Request for unknown model: 'twoo' is not found"),
        ("nope", "", "Request for unknown model: 'nope' is not found"),
        ("two", "2", "Request for unknown model: 'two' version 2 is not found"),
        ("bad", "", "Request for unknown model: 'bad' has no available versions"),
        ("two", "x", "failed to get model version from specified version string 'x'"),
    ],
)
def test_missing_models_have_no_metadata_and_no_configuration(
    metadata: Metadata, name: str, version: str, text: str
) -> None:
    for ask in (metadata.model_metadata, metadata.model_config):
        with pytest.raises(moonpool.MoonpoolError, match=text):
            ask(name, version)


def test_the_configuration_is_triton_s_json(metadata: Metadata) -> None:
    config = metadata.model_config("two", "3")

    assert (config["name"], config["max_batch_size"]) == ("two", 4)
    assert config["input"][0]["data_type"] == "TYPE_FP32"


def test_readiness_is_that_of_the_version(metadata: Metadata) -> None:
    ready = [("two", ""), ("two", "1"), ("two", "2"), ("nope", ""), ("bad", ""), ("bad", "1")]

    assert [metadata.model_ready(*each) for each in ready] == [True, True, *[False] * 4]


def test_statistics_are_of_one_version_or_of_all(metadata: Metadata, runtime: moonpool.Runtime) -> None:
    runtime.infer("two", {"IN": np.ones((3, 4), np.float32)}, version=1)

    (one,) = metadata.statistics("two", "1")["model_stats"]
    assert (one["inference_count"], one["inference_stats"]["success"]["count"]) == (3, 1)
    stats = metadata.statistics()["model_stats"]
    assert [(s["name"], s["version"]) for s in stats] == [("flat", "1"), ("two", "1"), ("two", "3")]
    assert len(metadata.statistics("two")["model_stats"]) == 2
    for name, version in (("nope", ""), ("bad", ""), ("two", "2")):
        with pytest.raises(moonpool.InvalidRequest, match="is not available"):
            metadata.statistics(name, version)
