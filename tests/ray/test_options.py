"""Options of deployments that follow from configurations. Needs no Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moonpool
from moonpool.ray.options import Options, Prepared, deployment_options, prepare_model

MODEL = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
TENSOR = '[ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]'


def written(folder: Path, name: str, config: str, platform: str = 'backend: "python"') -> str:
    """Write a model with this configuration, and return its name."""
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1" / "model.py").write_text(MODEL)
    text = f"{platform}\ninput {TENSOR}\noutput {TENSOR.replace('X', 'Y')}\n{config}"
    (folder / name / "config.pbtxt").write_text(text)
    return name


def prepared(folder: Path, name: str, options: Options | None = None, **runtime: Any) -> Prepared:
    with moonpool.Runtime(folder, models=[], **runtime) as reader:
        return prepare_model(reader, name, options or Options())


def derived(folder: Path, config: str, options: Options | None = None) -> dict[str, Any]:
    """Return the options of a deployment of one model with this configuration."""
    written(folder, "m", config)
    return deployment_options([prepared(folder, "m", options)], options or Options())


@pytest.mark.promise(
    "Ray Serve",
    "A replica takes as many requests at once as keep all instances of its model busy and fill their next batches.",
)
@pytest.mark.parametrize(
    ("config", "ongoing"),
    [
        ("max_batch_size: 8 instance_group [ { count: 3 kind: KIND_CPU } ]", 2 * 3 * 8),
        ("max_batch_size: 64 instance_group [ { count: 1 } ]", 128),
        ("", 16),
        (
            "max_batch_size: 4 sequence_batching { oldest { max_candidate_sequences: 50 } } "
            "instance_group [ { count: 2 kind: KIND_CPU } ]",
            2 * 2 * 50,
        ),
    ],
)
def test_ongoing_requests_follow_from_instances_and_batches(tmp_path: Path, config: str, ongoing: int) -> None:
    assert derived(tmp_path, config)["max_ongoing_requests"] == ongoing


@pytest.mark.promise(
    "Ray Serve", "Queue size, GPUs, processors and memory of a replica follow from the configuration of its models."
)
def test_queues_and_resources_follow_from_the_configuration(tmp_path: Path) -> None:
    chosen = derived(
        tmp_path,
        "max_batch_size: 8\n"
        "dynamic_batching { default_queue_policy { max_queue_size: 32 } }\n"
        "instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0, 1 ] } ]\n"
        'parameters { key: "MOONPOOL_CPUS" value: { string_value: "0" } }\n'
        'parameters { key: "MOONPOOL_MEMORY_LIMIT_BYTES" value: { string_value: "1G" } }\n'
        'parameters { key: "MOONPOOL_EXECUTE_TIMEOUT_S" value: { string_value: "100" } }',
    )

    assert chosen["max_queued_requests"] == 32
    assert chosen["graceful_shutdown_timeout_s"] == 110
    # This machine need not have these GPUs.
    assert chosen["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 2, "memory": 4 << 30}


def test_a_model_without_limits_is_given_one_processor(tmp_path: Path) -> None:
    chosen = derived(tmp_path, "")

    assert chosen["max_queued_requests"] == -1
    assert chosen["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 0}


def test_options_go_before_the_configuration_and_those_of_ray_before_all(tmp_path: Path) -> None:
    options = Options(
        replicas=3,
        num_cpus=0.5,
        num_gpus=0.25,
        memory_bytes=1 << 20,
        max_ongoing_requests=7,
        max_queued_requests=9,
        deployment={"health_check_period_s": 1, "ray_actor_options": {"num_cpus": 2}},
    )
    chosen = derived(tmp_path, "", options)

    assert chosen["num_replicas"] == 3
    assert chosen["max_ongoing_requests"] == 7
    assert chosen["max_queued_requests"] == 9
    assert chosen["health_check_period_s"] == 1
    assert chosen["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 0.25, "memory": 1 << 20}


def test_what_is_live_changes_what_is_derived(tmp_path: Path) -> None:
    options = Options(instances=5, config={"max_batch_size": 10})

    assert derived(tmp_path, "", options)["max_ongoing_requests"] == 100


@pytest.mark.promise("Ray Serve", "The members of an ensemble are in the replica that has the ensemble.")
def test_an_ensemble_counts_with_its_members(tmp_path: Path) -> None:
    limit = 'parameters { key: "MOONPOOL_MEMORY_LIMIT_BYTES" value: { string_value: "1M" } }'
    group = "max_batch_size: 16 instance_group [ { count: 4 kind: KIND_CPU } ]"
    written(tmp_path, "member", f"{group}\n{limit}")
    step = '{ model_name: "member" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } }'
    written(
        tmp_path, "ensemble", f"max_batch_size: 16\nensemble_scheduling {{ step [ {step} ] }}", 'platform: "ensemble"'
    )

    chosen = deployment_options([prepared(tmp_path, "ensemble")], Options())

    assert chosen["max_ongoing_requests"] == 2 * 4 * 16
    assert chosen["ray_actor_options"]["memory"] == 4 << 20


@pytest.mark.promise(
    "Ray Serve",
    "A request is sent to a second replica only if every model that takes part says that it is idempotent, with "
    "MOONPOOL_RETRY.",
)
def test_a_model_is_idempotent_if_all_that_come_with_it_are(tmp_path: Path) -> None:
    retry = 'parameters { key: "MOONPOOL_RETRY" value: { string_value: "yes" } }'
    written(tmp_path, "once", "")
    written(tmp_path, "twice", retry)

    assert not prepared(tmp_path, "once").traits("d").is_idempotent
    assert prepared(tmp_path, "twice").traits("d").is_idempotent
    with_once = prepared(tmp_path, "twice", Options(with_models=["once"]))
    assert not with_once.traits("d").is_idempotent


def test_traits_name_what_decides_about_the_way_to_a_replica(tmp_path: Path) -> None:
    written(tmp_path, "sequences", "max_batch_size: 1 sequence_batching { }")
    written(tmp_path, "decoupled", "model_transaction_policy { decoupled: true }")

    assert prepared(tmp_path, "sequences").traits("d").has_sequences
    assert prepared(tmp_path, "decoupled").traits("d").is_decoupled
