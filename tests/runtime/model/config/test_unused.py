"""Fields that nobody acts on: each is named for a warning, and nothing else is."""

from __future__ import annotations

import pytest

from moonpool.runtime.model.config import pbtxt
from moonpool.runtime.model.config.model import unused_fields

pytestmark = pytest.mark.promise("Models", "A `config.pbtxt` is read against Triton's …")


class TestUnusedFields:
    @pytest.mark.parametrize(
        ("text", "fields"),
        [
            ("", []),
            ("optimization { input_pinned_memory { enable: true } }", []),
            ("model_transaction_policy { decoupled: false } response_cache { }", []),
            ("ensemble_scheduling { step { model_name: \"x\" } }", []),
            ("model_transaction_policy { decoupled: true }", []),
            ("response_cache { enable: true }", []),
            ("model_warmup { name: \"w\" }", []),
            ("optimization { eager_batching: true }", ["optimization"]),
            ("optimization { output_pinned_memory { enable: false } }", ["optimization"]),
            ("batch_input { kind: BATCH_ITEM_SHAPE }", ["batch_input"]),
            ("backend: \"pytorch\" batch_input { kind: BATCH_ITEM_SHAPE } batch_output { source_input: \"x\" }", []),
            ("backend: \"mine\" batch_output { source_input: \"x\" }", ["batch_output"]),
            ("model_operations { op_library_filename: \"x\" }", ["model_operations"]),
            ("cc_model_filenames { key: \"a\" value: \"b\" }", ["cc_model_filenames"]),
            ("metric_tags { key: \"a\" value: \"b\" } runtime: \"r\"", []),
            ("backend: \"onnxruntime\" optimization { graph { level: 1 } }", []),
            ("instance_group { rate_limiter { priority: 2 } } instance_group { passive: true }",
             ["instance_group.passive"]),
            ("input { format: FORMAT_NHWC allow_ragged_batch: true } output { label_filename: \"l\" reshape { } }", []),
        ],
    )  # fmt: skip
    def test_unused_fields_are_named_once(self, text: str, fields: list[str]) -> None:
        raw, _ = pbtxt.parse(text, "config.pbtxt")

        assert unused_fields(raw) == fields

    def test_a_full_use_of_what_is_acted_on_gives_no_warning(self) -> None:
        raw, _ = pbtxt.parse(
            """
            name: "m" backend: "python" max_batch_size: 4 default_model_filename: "x.py"
            input { name: "I" data_type: TYPE_FP32 dims: [ -1 ] optional: true }
            output { name: "O" data_type: TYPE_STRING dims: [ 1 ] }
            instance_group { name: "g" count: 2 kind: KIND_GPU gpus: 1 }
            dynamic_batching {
              preferred_batch_size: 2 priority_levels: 1 default_priority_level: 1
              default_queue_policy { timeout_action: DELAY max_queue_size: 1 }
              priority_queue_policy { key: 1 value { allow_timeout_override: true } }
            }
            model_warmup { name: "w" batch_size: 1 inputs { key: "I" value { data_type: TYPE_FP32 dims: 1 zero_data: true } } }
            version_policy { specific { versions: 1 } }
            parameters { key: "a" value { string_value: "b" } }
            """,
            "config.pbtxt",
        )

        assert unused_fields(raw) == []
