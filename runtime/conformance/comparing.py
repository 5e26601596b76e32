"""Brings answers into a form in which they can be compared: what must differ is left out, and nothing else.

In that form, `expected.txt` has what a tritonserver answered.
"""

from __future__ import annotations

import ast
import gzip
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from moonpool.runtime.conformance.wire import WireReply

EXPECTED = Path(__file__).with_name("expected.txt")
# What other headers say is about the connection, or a server's own.
_COMPARED = {"accept-encoding", "content-encoding", "content-type", "inference-header-content-length"}
_ID = re.compile(r"(?:^|(?<=Converting keyword: 'parameters': ))\[request id: .*?\] ")
# Each JSON parser has its own words for a mistake and its place.
_PARSER = re.compile(r"(failed to parse the request JSON buffer: ).*", re.DOTALL)
# The repository, which may lie anywhere.
_PLACE = re.compile(r"/\S*/(?=\w+/[0-9]+/model\.py)")
# Measured values are never the same twice.
_MEASURED = {"last_inference", "ns"}


def comparable(reply: WireReply) -> tuple[int, dict[str, str], list[Any], bytes]:
    """Return status, headers, the values of the body and the binary tensors behind them."""
    headers = {k: v for k, v in reply.headers.items() if k in _COMPARED}
    body = _decoded(reply.body, headers.get("content-encoding"))
    size = headers.pop("inference-header-content-length", None)
    text, tensors = (body, b"") if size is None else (body[: int(size)], body[int(size) :])
    if headers.get("content-type", "").startswith("text/event-stream"):
        events = text.decode().split("\n\n")
        return reply.status, headers, [_event(event) for event in events], tensors
    if reply.status >= 400:
        # Triton sends some errors in JSON as text/plain.
        headers.pop("content-type", None)
    return reply.status, headers, [_value(text)], tensors


def message(found: Message) -> Any:
    """Return a message of gRPC as plain values. Maps are sorted, as they come in any order."""
    return _sorted(_without_measures(MessageToDict(found, preserving_proto_field_name=True)))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return [_sorted(each) for each in value] if isinstance(value, list) else value


def words(text: str) -> str:
    """Return an error's text without the id of the request, which the caller knows, and without the server's paths."""
    return _PLACE.sub("{repository}/", _PARSER.sub(r"\1...", _ID.sub("", text)))


def _decoded(body: bytes, encoding: str | None) -> bytes:
    if encoding == "gzip":
        return gzip.decompress(body)
    return zlib.decompress(body) if encoding == "deflate" else body


def _event(text: str) -> Any:
    head, _, rest = text.partition("data: ")
    return head, _value(rest.encode())


def _value(text: bytes) -> Any:
    """Return a JSON value with its keys in order, and any other text as it is."""
    try:
        value = json.loads(text.decode("utf-8", "surrogateescape"), object_pairs_hook=_Ordered)
    except (ValueError, RecursionError):
        return text
    return _without_measures(value)


class _Ordered(dict[str, Any]):
    """An object that equals another only if its keys are in the same order."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and list(self.items()) == list(other.items())

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None


def _without_measures(value: Any) -> Any:
    if isinstance(value, dict):
        kind = type(value)
        return kind((key, _without_measures(item)) for key, item in value.items() if key not in _MEASURED)
    if isinstance(value, list):
        return [_without_measures(item) for item in value]
    if isinstance(value, str):
        return words(value)
    if isinstance(value, float) and not math.isfinite(value):
        # As JSON has it, which some write as numbers and others as texts.
        return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    return value


def read_expected() -> dict[str, Any]:
    """Return what a tritonserver answered, by the names of the cases."""
    answers = {}
    for block in EXPECTED.read_text(encoding="utf-8").split("\n\n")[1:]:
        name, _, answer = block.strip("\n").partition("\n")
        answers[ast.literal_eval(name)] = ast.literal_eval(answer)
    return answers
