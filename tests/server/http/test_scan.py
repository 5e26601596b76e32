"""The JSON of usual requests is read in one step, and means what the general reader makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.extension import is_wanted, load_if_there
from moonpool.ipc.tensors import CODES
from moonpool.runtime.server.http.infer_request import HttpRequestPlan
from moonpool.runtime.server.http.json_text import loads
from moonpool.runtime.server.inference.request import InputPlan

_extension = load_if_there("moonpool.runtime.server.http._scan") if is_wanted() else None
_scan: Any = _extension and _extension.scanner(InputPlan, CODES)
pytestmark = pytest.mark.skipif(_scan is None, reason="needs the compiled form")
_INPUT = {"name": "A", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
_OTHER = {"parameters": {"binary_data_size": 0}, "datatype": "BYTES", "shape": [], "name": "B"}
_USUAL: list[dict[str, Any]] = [
    {"inputs": [_INPUT]},
    {"id": "a1", "inputs": [_INPUT, _OTHER], "parameters": {}},
    {"id": "", "parameters": {"binary_data_output": True}, "inputs": [_OTHER]},
    {
        "inputs": [_INPUT],
        "outputs": [
            {"name": "X", "parameters": {"binary_data": True}},
            {"parameters": {"binary_data": False}, "name": "Y"},
        ],
    },
    {"inputs": [_INPUT], "outputs": [{"name": "X"}], "id": "/ ~"},
    {
        "parameters": {"sequence_id": 7, "sequence_start": True, "priority": 2, "timeout": 10**17, "user": "u", "n": 0},
        "inputs": [_INPUT],
    },
]
_UNUSUAL = [
    b"",
    b"null",
    b"[]",
    b'{"id":"a"}',
    b'{"inputs":[]}',
    b'{"inputs":null}',
    b'{"id":1,"inputs":[]}',
    json.dumps({"inputs": [_INPUT, _INPUT]}).encode(),
    json.dumps({"inputs": [{**_INPUT, "data": []}]}).encode(),
    json.dumps({"inputs": [{**_INPUT, "datatype": "FP31"}]}).encode(),
    json.dumps({"inputs": [{**_INPUT, "shape": [-1]}]}).encode(),
    json.dumps({"inputs": [{**_INPUT, "shape": [1.0]}]}).encode(),
    json.dumps({"inputs": [{**_INPUT, "shape": [10**18]}]}).encode(),
    json.dumps({"inputs": [{**_INPUT, "parameters": {"shared_memory_region": "r"}}]}).encode(),
    json.dumps({"inputs": [_INPUT], "outputs": [{"name": "X"}, {"name": "X"}]}).encode(),
    json.dumps({"inputs": [_INPUT], "outputs": [{"name": "X", "parameters": {"classification": 1}}]}).encode(),
    json.dumps({"inputs": [_INPUT], "id": "\u00e9"}).encode(),
    json.dumps({"inputs": [_INPUT], "id": 'a"b'}).encode(),
    json.dumps({"inputs": [_INPUT], "parameters": {"n": -1}}).encode(),
    json.dumps({"inputs": [_INPUT], "parameters": {"n": 0.5}}).encode(),
    json.dumps({"inputs": [_INPUT], "parameters": {"n": None}}).encode(),
    json.dumps({"inputs": [_INPUT], "further": 1}).encode(),
    json.dumps({"inputs": [_INPUT]}).encode() + b"x",
    json.dumps({"inputs": [_INPUT]}).encode() + b"\0",
    b'{"id":"a","id":"b","inputs":' + json.dumps([_INPUT]).encode() + b"}",
    b'{"inputs":' + json.dumps([_INPUT]).encode().replace(b"16", b"016") + b"}",
    b'{"inputs":' + json.dumps([_INPUT]).encode().replace(b"16", b"16e0") + b"}",
    b'{"inputs":' + json.dumps([_INPUT]).encode().replace(b"[1, 4]", b"[1, 4,]") + b"}",
    b'{"parameters":{"n":1,"n":2},"inputs":' + json.dumps([_INPUT]).encode() + b"}",
    json.dumps({"inputs": [_INPUT]}).encode() + b" " * 4096,
]


def _of(value: Any) -> Any:
    """Everything of a plan, or the error that comes in its place."""
    try:
        plan = HttpRequestPlan(value())
    except MoonpoolError as error:
        return type(error), str(error)
    names = ("details", "id_text", "inputs", "is_plain", "outputs", "places", "request_id", "rest", "wanted")
    return {name: getattr(plan, name) for name in names} | {"flags": (plan.has_classes, plan.has_shared)}


def _check(text: bytes) -> bool:
    """Check that a text means the same to both, if it is read in one step at all. Returns if it is."""
    found = _scan(text)
    if found is not None:
        assert _of(lambda: found) == _of(lambda: loads(text))
    return found is not None


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", "\t:\r")])
@pytest.mark.parametrize("request_", _USUAL)
def test_usual_requests_are_read_in_one_step(request_: dict[str, Any], separators: tuple[str, str]) -> None:
    assert _check(json.dumps(request_, separators=separators).encode())


@pytest.mark.parametrize("text", _UNUSUAL)
def test_other_texts_are_left_to_the_general_reader(text: bytes) -> None:
    assert not _check(text)


@pytest.mark.parametrize("request_", _USUAL)
def test_no_beginning_of_a_text_is_taken_for_all_of_it(request_: dict[str, Any]) -> None:
    text = json.dumps(request_).encode()
    assert not any(_check(text[:end]) for end in range(len(text)))


@pytest.mark.parametrize("name", ["binary_data_output", "priority", "sequence_start", "triton_x"])
def test_wrong_parameters_are_refused_alike(name: str) -> None:
    assert _check(json.dumps({"parameters": {name: "x"}, "inputs": [_INPUT]}).encode())


@given(st.sampled_from(_USUAL), st.data())
def test_changed_texts_mean_the_same_to_both(request_: dict[str, Any], data: st.DataObject) -> None:
    text = bytearray(json.dumps(request_, separators=(",", ":")).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        piece = data.draw(
            st.binary(max_size=2) | st.sampled_from([b"0", b"9", b'"', b",", b"{}", b"[]", b"e1", b"\\u0041"])
        )
        text[at : at + data.draw(st.integers(0, 2))] = piece
    _check(bytes(text))
