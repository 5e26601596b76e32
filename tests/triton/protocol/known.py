"""Differences from Triton over the network, on purpose: rows of docs/site/PROTOCOL_DIFFERENCES.md, with cases."""

from __future__ import annotations

import re

# The title of a row, and patterns of the names of its cases.
DIFFERENCES: dict[str, tuple[str, ...]] = {
    "Why a model cannot be loaded": (
        r"repository: /v2/repository/models/(nope|%2e%2e)/load b''",
        r"repository: load with (nonsense|an unknown field|a file ).*",
        r"repository: load with a configuration of another name",
        r"gRPC control: load (what is not there|nothing|with a file alone)",
    ),
    "An empty configuration for a load": (r"(repository|gRPC control): load with an empty config.*",),
    "Whole numbers beyond their datatype": (
        r"datatypes: (UINT8 \[(256|-1)\]|UINT16 \[65536\]|UINT32 \[4294967296\]|UINT64 \[-1\])",
        r"datatypes: (INT8 \[128\]|INT16 \[40000\]|INT32 \[2147483648\]|INT64 \[9223372036854775808\])",
        r"gRPC datatypes: (INT8 \(128,\)|INT16 \(40000,\)|UINT8 \(255, 256\))",
    ),
    "BYTES that are no UTF-8, in JSON": (r"binary: BYTES b'\\x02\\x00\\x00\\x00\\xff\\xfe' as JSON",),
    "What is wrong with bytes that are to be BYTES": (
        r"binary: BYTES b'(|\\x01\\x00\\x00(\\x00a(\\x01.*b)?)?|\\x02\\x00\\x00\\x00a)' as .*",
        r"gRPC datatypes: BYTES of b'\\x0[12]\\x00\\x00(\\x00a(\\x01.*)?)?'",
    ),
    "Which output cannot be sent, or classified": (
        r"binary: (FP16 b'\\x00|BF16).* as JSON",
        r"classes: classes of BOOL.*",
    ),
    "Which input is wrong, if several are": (
        r"tensors: (no batch dimension|batches that differ)",
        r"gRPC which: ModelInfer \{'name': 'batched', 'version': ''\}",
    ),
    "An input too many": (r"(tensors|gRPC inference): an input too many",),
    "An empty batch, over the network": (r"tensors: an empty batch",),
    "A shape with more elements than memory can hold": (r"tensors: shape that overflows",),
    "Bytes behind JSON without a header length": (r"binary: no header length",),
    "Whole numbers of 64 bits as parameters": (
        r"(parameters: a: 9223372036854775808|gRPC inference: parameters \{'a': 9223372036854775808\})",
    ),
    "An empty text for a sequence": (r"parameters: sequence_id: ''",),
    "A version below 0": (r"gRPC which: .*'version': '-\d'\}",),
    "An object that is smaller than the region": (
        r"memory: register \{'(byte_size|offset)': (65|4097|9223372036854775808|32|4096).*",
        r"gRPC control: register \{'(byte_size|offset)': (65|64).*",
    ),
    "A region of no bytes": (r"(memory|gRPC control): register \{'byte_size': 0\}",),
    "A region without a name": (r"gRPC control: register \{'name': ''\}",),
    "A region that begins inside a page": (r"memory: register \{'offset': 16, 'byte_size': 16\}",),
    "A key that can be no name of an object": (r"memory: register \{'key': '(|/../etc/passwd|/a/b)'\}",),
    "The status of what was cancelled": (r"models: fails CANCELLED",),
    "A parameter that stands twice in `generate`": (
        r'generate: /v2/models/says/generate '
        r'b\'\{"text_input":"a",.*("p":1,"p":2|"parameters".*"parameters"|"id".*"id").*',
    ),
    "The body of a health check": (
        r"\w+: GET /v2/(health/(live(\?x=1)?|ready)|models/add_sub(/versions/0*1)?/ready)",
    ),
    "A setting of traces that is out of range": (r"settings: /v2/trace/setting \{'trace_count': '-2'\}",),
}  # fmt: skip


def difference(case: str) -> str | None:
    """The title of the row that this case belongs to, if it is one of those."""
    for title, patterns in DIFFERENCES.items():
        if any(re.fullmatch(pattern, case) for pattern in patterns):
            return title
    return None
