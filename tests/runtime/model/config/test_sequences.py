"""The sequence batcher of a configuration: what it means, and what is refused in Triton's words."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.runtime.model.config import pbtxt
from moonpool.runtime.model.config.model import (
    ConfigError,
    ModelConfig,
    SequenceBatching,
    SequenceControl,
)

START = "kind: CONTROL_SEQUENCE_START"


def batching(text: str, max_batch_size: int = 4) -> SequenceBatching | None:
    raw, source = pbtxt.parse(
        f"""
        name: "m" backend: "python" max_batch_size: {max_batch_size}
        input {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }}
        output {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }}
        {text}
        """,
        "config.pbtxt",
    )
    return ModelConfig.from_dict(raw, source=source).sequence_batching


def control(text: str) -> str:
    return f'sequence_batching {{ control_input {{ name: "C" control {{ {text} }} }} }}'


def test_without_it_there_is_none() -> None:
    assert batching("") is None


@pytest.mark.parametrize(
    ("text", "max_batch_size", "wanted"),
    [
        ("", 4, {"is_direct": True, "slots": 4}),
        ("", 0, {"is_direct": True, "slots": 1}),
        ("direct { minimum_slot_utilization: 0.5 max_queue_delay_microseconds: 7 }", 2,
         {"slots": 2, "minimum_slot_utilization": 0.5, "max_queue_delay_us": 7}),
        ("oldest { }", 4, {"is_direct": False, "slots": 4, "preferred_batch_sizes": (4,)}),
        ("oldest { max_candidate_sequences: 9 preferred_batch_size: [ 4, 2 ] "
         "max_queue_delay_microseconds: 3 preserve_ordering: true }", 4,
         {"is_direct": False, "slots": 9, "preferred_batch_sizes": (2, 4),
          "max_queue_delay_us": 3, "preserve_ordering": True}),
        ("oldest { max_candidate_sequences: 3 }", 0, {"is_direct": False, "slots": 3}),
        ("iterative_sequence: true", 0, {"slots": 1, "is_iterative": True}),
        ("max_sequence_idle_microseconds: 5", 1, {"slots": 1, "max_idle_us": 5}),
    ],
)  # fmt: skip
def test_a_sequence_batching_is_read(
    text: str, max_batch_size: int, wanted: dict[str, Any]
) -> None:
    assert batching(f"sequence_batching {{ {text} }}", max_batch_size) == SequenceBatching(**wanted)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"{START} fp32_false_true: [ 0, 0.5 ]", ("START", "FP32", (0.0, 0.5))),
        ("kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ]", ("END", "BOOL", (0, 1))),
        ("kind: CONTROL_SEQUENCE_READY int32_false_true: [ -1, 1 ]", ("READY", "INT32", (-1, 1))),
        ("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING", ("CORRID", "BYTES", (0, 0))),
        ("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64", ("CORRID", "UINT64", (0, 0))),
    ],
)
def test_controls(text: str, wanted: tuple[str, str, tuple[float, float]]) -> None:
    found = batching(control(text))
    assert found is not None
    assert found.controls == (SequenceControl("C", *wanted),)


NO_CHOICE = (
    "sequence batching must {}specify either 'int32_false_true', 'fp32_false_true' or "
    "'bool_false_true' for CONTROL_SEQUENCE_{} for m"
)
NO_ID = (
    "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are "
    "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
)
NAMES, ONE = 'input_name: "I" output_name: "O"', "data_type: TYPE_FP32 dims: 1"


def state(*texts: str) -> str:
    return f"sequence_batching {{ {' '.join(f'state {{ {each} }}' for each in texts)} }}"


def initial(text: str, name: str = 'name: "i"') -> str:
    return state(f"{NAMES} {ONE} initial_state {{ {name} {text} }}")


NAMED = 'name: "C" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }'


@pytest.mark.promise("Sequences", "Errors in a request of …")
@pytest.mark.parametrize(
    ("text", "what"),
    [
        (control(START), NO_CHOICE.format("", "START")),
        (control(f"{START} data_type: TYPE_FP32"), NO_CHOICE.format("", "START")),
        (control(f"{START} fp32_false_true: [ 0, 1 ] int32_false_true: [ 0, 1 ]"),
         "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
         "'bool_false_true' for CONTROL_SEQUENCE_START for m"),
        (control(f"{START} fp32_false_true: [ 0, 1, 2 ]"),
         "sequence batching control 'fp32_false_true' must have exactly 2 entries for "
         "CONTROL_SEQUENCE_START for m"),
        (control("kind: CONTROL_SEQUENCE_CORRID"), NO_ID),
        (control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT8"), NO_ID),
        (control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 int32_false_true: [ 0, 1 ]"),
         NO_CHOICE.format("not ", "CORRID")),
        ("sequence_batching { control_input { } }",
         "sequence batching control tensor must have a name for m"),
        ('sequence_batching { control_input { name: "X" } }',
         "sequence batching control tensor 'X' is an input of the model for m"),
        (f"sequence_batching {{ control_input {{ {NAMED} }} control_input {{ {NAMED} }} }}",
         "sequence batching control tensor 'C' is specified for multiple control kinds for m"),
        (f"sequence_batching {{ control_input {{ {NAMED} }} "
         f"control_input {{ {NAMED.replace('C', 'D', 1)} }} }}",
         "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m"),
        ("sequence_batching { direct { minimum_slot_utilization: 1.5 } }",
         "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m"),
        ("sequence_batching { oldest { max_candidate_sequences: -1 } }",
         "sequence batching max candidate sequences must be non-negative for m"),
        ("sequence_batching { oldest { preferred_batch_size: [ 2, 8 ] } }",
         "sequence batching preferred batch size must be <= max batch size for m"),
        ("sequence_batching { oldest { preferred_batch_size: 0 } }",
         "sequence batching preferred batch size must be positive for m"),
        (state('output_name: "O"'), "sequence batching state must have an 'input_name' for m"),
        (state('input_name: "I"'), "sequence batching state must have an 'output_name' for m"),
        (state('input_name: "X" output_name: "O"'),
         "sequence batching state 'X' is an input of the model already for m"),
        (state(NAMES), "sequence batching state 'I' must have a 'data_type' for m"),
        (state(f"{NAMES} data_type: TYPE_FP32"), "sequence batching state 'I' must have 'dims' for m"),
        (state(f"{NAMES} data_type: TYPE_FP32 dims: [ 0 ]"),
         "sequence batching state 'I' must have dimensions >= 1, or -1 for a variable-size one for m"),
        (state(f"{NAMES} {ONE} use_growable_memory: true"),
         "In order to 'use_growable_memory', you must also enable 'use_same_buffer_for_input_output'"),
        (state(f"{NAMES} {ONE}", f'input_name: "I" output_name: "P" {ONE}'),
         "State input name 'I' specified more than once."),
        (state(f"{NAMES} {ONE}", f'input_name: "J" output_name: "O" {ONE}'),
         "State output name 'O' specified more than once."),
        (state('input_name: "I" output_name: "Y" data_type: TYPE_INT8 dims: 1'),
         "sequence batching state 'I' is TYPE_INT8, and output 'Y' is TYPE_FP32 for m"),
        (initial("data_type: TYPE_INT8 dims: 1 zero_data: true"),
         "The data type used for 'initial_state' field of state 'I' does not match the state data type."),
        (initial(f"{ONE} zero_data: true", name=""),
         "Field 'name' must be set when using initial_state for state input 'I'."),
        (initial("data_type: TYPE_FP32 dims: [ 1, 1 ] zero_data: true"),
         "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input 'I'. 2 != 1"),
        (initial("data_type: TYPE_FP32 dims: -1 zero_data: true"),
         "'initial_state' field for state input name 'I' contains variable dimensions."),
        (initial("data_type: TYPE_FP32 dims: 2 zero_data: true"),
         "'initial_state' dim for input name 'I' doesn't match 'state' dim description. 2 != 1"),
        (initial(ONE), "initial_state setting expects state'I' to have state_data set"),
        (state(f'{NAMES} {ONE} initial_state [ {{ name: "i" }}, {{ name: "j" }} ]'),
         "initial_state field for state input 'I' must contain exactly one or zero element. Found '2' elements."),
    ],
)  # fmt: skip
def test_a_wrong_sequence_batching_is_refused_with_its_place(text: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        batching(text)
    assert what in str(caught.value)
    assert "sequence_batching." in str(caught.value)


def test_preferred_sizes_of_a_partial_configuration_wait_for_its_maximum() -> None:
    raw = {"sequence_batching": {"oldest": {"preferred_batch_size": [8]}}}
    config = {"name": "m", "backend": "python", **raw}
    assert ModelConfig.from_dict(config, partial=True).sequence_batching is not None
