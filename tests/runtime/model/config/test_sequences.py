"""The sequence batcher of a configuration: what it means, and what is refused in Triton's words."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.runtime.model.config import pbtxt
from moonpool.runtime.model.config.model import ConfigError, ModelConfig, SequenceBatching, SequenceControl

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
def test_a_sequence_batching_is_read(text: str, max_batch_size: int, wanted: dict[str, Any]) -> None:
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


NAMES, ONE = 'input_name: "I" output_name: "O"', "data_type: TYPE_FP32 dims: 1"


def state(*texts: str) -> str:
    return f"sequence_batching {{ {' '.join(f'state {{ {each} }}' for each in texts)} }}"


@pytest.mark.promise("Sequences", "Errors in a request of …")
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("sequence_batching { oldest { max_candidate_sequences: -1 } }",
         "sequence batching max candidate sequences must be non-negative for m"),
        (state('output_name: "O"'), "sequence batching state must have an 'input_name' for m"),
        (state('input_name: "I"'), "sequence batching state must have an 'output_name' for m"),
        (state(NAMES), "sequence batching state 'I' must have a 'data_type' for m"),
        (state(f"{NAMES} data_type: TYPE_FP32"), "sequence batching state 'I' must have 'dims' for m"),
        (state(f"{NAMES} data_type: TYPE_FP32 dims: [ 0 ]"),
         "sequence batching state 'I' must have dimensions >= 1, or -1 for a variable-size one for m"),
        (state(f"{NAMES} {ONE} use_growable_memory: true"),
         "In order to 'use_growable_memory', you must also enable 'use_same_buffer_for_input_output'"),
        (state(f"{NAMES} {ONE}", f'input_name: "J" output_name: "O" {ONE}'),
         "State output name 'O' specified more than once."),
        (state('input_name: "I" output_name: "Y" data_type: TYPE_INT8 dims: 1'),
         "sequence batching state 'I' is TYPE_INT8, and output 'Y' is TYPE_FP32 for m"),
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
