"""`config.pbtxt` read against protobuf's schema, and the mistakes in it named by line and field."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.runtime.model.config import pbtxt
from moonpool.runtime.model.config.model import ConfigError, normalise
from moonpool.runtime.model.config.schema import ENUMS, MESSAGES, ONE_OF

pytestmark = pytest.mark.promise(
    "Models",
    "A `config.pbtxt` is read against Triton's whole schema. Errors name file, line and field, "
    "and fields without effect are named.",
)

# This has one of each way in which people write these files.
FULL = """\
# The detector, "v2" { not a block }
name: "detector"
backend: 'python'
max_batch_size: 16
input [
  {
    name: "IMAGE"   # stays a comment: }
    data_type: TYPE_UINT8
    dims: [ 3, -1, -1 ]
  },
  {
    name: "LABEL"
    data_type: TYPE_STRING
    dims: 1
    optional: true
  }
]
output {
  name: "SCORE" data_type: TYPE_FP32 dims: [ 4 ]
  reshape: { shape: [ 2, 2 ] }
}
instance_group [{ count: 2, kind: KIND_GPU, gpus: [ 0, 1 ] }]
dynamic_batching {
  preferred_batch_size: [ 4, 8 ]
  max_queue_delay_microseconds: 250;
  priority_levels: 2
  default_priority_level: 1
  default_queue_policy < timeout_action: DELAY >
  priority_queue_policy { key: 2
    value: { max_queue_size: 32 default_timeout_microseconds: 18446744073709551615 } }
}
parameters: { key: "NOTE" value: { string_value: "a 'quoted' "
                                                 "text" } }
parameters {
  key: "EXECUTION_ENV_PATH"
  value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" }
}
version_policy: { specific { versions: 1 versions: 3 } }
"""


def error(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        pbtxt.parse(text, "config.pbtxt")
    return caught.value


class TestReading:
    def test_a_real_file_becomes_the_json_that_triton_prints(self, tmp_path: Path) -> None:
        path = tmp_path / "config.pbtxt"
        path.write_text(FULL)

        raw = pbtxt.read(path)

        assert list(raw) == [name for name in MESSAGES["ModelConfig"] if name in raw]
        assert raw["name"] == "detector"
        assert raw["max_batch_size"] == 16
        assert raw["input"][0] == {
            "name": "IMAGE",
            "data_type": "TYPE_UINT8",
            "format": "FORMAT_NONE",
            "dims": [3, -1, -1],
            "is_shape_tensor": False,
            "allow_ragged_batch": False,
            "optional": False,
            "is_non_linear_format_io": False,
        }
        assert raw["input"][1]["dims"] == [1]
        assert raw["output"][0]["reshape"] == {"shape": [2, 2]}
        assert raw["parameters"]["NOTE"] == {"string_value": "a 'quoted' text"}
        assert raw["version_policy"] == {"specific": {"versions": [1, 3]}}
        assert raw["instance_group"][0]["kind"] == "KIND_GPU"
        batching = raw["dynamic_batching"]
        assert batching["max_queue_delay_microseconds"] == 250
        assert batching["default_queue_policy"]["timeout_action"] == "DELAY"
        assert batching["priority_queue_policy"]["2"] == {
            "timeout_action": "REJECT",
            "default_timeout_microseconds": 2**64 - 1,
            "allow_timeout_override": False,
            "max_queue_size": 32,
        }
        assert raw["optimization"]["input_pinned_memory"] == {"enable": True}
        assert "sequence_batching" not in raw

    def test_an_empty_file_has_all_defaults(self) -> None:
        raw, _ = pbtxt.parse("", "config.pbtxt")

        assert raw == normalise({})
        assert raw["version_policy"] == {"latest": {"num_versions": 1}}

    def test_normalising_what_was_read_changes_nothing(self) -> None:
        raw, source = pbtxt.parse(FULL, "config.pbtxt")

        assert normalise(raw, source) == raw

    @settings(max_examples=40, deadline=None)
    @given(
        st.integers(0, 2**31 - 1),
        st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
        st.sampled_from(ENUMS["DataType"]),
        st.booleans(),
    )
    def test_any_values_come_back_and_stay(
        self, size: int, dims: list[int], text: str, datatype: str, batching: bool
    ) -> None:
        written = "".join(f"\\{byte:03o}" for byte in text.encode())
        config = f'max_batch_size: {size} input {{ name: "{written}" data_type: {datatype}'
        config += f" dims: {dims} }}" + (" dynamic_batching {}" if batching else "")

        raw, source = pbtxt.parse(config, "config.pbtxt")

        assert raw["input"][0]["dims"] == dims
        assert raw["input"][0]["name"] == text
        assert raw["input"][0]["data_type"] == datatype
        assert raw["max_batch_size"] == size
        if batching:
            preferred = [size] if size else []
            assert raw["dynamic_batching"]["preferred_batch_size"] == preferred
        assert normalise(raw, source) == raw


class TestLines:
    @pytest.mark.parametrize(
        ("field", "marker"),
        [
            ("name", 'name: "detector"'),
            ("max_batch_size", "max_batch_size"),
            ("input[0].dims", "dims: [ 3"),
            ("input[1]", "  {\n    name: \"LABEL\""),
            ("input[1].optional", "optional: true"),
            ("output[0].reshape", "reshape:"),
            ("output[0].reshape.shape[1]", "reshape:"),
            ("output[0].label_filename", "output {"),
            ("instance_group[0].gpus", "instance_group"),
            ("dynamic_batching.preferred_batch_size[1]", "preferred_batch_size"),
            ("dynamic_batching.default_queue_policy", "default_queue_policy"),
            ("dynamic_batching.priority_queue_policy[2].max_queue_size", "key: 2"),
            ("parameters[NOTE]", 'key: "NOTE"'),
            ("parameters[EXECUTION_ENV_PATH]", 'key: "EXECUTION_ENV_PATH"'),
            ("version_policy.specific.versions", "version_policy"),
        ],
    )  # fmt: skip
    def test_every_field_is_found_on_its_line(self, field: str, marker: str) -> None:
        _, source = pbtxt.parse(FULL, "config.pbtxt")

        assert source.line(field) == FULL.count("\n", 0, FULL.index(marker)) + 1

    def test_a_field_that_is_not_there_has_no_line(self) -> None:
        _, source = pbtxt.parse(FULL, "config.pbtxt")

        assert source.line("model_warmup") is None
        assert str(source.error("model_warmup", "what")) == "config.pbtxt: model_warmup: what"

    def test_the_key_of_a_map_counts_for_more_than_its_position(self) -> None:
        entry = "  priority_queue_policy {{ key: {} value {{ }} }}\n"
        text = "dynamic_batching {\n" + entry.format(1) + entry.format(0) + "}\n"
        _, source = pbtxt.parse(text, "config.pbtxt")

        assert source.line("dynamic_batching.priority_queue_policy[0]") == 3
        assert source.line("dynamic_batching.priority_queue_policy[1]") == 2


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "line", "field", "what"),
        [
            ('name: "m"\nmax_bach_size: 8', 2, "max_bach_size",
             'no field "max_bach_size" in ModelConfig; did you mean "max_batch_size"?'),
            ('input [ { },\n { name: "a"\n  datatype: TYPE_FP32 } ]', 3, "input[1].datatype",
             'no field "datatype" in ModelInput; did you mean "data_type"?'),
            ("output {\n dims: [ 1 ]\n zzz: 1 }", 3, "output[0].zzz",
             'no field "zzz" in ModelOutput'),
            ('parameters {\n key: "a"\n val: { } }', 3, "parameters[0].val",
             'no field "val" in ModelConfig.ParametersEntry; did you mean "value"?'),
            ("\n\ninput { data_type: TYPE_FLOAT }", 3, "input[0].data_type",
             "must be one of TYPE_INVALID, TYPE_BOOL, "),
            ("max_batch_size: 3000000000", 1, "max_batch_size",
             "must be an integer from -2147483648 to 2147483647, not 3000000000"),
            ('max_batch_size: "8"', 1, "max_batch_size",
             'must be an integer from -2147483648 to 2147483647, not "8"'),
            ("max_batch_size:", 1, "max_batch_size", "has no value"),
            ("model_transaction_policy { decoupled: maybe }", 1,
             "model_transaction_policy.decoupled", "must be true or false, not maybe"),
            ("\nplatform: ensemble", 2, "platform",
             'must be a string, not ensemble; put it into quotes: "ensemble"'),
            ("input { reshape: 3 }", 1, "input[0].reshape",
             "must be a message with the fields of ModelTensorReshape, not 3"),
            ('name: "a"\nname: "b"', 2, "name",
             "is there twice; keep one"),
            ("dynamic_batching { }\nsequence_batching { }", 2, "sequence_batching",
             "sequence_batching and dynamic_batching exclude each other; keep one"),
            ("input [\n  {\n", 2, "input[0]", "Expected \"}\"."),
            ('name: "never closed\n', 1, "name", "String missing ending quote"),
        ],
    )  # fmt: skip
    def test_a_mistake_is_named_by_line_and_field(self, text: str, line: int, field: str, what: str) -> None:
        found = error(text)

        assert (found.line, found.field) == (line, field)
        assert str(found).startswith(f"config.pbtxt:{line}: {field}: {what}")
        assert found.code == "INVALID_ARG"

    def test_a_file_that_is_not_text_is_refused_with_the_line(self, tmp_path: Path) -> None:
        path = tmp_path / "config.pbtxt"
        path.write_bytes(b'name: "a"\n\xff\xfe')

        with pytest.raises(ConfigError, match=r"config.pbtxt:2: is not UTF-8 text \(byte 0xff\)"):
            pbtxt.read(path)

    def test_a_missing_file_and_a_directory_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
            pbtxt.read(tmp_path / "config.pbtxt")
        with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
            pbtxt.read(tmp_path)

    def test_a_file_of_absurd_size_is_not_parsed(self, tmp_path: Path) -> None:
        path = tmp_path / "config.pbtxt"
        with path.open("wb") as stream:
            stream.truncate(1 << 40)

        with pytest.raises(ConfigError, match=r"config\.pbtxt: is longer than 1048576 bytes"):
            pbtxt.read(path)

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, len(FULL)), st.sampled_from(["", "}", "{", '"', "]", "\0", "é", "x:"]))
    def test_a_broken_file_is_an_error_of_ours_or_reads(self, cut: int, put: str) -> None:
        refusals: list[ConfigError] = []

        try:
            pbtxt.parse(FULL[:cut] + put + FULL[cut + 3 :], "config.pbtxt")
        except ConfigError as refused:
            refusals.append(refused)

        assert all(refused.line is not None for refused in refusals)


class TestSchema:
    def test_the_table_is_protobufs_own_schema(self) -> None:
        from tritonclient.grpc import model_config_pb2

        seen: set[str] = set()
        _compare(model_config_pb2.ModelConfig.DESCRIPTOR, seen)

        assert seen <= set(MESSAGES)

    def test_reading_a_configuration_from_python_needs_no_protobuf(self) -> None:
        code = (
            "import sys, moonpool.runtime.model.config.model as c, moonpool.runtime.repository.repository;"
            "c.ModelConfig.from_dict(c.minimal('m'), partial=True);"
            "print([m for m in sys.modules if m.startswith(('google', 'tritonclient', 'grpc'))])"
        )
        root = Path(__file__).parents[4] / "src"

        done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(root)}, capture_output=True)

        assert done.stdout.strip() == b"[]", done.stderr


def _compare(descriptor, seen) -> None:  # type: ignore[no-untyped-def]
    name = descriptor.full_name.removeprefix("inference.")
    if name in seen:
        return
    seen.add(name)
    for field in descriptor.fields:
        assert MESSAGES[name].get(field.name) == _type(field), f"{name}.{field.name}"
        entry = field.message_type and field.message_type.GetOptions().map_entry
        inner = field.message_type.fields_by_name["value"] if entry else field
        if inner.message_type:
            _compare(inner.message_type, seen)
    for group in descriptor.oneofs:
        known = set(ONE_OF[name]) if name in ONE_OF else set()
        members = {field.name for field in group.fields}
        assert members <= known or len(members) == 1, f"{name}: {members}"


def _type(field) -> str:  # type: ignore[no-untyped-def]
    message = field.message_type
    if message and message.GetOptions().map_entry:
        entry = message.fields_by_name
        return f"{{{_type(entry['key'])}}}{_type(entry['value']).rstrip('?')}"
    if field.enum_type:
        name: str = field.enum_type.full_name.removeprefix("inference.")
        assert ENUMS[name] == [value.name for value in field.enum_type.values]
        assert [value.number for value in field.enum_type.values] == list(range(len(ENUMS[name])))
    elif message:
        name = message.full_name.removeprefix("inference.")
    else:
        name = {1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32"}.get(field.type) or {
            8: "bool", 9: "string", 13: "uint32"}[field.type]  # fmt: skip
    optional = field.has_presence and not message and not field.is_repeated
    return name + ("*" if field.is_repeated else "?" if optional else "")
