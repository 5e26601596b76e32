"""Model configurations: what is accepted, and what is refused and how."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.runtime.model.config import pbtxt
from moonpool.runtime.model.config.model import (
    ConfigError,
    DynamicBatching,
    InstanceGroup,
    ModelConfig,
    QueuePolicy,
    Raw,
    TensorConfig,
    VersionPolicy,
    minimal,
    normalise,
)

pytestmark = pytest.mark.promise("Models", "A `config.pbtxt` is read against Triton's …")

HEAD = 'name: "m" backend: "python"\n'
TENSORS = """\
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1, 4 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


def load(text: str, *, partial: bool = False) -> ModelConfig:
    raw, source = pbtxt.parse(HEAD + text, "config.pbtxt")
    return ModelConfig.from_dict(raw, source=source, partial=partial)


def refusal(text: str, *, partial: bool = False) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(text, partial=partial)
    return caught.value


class TestAccepted:
    def test_a_plain_model(self) -> None:
        config = load(TENSORS)

        assert config.name == "m"
        assert config.backend == "python"
        assert config.max_batch_size == 0
        assert config.inputs == (TensorConfig("IN", "FP32", (-1, 4)),)
        assert config.outputs == (TensorConfig("OUT", "BYTES", (1,)),)
        assert config.instance_groups == (InstanceGroup("m", "AUTO", 1, ()),)
        assert config.dynamic_batching is None
        assert config.version_policy == VersionPolicy("latest", 1)
        assert config.default_model_filename == "model.py"
        assert config.parameters == {}
        assert config.decoupled is False

    def test_everything_that_is_acted_on(self) -> None:
        config = load(
            """
            max_batch_size: 8
            input { name: "A" data_type: TYPE_BF16 dims: 4 optional: true }
            input { name: "B" data_type: TYPE_BOOL dims: 1 reshape { shape: [ ] } }
            instance_group [ { count: 2 kind: KIND_CPU }, { name: "big" kind: KIND_GPU gpus: 1 } ]
            dynamic_batching {
              preferred_batch_size: [ 8, 4 ] max_queue_delay_microseconds: 100
              priority_levels: 2 default_priority_level: 2
              default_queue_policy { allow_timeout_override: true max_queue_size: 7 }
              priority_queue_policy { key: 1 value { timeout_action: DELAY
                                                     default_timeout_microseconds: 5 } }
            }
            parameters { key: "K" value { string_value: "V" } }
            model_transaction_policy { decoupled: true }
            version_policy { all { } }
            default_model_filename: "other.py"
        """
        )

        assert config.inputs == (
            TensorConfig("A", "BF16", (4,), optional=True),
            TensorConfig("B", "BOOL", (1,), reshape=()),
        )
        assert config.instance_groups == (InstanceGroup("m_0", "CPU", 2, ()), InstanceGroup("big", "GPU", 1, (1,)))
        default = QueuePolicy(allow_timeout_override=True, max_queue_size=7)
        urgent = QueuePolicy("DELAY", 5)
        assert config.dynamic_batching == DynamicBatching((4, 8), 100, False, 2, 2, default, {1: urgent})
        assert config.dynamic_batching.queue_policy(1) == urgent
        assert config.dynamic_batching.queue_policy(2) == default
        assert config.parameters == {"K": "V"}
        assert config.decoupled is True
        assert config.version_policy == VersionPolicy("all", 0)
        assert config.default_model_filename == "other.py"

    def test_models_get_their_whole_configuration(self) -> None:
        config = load(TENSORS + 'parameters { key: "ü" value { string_value: "ß" } }')

        raw = json.loads(config.json)

        assert raw == config.raw
        assert raw["input"][0]["dims"] == [-1, 4]
        assert raw["parameters"] == {"ü": {"string_value": "ß"}}
        assert raw["instance_group"][0]["name"] == "m"
        assert ModelConfig.from_dict(raw) == config

    def test_a_model_without_inputs_or_without_outputs_is_a_model(self) -> None:
        assert load('output { name: "O" data_type: TYPE_INT8 dims: 1 }').inputs == ()
        assert load('input { name: "I" data_type: TYPE_INT8 dims: 1 }').outputs == ()

    def test_before_completion_tensors_may_lack_what_the_model_will_say(self) -> None:
        config = load('input { name: "I" }', partial=True)

        assert config.inputs == (TensorConfig("I", "", ()),)
        assert ModelConfig.from_dict(minimal("m"), partial=True).inputs == ()

    def test_a_dict_from_python_needs_only_what_it_has_to_say(self) -> None:
        raw: Raw = {
            "name": "m",
            "backend": "python",
            "input": ({"name": "I", "data_type": "TYPE_FP16", "dims": (2, 2)},),
        }
        before = copy.deepcopy(raw)

        config = ModelConfig.from_dict(raw)

        assert config.inputs == (TensorConfig("I", "FP16", (2, 2)),)
        assert raw == before

    def test_the_most_dimensions_are_32_with_the_batch(self) -> None:
        tensor = 'input {{ name: "I" data_type: TYPE_INT8 dims: {} }}'

        assert len(load(tensor.format([1] * 32)).inputs[0].dims) == 32
        batched = "max_batch_size: 1 " + tensor
        assert len(load(batched.format([1] * 31)).inputs[0].dims) == 31
        assert "33 dimensions" in str(refusal(tensor.format([1] * 33)))
        assert "33 dimensions" in str(refusal(batched.format([1] * 32)))


class TestRefused:
    def test_an_output_that_is_cut_by_dimensions_which_its_source_lacks(self) -> None:
        text = TENSORS + (
            'output { name: "O" data_type: TYPE_FP32 dims: [ 1, 2, -1 ] }\n'
            'batch_output { source_input: "IN" target_name: "O" }'
        )
        load(text)  # a Python model cuts its outputs itself
        raw, source = pbtxt.parse(f'name: "m" backend: "pytorch" {text}', "config.pbtxt")

        with pytest.raises(ConfigError, match=r"'O' has variable .* its source input 'IN' lacks for m"):
            ModelConfig.from_dict(raw, source=source)

    @pytest.mark.parametrize(
        ("text", "line", "field", "what"),
        [
            ("max_batch_size: -1", 2, "max_batch_size",
             "'max_batch_size' must be non-negative value for m"),
            ('default_model_filename: "model.so"', 2, "default_model_filename",
             "Model name must end with '.py'. Model name is \"model.so\"."),
            ('default_model_filename: "../x.py"', 2, "default_model_filename",
             "must be a file name without directories, not '../x.py'"),
            ("\ninput [ { data_type: TYPE_FP32 dims: 1 } ]", 3, "input[0].name",
             "model input must specify 'name' for m"),
            ('input {\n name: "I" dims: 1 }', 2, "input[0].data_type",
             "model input 'I' must specify 'data_type' for m"),
            ('output {\n name: "O" data_type: TYPE_FP32 }', 2, "output[0].dims",
             "model output 'O' must specify 'dims' for m"),
            ('input {\n name: "I" data_type: TYPE_FP32\n dims: [ 4, 0 ] }', 4, "input[0].dims",
             "model input 'I' dimension must be integer >= 1, or -1 to indicate a variable-size"
             " dimension for m"),
            ('input { name: "I" data_type: TYPE_FP32 dims: -2 }', 2, "input[0].dims",
             "model input 'I' dimension must be integer >= 1, or -1"),
            ('input { name: "I" data_type: TYPE_FP32 dims: 4\n format: FORMAT_NCHW }', 3, "input[0].format",
             "model input NHWC/NCHW require 3 dims for m"),
            ('output { name: "O" data_type: TYPE_FP32 dims: 4\n is_shape_tensor: true }', 3,
             "output[0].is_shape_tensor", "shape tensors are only supported for TensorRT platform for m"),
            ('input { name: "I" data_type: TYPE_FP32 dims: 4\n is_non_linear_format_io: true }', 3,
             "input[0].is_non_linear_format_io",
             "Non-linear IO format is only supported for the TensorRT platform for m"),
            ('input { name: "I" data_type: TYPE_FP32 dims: 4\n reshape { shape: [ 2, 3 ] } }',
             3, "input[0].reshape", "model input 'I' has different size for dims and reshape for m"),
            ('input { name: "I" data_type: TYPE_FP32 dims: [ -1, 4, -1 ]\n'
             " reshape { shape: [ 4, -1 ] } }", 3, "input[0].reshape",
             "model input 'I' has different number of variable-size dimensions for dims and reshape"),
            ('input { name: "I" data_type: TYPE_FP32 dims: [ -1 ] reshape { shape: [ 4 ] } }',
             2, "input[0].reshape", "model input 'I' has different size for dims and reshape"),
            ('input { name: "I" data_type: TYPE_FP32 dims: 1 reshape { } }', 2, "input[0].reshape",
             "model input 'I' cannot have empty reshape for non-batching model as scalar tensors"
             " are not supported for m"),
            ('input { name: "I" data_type: TYPE_FP32 dims: 1 reshape { shape: 0 } }', 2,
             "input[0].reshape", "model input 'I' reshape dimensions must be integer >= 1, or -1"),
            (TENSORS + 'batch_input { data_type: TYPE_INT32\n source_input: [ "IN", "IN" ] }', 5,
             "batch_input[0].source_input",
             "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 2 for m"),
            (TENSORS + 'batch_input { source_input: "IN"\n data_type: TYPE_INT64 }', 5,
             "batch_input[0].data_type", "batch input data type must be TYPE_INT32 or TYPE_FP32 for m"),
            (TENSORS + 'batch_output { source_input: "NO" }', 4, "batch_output[0].source_input",
             "unknown source input name 'NO' for m"),
            (TENSORS + 'batch_output { source_input: "IN" target_name: "NO" }', 4,
             "batch_output[0].target_name", "unknown target output name 'NO' for m"),
            (TENSORS + 'batch_output { source_input: "IN" target_name: [ "OUT", "OUT" ] }', 4,
             "batch_output[0].target_name", "target output name 'OUT' can only be specified once for m"),
            (TENSORS + "instance_group [ { },\n { count: -2 } ]", 5, "instance_group[1].count",
             "instance group m_1 of model m has the negative count -2"),
            (TENSORS + "instance_group { kind: KIND_CPU\n gpus: 0 }", 5, "instance_group[0].gpus",
             "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs"),
            (TENSORS + "instance_group { kind: KIND_GPU gpus: [ 0, 0 ] }", 4,
             "instance_group[0].gpus", "instance group m_0 of model m must name each GPU once"),
            (TENSORS + 'instance_group [ { name: "m_1" }, { } ]', 4, "instance_group[1].name",
             "instance group m_1 of model m is specified twice"),
            (TENSORS + f'instance_group {{ name: "{"n" * 513}" }}', 4, "instance_group[0].name",
             "has 513 bytes, and 512 is the most for a name"),
            (f'input {{ name: "{"é" * 257}" data_type: TYPE_FP32 dims: 1 }}', 2, "input[0].name",
             "has 514 bytes, and 512 is the most for a name"),
            (TENSORS + 'instance_group { name: "a;b" }', 4, "instance_group[0].name",
             "Invalid stub name: contains invalid characters"),
            (TENSORS + "max_batch_size: 4\ndynamic_batching {\n preferred_batch_size: [ 4,\n 8 ] }",
             7, "dynamic_batching.preferred_batch_size[1]",
             "dynamic batching preferred size must be <= max batch size for m"),
            (TENSORS + "dynamic_batching { preferred_batch_size: 0 }", 4,
             "dynamic_batching.preferred_batch_size[0]",
             "dynamic batching preferred size must be positive for m"),
            (TENSORS + "dynamic_batching { priority_levels: 3 }", 4,
             "dynamic_batching.default_priority_level",
             "default priority level must be in range [1, 3] for m"),
            (TENSORS + "dynamic_batching { priority_levels: 1 default_priority_level: 1\n"
             "priority_queue_policy { key: 2 value { } } }", 5,
             "dynamic_batching.priority_queue_policy[2]",
             "priority queue policy must have priority level in range [1, 1] for m"),
            (TENSORS + "dynamic_batching { preserve_ordering: true\n priority_levels: 2"
             " default_priority_level: 1 }", 5, "dynamic_batching.priority_levels",
             "Only one priority level is allowed when 'preserve_ordering' is true for m"),
            (TENSORS + "dynamic_batching { preserve_ordering: true default_queue_policy {\n"
             " timeout_action: DELAY default_timeout_microseconds: 1 } }", 5,
             "dynamic_batching.default_queue_policy.timeout_action",
             "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true"
             " for m"),
            ("version_policy { specific { versions: [ 1, -3 ] } }\n" + TENSORS, 2,
             "version_policy.specific.versions", "versions must be integer >= 0 for m"),
            ("max_batch_size: 2 output { name: \"O\" data_type: TYPE_FP32 dims: 1 }", None, "input",
             "a model with max_batch_size > 0 needs an input to batch for m"),
            ("", None, "input", "must specify inputs and outputs for m"),
        ],
    )  # fmt: skip
    def test_a_mistake_is_named_by_line_and_field(self, text: str, line: int | None, field: str, what: str) -> None:
        found = refusal(text)

        assert (found.file, found.line, found.field) == ("config.pbtxt", line, field)
        place = "config.pbtxt" if line is None else f"config.pbtxt:{line}"
        assert str(found).startswith(f"{place}: {field}: {what}")

    @pytest.mark.parametrize(
        ("name", "what"),
        [
            ("", "name: model configuration must specify 'name'"),
            *((f"a{c}b", "name: Invalid stub name: contains invalid characters")
              for c in ";|&$`<>()[]{}\\\"'*?~#!"),
            *((name, "must be 1 to 512 letters")
              for name in ("a/b", "..", ".", "a b", "a\nb", "é", "a\0")),
        ],
    )  # fmt: skip
    def test_a_name_that_could_do_harm_is_refused(self, name: str, what: str) -> None:
        with pytest.raises(ConfigError) as caught:
            ModelConfig.from_dict({**minimal("m"), "name": name}, partial=True)

        assert what in str(caught.value)

    def test_a_backend_must_be_named(self) -> None:
        with pytest.raises(ConfigError, match="unexpected platform type 'onnx' for m"):
            ModelConfig.from_dict({"name": "m", "platform": "onnx"})
        with pytest.raises(ConfigError, match=r"is not the name of a backend: '\.\./x'"):
            ModelConfig.from_dict({"name": "m", "backend": "../x"})

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            ({"max_batchsize": 1}, 'max_batchsize: no field "max_batchsize" in ModelConfig; did you'),
            ({"max_batch_size": "x"}, "max_batch_size: must be an integer from -2147483648"),
            ({"max_batch_size": True}, "max_batch_size: must be an integer"),
            ({"max_batch_size": 2**31}, "max_batch_size: must be an integer"),
            ({"input": {"name": "I"}}, "input: must be a list, not {'name': 'I'}"),
            ({"input": ["I"]}, "input[0]: must be a message with the fields of ModelInput, not 'I'"),
            ({"input": [{"name": 3}]}, "input[0].name: must be a string, not 3"),
            ({"input": [{"name": "\ud800"}]}, "input[0].name: must be a string"),
            ({"input": [{"dims": [1.5]}]}, "input[0].dims[0]: must be an integer"),
            ({"input": [{"dims": "12"}]}, "input[0].dims: must be a list"),
            ({"input": [{"data_type": "FP32"}]}, 'not \'FP32\'; did you mean "TYPE_FP32"?'),
            ({"input": [{"data_type": True}]}, "input[0].data_type: must be one of TYPE_INVALID, "),
            ({"input": [{"data_type": 99}]}, "input[0].data_type: must be one of TYPE_INVALID, "),
            ({"input": [{"optional": 1}]}, "input[0].optional: must be true or false, not 1"),
            ({"parameters": {"K": "V"}}, "parameters[K]: must be a message with the fields of"),
            ({"parameters": [1]}, "parameters: must be a map, not [1]"),
            ({"dynamic_batching": {"priority_queue_policy": {"x": {}}}},
             "dynamic_batching.priority_queue_policy[x]: must be an integer from 0"),
            ({"dynamic_batching": {}, "sequence_batching": {}},
             "sequence_batching: sequence_batching and dynamic_batching exclude each other"),
            ({"version_policy": {"latest": {}, "all": {}}}, "version_policy.all: all and latest"),
            ({"model_metrics": {"metric_control": [{"histogram_options": {"buckets": [1e999]}}]}},
             "model_metrics.metric_control[0].histogram_options.buckets[0]: must be a finite number"),
        ],
    )  # fmt: skip
    def test_a_dict_of_the_wrong_shape_is_refused(self, change: Raw, what: str) -> None:
        with pytest.raises(ConfigError) as caught:
            normalise({"name": "m", "backend": "python", **change})

        assert what in str(caught.value)
        assert len(str(caught.value)) < 500

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["name", "input", "dims", "data_type", "latest", "gpus"]), inner, max_size=3
                )
            ),
            max_leaves=8,
        ),
        st.sampled_from(["input", "instance_group", "dynamic_batching", "version_policy", "name"]),
    )
    def test_any_completed_configuration_is_read_or_refused(self, value: object, field: str) -> None:
        try:
            config = ModelConfig.from_dict({**minimal("m"), field: value})
        except ConfigError:
            return
        assert ModelConfig.from_dict(json.loads(config.json)) == config


class TestPlacing:
    @pytest.mark.parametrize(
        ("group", "present", "kind", "gpus"),
        [
            ("", [], "CPU", ()),
            ("", [0, 1], "GPU", (0, 1)),
            ("instance_group { gpus: 1 }", [0, 1], "GPU", (1,)),
            ("instance_group { gpus: [ 1, 2 ] }", [0, 1], "CPU", ()),
            ("instance_group { kind: KIND_GPU }", [3], "GPU", (3,)),
            ("instance_group { kind: KIND_CPU }", [0], "CPU", ()),
            ("instance_group { kind: KIND_MODEL }", [0], "MODEL", ()),
        ],
    )
    def test_groups_go_where_triton_puts_them(
        self, group: str, present: list[int], kind: str, gpus: tuple[int, ...]
    ) -> None:
        placed = load(TENSORS + group).placed(present)

        assert [(g.kind, g.gpus) for g in placed.instance_groups] == [(kind, gpus)]
        raw = json.loads(placed.json)["instance_group"][0]
        assert (raw["kind"], raw["gpus"]) == (f"KIND_{kind}", list(gpus))

    def test_a_gpu_that_is_not_there_is_named(self) -> None:
        config = load(TENSORS + "instance_group { kind: KIND_GPU\n gpus: 4 }")

        with pytest.raises(ConfigError, match=r"pbtxt:5: instance_group\[0\].gpus: .* gpu id 4\."):
            config.placed([0, 1])
        with pytest.raises(ConfigError, match="has kind KIND_GPU but no GPUs are available"):
            config.placed([])


class TestVersionPolicy:
    @given(st.sets(st.integers(1, 10**18)), st.integers(1, 6), st.sets(st.integers(1, 20)))
    def test_the_choice_is_sorted_and_only_of_what_is_there(
        self, available: set[int], count: int, wanted: set[int]
    ) -> None:
        ordered = sorted(available)

        assert VersionPolicy("latest", count).choose(available) == ordered[-count:]
        assert VersionPolicy("all").choose(iter(available)) == ordered
        chosen = VersionPolicy("specific", 0, tuple(wanted)).choose(available)
        assert chosen == sorted(available & wanted)

    @pytest.mark.parametrize(
        ("text", "policy"),
        [
            ("", VersionPolicy("latest", 1)),
            ("version_policy { latest { } }", VersionPolicy("latest", 1)),
            ("version_policy { latest { num_versions: 3 } }", VersionPolicy("latest", 3)),
            ("version_policy { }", VersionPolicy("all", 0)),
            ("version_policy { specific { versions: [ 3, 1 ] } }", VersionPolicy("specific", 0, (3, 1))),
        ],
    )  # fmt: skip
    def test_every_form_of_it_is_read(self, text: str, policy: VersionPolicy) -> None:
        assert load(TENSORS + text).version_policy == policy
