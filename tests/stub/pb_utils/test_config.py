"""Tests the argument of `auto_complete_config`, with Triton's texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from moonpool.stub.pb_utils.config import ModelConfig

pytestmark = pytest.mark.promise("Models", "`triton_python_backend_utils` has the names, types, exceptions …")

FP32_4 = {"name": "X", "data_type": "TYPE_FP32", "dims": [4]}


def config(**fields: Any) -> ModelConfig:
    return ModelConfig(json.dumps({"name": "M", "max_batch_size": 0, "input": [], "output": [], **fields}))


def test_omitted_fields_are_filled_in() -> None:
    one = config()
    one.set_max_batch_size(4)
    one.set_dynamic_batching()
    one.add_input({**FP32_4, "optional": True})
    one.add_output(FP32_4)
    one.set_model_transaction_policy({"decoupled": True})

    assert one.as_dict() == {
        "name": "M",
        "max_batch_size": 4,
        "dynamic_batching": {},
        "input": [{**FP32_4, "optional": True}],
        "output": [FP32_4],
        "model_transaction_policy": {"decoupled": True},
    }


def test_changes_to_the_dict_are_kept() -> None:
    one = config()
    one.as_dict()["max_batch_size"] = 7

    assert one.as_dict()["max_batch_size"] == 7


@pytest.mark.parametrize("kind", ["input", "output"])
def test_a_tensor_that_is_named_only_is_completed(kind: str) -> None:
    one = config(**{kind: [{"name": "X", "data_type": "TYPE_INVALID", "dims": []}]})
    getattr(one, f"add_{kind}")(FP32_4)

    assert one.as_dict()[kind] == [FP32_4]


def test_completions_that_agree_change_nothing() -> None:
    one = config(max_batch_size=4, dynamic_batching={"preferred_batch_size": [4]}, input=[FP32_4])
    before = json.dumps(one.as_dict())
    one.set_max_batch_size(4)
    one.set_dynamic_batching()
    one.add_input(FP32_4)

    assert json.dumps(one.as_dict()) == before


REFUSALS: list[tuple[dict[str, Any], Callable[[ModelConfig], None], str]] = [
    (
        {"max_batch_size": 6},
        lambda c: c.set_max_batch_size(4),
        "configuration specified max_batch_size 6, but in auto-complete-config function for model "
        "'M' specified max_batch_size 4",
    ),
    (
        {"sequence_batching": {}},
        lambda c: c.set_dynamic_batching(),
        "Configuration specified scheduling_choice as 'sequence_batching', but "
        "auto-complete-config function for model 'M' tries to set scheduling_choice as "
        "'dynamic_batching'",
    ),
    (
        {"ensemble_scheduling": {}},
        lambda c: c.set_dynamic_batching(),
        "Configuration specified scheduling_choice as 'ensemble_scheduling', but "
        "auto-complete-config function for model 'M' tries to set scheduling_choice as "
        "'dynamic_batching'",
    ),
    (
        {"model_transaction_policy": {"decoupled": False}},
        lambda c: c.set_model_transaction_policy({"decoupled": True}),
        "trying to change decoupled property in auto-complete-config for model 'M', which is already set to 'False'.",
    ),
]


@pytest.mark.parametrize(("fields", "change", "text"), REFUSALS)
def test_contradictions_are_refused_in_tritons_words(
    fields: dict[str, Any], change: Callable[[ModelConfig], None], text: str
) -> None:
    one = config(**fields)
    before = json.dumps(one.as_dict())
    with pytest.raises(ValueError, match="M") as caught:
        change(one)

    assert str(caught.value) == text
    assert json.dumps(one.as_dict()) == before
