"""The configurations of ensembles: each mistake is refused with Triton's text, at the line of the field."""

from __future__ import annotations

import pytest
from tests.ensemble_repositories import A, B, Io, chain, ensemble_text, step

from moonpool.runtime.model.config import pbtxt
from moonpool.runtime.model.config.ensembles import EnsembleStep
from moonpool.runtime.model.config.model import ConfigError, ModelConfig, unused_fields

ONE = chain(["m"])
TWO_IN = {"X": "A", "X2": "nowhere"}


def config_of(text: str) -> ModelConfig:
    raw, source = pbtxt.parse(f'name: "e"\n{text}', "config.pbtxt")
    return ModelConfig.from_dict(raw, source=source, partial=True)


def refusal(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config_of(text)
    return caught.value


@pytest.mark.promise(
    "Ensembles",
    "A configuration whose steps cannot work is refused with Triton's text, and with the line of the field.",
)
@pytest.mark.parametrize(
    ("text", "field", "what"),
    [
        (
            ensemble_text(ONE, more="instance_group { count: 2 }"),
            "instance_group",
            "instance group should not be specified for ensemble 'e'",
        ),
        (
            ensemble_text(ONE, more="optimization { priority: PRIORITY_MAX }"),
            "optimization",
            "optimization should not be specified for ensemble 'e'",
        ),
        (
            ensemble_text(ONE, more='model_warmup { name: "w" }'),
            "model_warmup",
            "model_warmup can not be specified for ensemble 'e'",
        ),
        (ensemble_text([]), "ensemble_scheduling", "must specify 'step' for ensemble 'e'"),
        (
            'platform: "ensemble"',
            "platform",
            "ensemble scheduling must be set for ensemble e whose platform is ensemble",
        ),
        (
            ensemble_text(ONE).replace('platform: "ensemble"', 'backend: "python"'),
            "ensemble_scheduling",
            "ensemble scheduling cannot be set for model 'e' whose platform is not ensemble",
        ),
        (
            ensemble_text([step("", {"X": "A"}, {"Y": "B"})]),
            "ensemble_scheduling.step[0]",
            "must specify 'model_name' in step 0 of ensemble 'e'",
        ),
        (
            ensemble_text([step("m", {}, {"Y": "B"})]),
            "ensemble_scheduling.step[0]",
            "must specify 'input_map' in step 0 of ensemble 'e'",
        ),
        (
            ensemble_text([*ONE, step("m", {"X": "A"}, {})]),
            "ensemble_scheduling.step[1]",
            "must specify 'output_map' in step 1 of ensemble 'e'",
        ),
        (
            ensemble_text([*ONE, *ONE]),
            "ensemble_scheduling.step[1].output_map",
            "ensemble tensor 'B' can appear in an output map only once for ensemble 'e' step 1",
        ),
        (
            ensemble_text([step("m", {"X": "A"}, {"Y": "A"})]),
            "ensemble_scheduling.step[0].output_map",
            "ensemble tensor 'A' can appear in an output map only once for ensemble 'e' step 0",
        ),
        (ensemble_text(ONE, inputs=(*A, Io("Q"))), "input[1]", "ensemble input 'Q' for ensemble e' is not used"),
        (ensemble_text(ONE, outputs=(*B, Io("Q"))), "output[1]", "ensemble output 'Q' for ensemble e' is not used"),
        (
            ensemble_text([*ONE, step("n", TWO_IN, {"Y": "C"})], outputs=(*B, Io("C"))),
            "output[1]",
            "output 'C' for ensemble 'e' is not written: at least one of its depending tensors, "
            "'nowhere', is not connected",
        ),
        (
            ensemble_text([step("n", {"X": "A", "X2": "B"}, {"Y": "B"})]),
            "output[0]",
            "output 'B' for ensemble 'e' is not written",
        ),
        (
            ensemble_text([*ONE, step("n", {"X": "A"}, {"Y": "C"})]),
            "ensemble_scheduling",
            "ensemble tensor 'C' is unused in ensemble 'e'",
        ),
        (
            ensemble_text(ONE, inputs=(), outputs=()),
            "ensemble_scheduling",
            "ensemble tensor 'A' is unused in ensemble 'e'",
        ),
        (
            ensemble_text([ONE[0].replace("model_name", 'model_namespace: "n" model_name')]),
            "ensemble_scheduling.step[0].model_namespace",
            "'model_namespace' in step 0 of ensemble 'e': moonpool has one namespace for all models",
        ),
    ],
)
def test_a_mistake_is_named_by_line_and_field(text: str, field: str, what: str) -> None:
    found = refusal(text)

    assert found.field == field
    assert str(found).endswith(f": {field}: {what}")
    assert found.line is not None


def test_two_schedulers_exclude_each_other() -> None:
    text = ensemble_text(ONE, more="dynamic_batching { }")

    with pytest.raises(ConfigError, match="exclude each other; keep one"):
        pbtxt.parse(text, "config.pbtxt")


def test_the_steps_are_read_in_their_order() -> None:
    scheduling = config_of(
        ensemble_text(
            [step("m", {"X": "A"}, {"Y": "t"}, 3), step("n", {"X": "t", "X2": "A"}, {"Y": "B"})],
            more="max_batch_size: 4",
        ).replace("ensemble_scheduling {", "ensemble_scheduling { max_inflight_requests: 2")
    ).ensemble

    assert scheduling is not None
    assert scheduling.max_inflight_requests == 2
    assert scheduling.models == ["m", "n"]
    assert scheduling.steps == (
        EnsembleStep("m", 3, (("X", "A"),), (("Y", "t"),)),
        EnsembleStep("n", None, (("X", "t"), ("X2", "A")), (("Y", "B"),)),
    )


def test_an_ensemble_has_no_backend_no_instances_and_nothing_that_is_ignored() -> None:
    config = config_of(ensemble_text(ONE))

    assert config.raw["backend"] == ""
    assert config.raw["instance_group"] == []
    assert config.instance_groups == ()
    assert "optimization" not in config.raw
    assert unused_fields(config.raw) == []
    assert ModelConfig.from_dict(config.raw) == config


def test_other_models_have_no_steps() -> None:
    raw, source = pbtxt.parse('name: "m" backend: "python"', "config.pbtxt")

    assert ModelConfig.from_dict(raw, source=source, partial=True).ensemble is None
