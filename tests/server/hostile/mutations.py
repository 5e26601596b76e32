"""Valid requests and the things that may go wrong with them, for hypothesis to choose from."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from moonpool.runtime.conformance.tensors import GOOD, A, B, lent, output, tensor

VALID: list[tuple[str, Any]] = [
    ("/v2/models/add_sub/infer", GOOD),
    ("/v2/models/add_sub/infer", {"inputs": [lent("INPUT0", 16), B], "id": "1"}),
    (
        "/v2/models/add_sub/infer",
        {
            "inputs": [A, B],
            "outputs": [output("OUTPUT0", binary_data=True, classification=1), output("OUTPUT1")],
            "parameters": {"binary_data_output": True, "priority": 1, "timeout": 1000000},
        },
    ),
    ("/v2/models/every/infer", {"inputs": [tensor("IN_STRING", ["a", "b"], "BYTES")]}),
    ("/v2/models/every/infer", {"inputs": [tensor("IN_INT64", [1, 2], "INT64")]}),
    ("/v2/models/every/infer", {"inputs": [lent("IN_FP16", 4, "FP16", [2])]}),
    ("/v2/models/told/infer", {"inputs": [tensor("X", [1.0])], "parameters": {"a": 1, "sequence_id": "s"}}),
    ("/v2/models/says/generate", {"text_input": "hi", "count": 1, "parameters": {"a": 1}}),
    ("/v2/models/says/generate_stream", {"text_input": "hi", "count": 2}),
    ("/v2/repository/index", {"ready": True}),
    ("/v2/systemsharedmemory/region/r/register", {"key": "/moonpool_tests_nothing", "offset": 0, "byte_size": 64}),
    ("/v2/trace/setting", {"trace_rate": "10", "trace_level": ["OFF"]}),
    ("/v2/logging", {"log_verbose_level": 0}),
]

_NUMBERS = [0, 1, -1, 2**31, 2**40, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 1.5, 1e308]
_TEXTS = ["", "FP32", "BYTES", "INPUT0", "r", "\0", "\n", "..", "é\U0001f600", "x" * 5000]
# Values are drawn as texts, because a mutation may change a drawn object.
_VALUES: list[Any] = [None, True, [], {}, [[]], [[1], 2], *_NUMBERS, *_TEXTS]
_SMALL: st.SearchStrategy[Any] = st.sampled_from([json.dumps(value) for value in _VALUES]).map(json.loads)
ANYTHING = _SMALL | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
KEYS = [
    "inputs", "outputs", "parameters", "id", "name", "shape", "datatype", "data", "binary_data_size", "binary_data",
    "classification", "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "sequence_id", "priority",
]  # fmt: skip


@st.composite
def wrong_requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """Make a path and a body that was valid before one to three changes."""
    path, valid = draw(st.sampled_from(VALID))
    body = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        body = _mutated(draw, body)
    text = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.binary(max_size=8)) + text[at + draw(st.integers(0, 4)) :]
    return path, text + draw(st.sampled_from([b"", b"\0" * 4, b"\0" * 16, b"\xff" * 33]))


def _mutated(draw: st.DrawFn, body: Any) -> Any:
    """Replace, remove or add something anywhere in it."""
    places = list(_places(body))
    if not places:
        return draw(ANYTHING)
    holder, key = draw(st.sampled_from(places))
    action = draw(st.sampled_from(["replace", "replace", "remove", "add", "repeat"]))
    if action == "remove":
        del holder[key]
    elif action == "add" and isinstance(holder, dict):
        holder[draw(st.sampled_from(KEYS))] = draw(ANYTHING)
    elif action == "repeat" and isinstance(holder, list):
        holder.extend([holder[key]] * draw(st.sampled_from([1, 3, 100])))
    else:
        holder[key] = draw(ANYTHING)
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """List every place of a value that can be changed: its container and its key."""
    if not isinstance(value, dict | list):
        return
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(inner):
        yield value, key
        yield from _places(item)
