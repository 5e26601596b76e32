"""All mistakes of a configuration at once, from the code that shows the first one to a load."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.runtime.model.checksums import checksums
from moonpool.runtime.model.config import pbtxt
from moonpool.runtime.model.config.model import ConfigError, ModelConfig
from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.model.config.source import Source, all_mistakes

X: dict[str, Any] = {"name": "X", "data_type": "TYPE_FP32", "dims": [1]}
IO: dict[str, Any] = {"name": "m", "backend": "python", "input": [X], "output": [X]}
# Two or more mistakes of each part, and the fields that they are in.
PARTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"name": "a/b", "backend": "no name", "max_batch_size": -1, "runtime": "../x"},
     ["name", "backend", "runtime", "max_batch_size"]),
    ({"no": 1, "nor": 2, "input": "X", "output": [{**X, "dims": "?"}]},
     ["no", "nor", "input", "output[0].dims"]),
    ({"input": [{**X, "dims": [0]}, {**X, "name": ""}, {**X, "is_shape_tensor": True, "format": "FORMAT_NHWC"}]},
     ["input[0].dims", "input[1].name", "input[2].is_shape_tensor", "input[2].format"]),
    ({"instance_group": [{"count": -1, "kind": "KIND_CPU", "gpus": [0]}, {"name": "(", "passive": True}]},
     ["instance_group[1].passive", "instance_group[0].count", "instance_group[0].gpus", "instance_group[1].name"]),
    ({"dynamic_batching": {"preferred_batch_size": [0, -1], "priority_levels": 2, "preserve_ordering": True}},
     ["dynamic_batching.preferred_batch_size[0]", "dynamic_batching.preferred_batch_size[1]",
      "dynamic_batching.default_priority_level", "dynamic_batching.priority_levels"]),
    ({"sequence_batching": {"oldest": {"max_candidate_sequences": -1, "preferred_batch_size": [-1]},
                            "control_input": [{"name": ""}, {"name": "X"}],
                            "state": [{"input_name": "S", "output_name": "T"},
                                      {"input_name": "S", "output_name": "U"}]}},
     ["sequence_batching.oldest.max_candidate_sequences", "sequence_batching.oldest.preferred_batch_size[0]",
      "sequence_batching.control_input[0].name", "sequence_batching.control_input[1].name",
      "sequence_batching.state[0].data_type", "sequence_batching.state[0].dims",
      "sequence_batching.state[1].input_name", "sequence_batching.state[1].data_type",
      "sequence_batching.state[1].dims"]),
    ({"model_warmup": [{"batch_size": 9999}, {"batch_size": 1, "inputs": {"A": {}, "B": {"dims": [-1]}}}]},
     ["model_warmup[0].batch_size", "model_warmup[1].inputs[A]", "model_warmup[1].inputs[B].dims"]),
    ({"model_repository_agents": {"agents": [{"name": "other"},
                                            {"name": "checksum", "parameters": {"a": "b", "md5:f": "g"}}]}},
     ["model_repository_agents.agents[0].name", "model_repository_agents.agents[1].parameters[a]",
      "model_repository_agents.agents[1].parameters[md5:f]"]),
    ({"parameters": {key: {"string_value": "?"} for key in ("MOONPOOL_RETRY", "MOONPOOL_THREAD", "MOONPOOL_PIN")}},
     ["parameters[MOONPOOL_RETRY]", "parameters[MOONPOOL_THREAD]", "parameters[MOONPOOL_PIN]"]),
    ({"batch_input": [{"source_input": []}, {"source_input": ["X"], "data_type": "TYPE_BOOL"}],
      "version_policy": {"specific": {"versions": [-1]}}, "response_cache": {"enable": True},
      "model_transaction_policy": {"decoupled": True}},
     ["batch_input[0].source_input", "batch_input[0].data_type", "batch_input[1].data_type",
      "version_policy.specific.versions", "response_cache.enable"]),
    ({"platform": "ensemble", "backend": "", "instance_group": [{}], "optimization": {},
      "ensemble_scheduling": {"step": [{}, {"model_name": "a", "input_map": {"A": "X"}, "output_map": {"B": "Y"},
                                       "model_namespace": "n"}]}},
     ["instance_group", "optimization", "ensemble_scheduling.step[0]", "ensemble_scheduling.step[1].model_namespace"]),
]  # fmt: skip


def read(raw: dict[str, Any]) -> None:
    ModelOptions.from_parameters(ModelConfig.from_dict(raw, partial=True))


def fields_of(raw: dict[str, Any]) -> list[str]:
    with all_mistakes() as mistakes:
        read(raw)
    return [each.field for each in mistakes if isinstance(each, ConfigError)]


@pytest.mark.parametrize(("changes", "fields"), PARTS, ids=[each[1][0] for each in PARTS])
def test_all_mistakes_are_collected_and_the_first_one_is_raised(changes: dict[str, Any], fields: list[str]) -> None:
    assert fields_of(IO | changes) == fields
    with pytest.raises(ConfigError) as caught:
        read(IO | changes)
    assert caught.value.field == fields[0]


def test_mistakes_of_several_parts_do_not_hide_each_other() -> None:
    merged: dict[str, Any] = {}
    for changes, _ in PARTS[3:4] + PARTS[6:9]:
        merged |= changes
    expected = [field for _, fields in PARTS[3:4] + PARTS[6:9] for field in fields]

    assert sorted(fields_of(IO | merged)) == sorted(expected)


def test_what_a_mistake_makes_of_others_is_none() -> None:
    """A name that is misspelt is the mistake, and not the name that is missing then."""
    text = 'nam: "m"\ninput { nam: "X" data_type: TYPE_FP32 dims: 1 }\ninput { name: "Y" data_type: FP dims: -2 }'
    with all_mistakes() as mistakes:
        raw, source = pbtxt.parse(text, "config.pbtxt")
        ModelConfig.from_dict(raw, source=source)

    fields = [each.field for each in mistakes if isinstance(each, ConfigError)]
    assert fields == ["nam", "input[0].nam", "input[1].data_type", "input[1].dims"]


def test_places_in_one_field_move_nothing_behind_it() -> None:
    text = "input { dims: [ ${a}, ${b}, ${c} ] }\nmax_batch_size: 1.5\nno: 1"
    with all_mistakes() as mistakes:
        pbtxt.parse(text, "config.pbtxt")

    places = [(each.line, each.field) for each in mistakes if isinstance(each, ConfigError)]
    assert places == [(1, ""), (2, "max_batch_size"), (3, "no")]


def test_a_list_of_mistakes_has_an_end() -> None:
    raw = {"parameters": {f"MOONPOOL_{number}": {"string_value": ""} for number in range(500)}}
    assert len(fields_of(IO | raw)) == 100


def test_nothing_is_collected_afterwards() -> None:
    with all_mistakes():
        pass
    with pytest.raises(ConfigError):
        checksums({"name": "m", "model_repository_agents": {"agents": [{"name": "a"}]}}, Source())
