"""The settings of a configuration: what may change, and the text that says so."""

from __future__ import annotations

import pytest

from moonpool.benchmarks.tuning.settings import (
    Setting,
    SettingBounds,
    Unwritable,
    Value,
    settings_of,
    with_values,
    written,
)
from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.model.config import pbtxt
from moonpool.runtime.model.config.model import ModelConfig

PYTHON = {"backend": "python"}
BOUNDS = SettingBounds(instances=8, batch=16, delay_us=1500, cores=4)
TENSORS = """\
input [ { name: "X" data_type: TYPE_FP32 dims: [ 3 ] } ]  # three of them
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""
BATCHED = f"""\
# A comment at the head.
name: "m"
backend: "python"
max_batch_size: 8  # rows
{TENSORS}instance_group [
  {{
    # on the processor
    kind: KIND_CPU
  }}
]
dynamic_batching {{ max_queue_delay_microseconds: 300 }}
parameters {{ key: "MOONPOOL_PREFORK" value: {{ string_value: "imports" }} }}
parameters {{ key: "MOONPOOL_THREADS" value: {{ string_value: '3' }} }}
"""


def found(text: str, bounds: SettingBounds = BOUNDS) -> tuple[dict[str, Setting], dict[str, str]]:
    raw, _ = pbtxt.parse(text, "config.pbtxt")
    settings, left_out = settings_of(raw, bounds)
    return {setting.name: setting for setting in settings}, left_out


def test_a_model_with_batches_has_all_settings() -> None:
    settings, left_out = found(BATCHED)

    values = {name: (setting.values, setting.start) for name, setting in settings.items()}
    assert values == {
        "instances": ((1, 2, 3, 4, 6, 8), 0),
        "max_batch": ((1, 2, 4, 8, 16), 3),
        "delay": ((0, 100, 200, 300, 500, 1000), 3),
        "threads": ((1, 2, 3, 4), 2),
        "template": (("no", "blank", "imports", "initialize"), 2),
    }
    assert left_out == {}


def test_fields_that_are_missing_have_a_value_of_their_own() -> None:
    settings, _ = found(f'name: "m" backend: "python" max_batch_size: 4 {TENSORS}')

    assert settings["delay"].values == (None, 0, 100, 200, 500, 1000)
    assert settings["threads"].values == (None, 1, 2, 3, 4)
    assert settings["template"].values == ("no", None, "imports", "initialize")
    assert [settings[name].start for name in ("delay", "threads", "template")] == [0, 0, 1]


@pytest.mark.parametrize(
    ("more", "name", "reason"),
    [
        ("", "max_batch", "it takes no batches"),
        ("", "delay", "it takes no batches"),
        ("max_batch_size: 4 sequence_batching { }", "max_batch", "its requests belong to sequences"),
        ("instance_group [ { count: 1 }, { count: 2 } ]", "instances", "it has 2 groups of instances"),
        (
            'parameters { key: "MOONPOOL_INSTANCES" value: { string_value: "1..8" } }',
            "instances",
            "MOONPOOL_INSTANCES lets their number follow the load",
        ),
        (
            'parameters { key: "MOONPOOL_THREADS" value: { string_value: "many" } }',
            "threads",
            "MOONPOOL_THREADS is 'many'",
        ),
    ],
)  # fmt: skip
def test_what_cannot_change_is_left_out_with_the_reason(more: str, name: str, reason: str) -> None:
    settings, left_out = found(f'name: "m" backend: "python" {TENSORS} {more}')

    assert name not in settings
    assert left_out[name] == reason


def test_an_ensemble_has_nothing_to_change() -> None:
    step = (
        'ensemble_scheduling { step [ { model_name: "a" model_version: -1 '
        'input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } ] }'
    )
    settings, left_out = found(f'name: "m" platform: "ensemble" max_batch_size: 4 {TENSORS} {step}')

    assert settings == {}
    assert left_out["instances"] == "an ensemble has no instances"


def test_one_processor_leaves_nothing_to_threads() -> None:
    _, left_out = found(BATCHED, SettingBounds(8, 16, 0, cores=1))

    assert left_out["threads"] == "this process may use one processor"


CHANGES: dict[str, Value] = {"instances": 3, "max_batch": 16, "delay": 500, "threads": 2, "template": "no"}


def test_a_text_changes_in_the_lines_of_its_settings_alone() -> None:
    assert (
        written(BATCHED, CHANGES, PYTHON, "config.pbtxt")
        == f"""\
# A comment at the head.
name: "m"
backend: "python"
max_batch_size: 16  # rows
{TENSORS}instance_group [
  {{
    count: 3
    # on the processor
    kind: KIND_CPU
  }}
]
dynamic_batching {{ max_queue_delay_microseconds: 500 }}
parameters {{ key: "MOONPOOL_PREFORK" value: {{ string_value: "no" }} }}
parameters {{ key: "MOONPOOL_THREADS" value: {{ string_value: "2" }} }}
"""
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        BATCHED,
        f'name: "m"\nmax_batch_size: 8\n{TENSORS}dynamic_batching {{}}\ninstance_group {{ count: 1 }}',
        f"max_batch_size: 2 {TENSORS} instance_group: [{{count: 2, kind: KIND_CPU}}] dynamic_batching <\n\n>",
        'parameters: [{key: "OTHER", value: {string_value: "x"}}, '
        "{key: 'MOONPOOL_THREADS', value: {string_value: '1'}}]",
        'parameters { value { string_value: "1" } key: "MOONPOOL_THREADS" }',
        "# no field at all",
    ],
)
def test_the_new_text_means_the_new_configuration(text: str) -> None:
    before, _ = pbtxt.parse(text, "config.pbtxt")
    after, _ = pbtxt.parse(written(text, CHANGES, PYTHON, "config.pbtxt"), "config.pbtxt")

    assert after == with_values(before, CHANGES, "python")
    assert after["instance_group"][0]["count"] == 3
    assert after["max_batch_size"] == 16
    assert after["dynamic_batching"]["max_queue_delay_microseconds"] == 500
    assert after["parameters"]["MOONPOOL_THREADS"] == {"string_value": "2"}


def test_a_text_that_is_not_understood_is_refused() -> None:
    # Two literals that protobuf joins: only the first would be replaced.
    text = 'parameters { key: "MOONPOOL_THREADS" value: { string_value: "1" "2" } }'

    with pytest.raises(Unwritable, match="set threads = 4 by hand"):
        written(text, {"threads": 4}, PYTHON, "config.pbtxt")


def test_a_broken_text_is_refused_with_its_line() -> None:
    with pytest.raises(MoonpoolError, match=r"config\.pbtxt:2"):
        written("\nmax_batch_size: x", {"max_batch": 2}, PYTHON, "config.pbtxt")


def test_batching_that_was_found_out_is_written_with_a_largest_batch() -> None:
    measured = {"backend": "onnxruntime", "max_batch_size": 4, "dynamic_batching": {}}

    said = "max_batch_size: 16\ndynamic_batching {\n  max_queue_delay_microseconds: 0\n}\n"
    assert written("", {"max_batch": 16}, measured, "f") == said
    # A text without a largest batch leaves batching to the backend.
    assert "dynamic_batching" not in written("", {"threads": 2}, measured, "f")
    # A text that has batching keeps its own.
    own = "max_batch_size: 4\ndynamic_batching { }\n"
    assert written(own, {"max_batch": 16}, measured, "f") == own.replace("4", "16")


def test_the_largest_preferred_batch_follows_the_largest_batch() -> None:
    raw = dict(ModelConfig.from_dict(pbtxt.parse(BATCHED, "f")[0]).raw)
    assert raw["dynamic_batching"]["preferred_batch_size"] == [8]

    changed = with_values(raw, {"max_batch": 4}, "python")

    assert changed["dynamic_batching"]["preferred_batch_size"] == [4]
    assert raw["max_batch_size"] == 8
    assert with_values(raw, {"threads": None}, "python") == raw


def test_threads_are_a_parameter_of_the_backend() -> None:
    changed = with_values({"name": "m"}, {"threads": 2}, "onnxruntime")

    assert changed["parameters"] == {"intra_op_thread_count": {"string_value": "2"}}
