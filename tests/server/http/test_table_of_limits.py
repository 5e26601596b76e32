"""Every row of the page's table of limits that names a status has it, whatever is beyond the limit."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.http.served import MODELS, PLAIN, TEXT
from tests.server.http.serving import Serving

import moonpool
from moonpool.runtime.server import service
from moonpool.runtime.server.http import json_text
from moonpool.runtime.server.http.options import HttpLimits

PAGE = Path(__file__).parents[3] / "docs" / "OPERATING.md"
INFER = "/v2/models/plain/infer"


@pytest.fixture(scope="module")
def runtime() -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime() as runtime:
        runtime.load("plain", MODELS / "echo.py", config=PLAIN)
        runtime.load("text", MODELS / "echo.py", config=TEXT)
        yield runtime


def values(count: int) -> bytes:
    given = [{"name": "X", "datatype": "UINT8", "shape": [count], "data": [255] * count}]
    return json.dumps({"inputs": given}).encode()


def raw(serving: Serving, text: bytes) -> int:
    """Send bytes, and return the status of the answer."""
    with socket.create_connection(("127.0.0.1", serving.port), timeout=60.0) as client:
        client.sendall(text)
        return int(client.recv(100).split()[1])


def head_too_long(serving: Serving) -> int:
    return raw(serving, b"GET /v2 HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n")


def body_too_long(serving: Serving) -> int:
    return serving.post(INFER, values(50_000)).status


def inflated_too_long(serving: Serving) -> int:
    body, headers = gzip.compress(values(50_000)), {"Content-Encoding": "gzip"}
    return serving.post(INFER, body, headers).status


def too_many(part: str) -> Callable[[Serving], int]:
    """Return a request with too many parts of a kind, over all paths that read JSON of clients."""
    sent = {
        "strings": json.dumps({"inputs": ["s"] * 5000}),
        "members": json.dumps({f"{number}": 0 for number in range(5000)}),
        "arrays": json.dumps({"inputs": [[]] * 5000}),
    }[part].encode()

    def ask(serving: Serving) -> int:
        paths = (INFER, "/v2/models/text/generate", "/v2/models/text/generate_stream", "/v2/logging")
        statuses = {serving.post(path, sent + b" " * 2000).status for path in paths}
        assert len(statuses) == 1
        return statuses.pop()

    return ask


def outputs_too_long(serving: Serving) -> int:
    text = json.dumps(
        {"inputs": [{"name": "X", "datatype": "UINT8", "shape": [5000], "parameters": {"binary_data_size": 5000}}]}
    ).encode()
    return serving.post(INFER, text + b"\xff" * 5000, {"Inference-Header-Content-Length": str(len(text))}).status


def one_client_too_many(serving: Serving) -> int:
    with socket.create_connection(("127.0.0.1", serving.port)) as first:
        first.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        assert first.recv(100)
        return raw(serving, b"GET /v2/health/live HTTP/1.1\r\n\r\n")


def slow_head(serving: Serving) -> int:
    return raw(serving, b"GET /v2 HTTP/1.1\r\nX")


def slow_body(serving: Serving) -> int:
    return raw(serving, f"POST {INFER} HTTP/1.1\r\nContent-Length: 9\r\n\r\n1".encode())


@contextlib.contextmanager
def client_region(serving: Serving, size_bytes: int) -> Iterator[dict[str, Any]]:
    """Parameters of an input in a region of the client's that is a hole."""
    file = Path("/dev/shm/moonpool-test-hole")
    file.touch()
    try:
        with file.open("r+b") as hole:
            hole.truncate(size_bytes)
        region = {"key": "/moonpool-test-hole", "offset": 0, "byte_size": size_bytes}
        assert serving.post("/v2/systemsharedmemory/region/r/register", region).status == 200
    finally:
        file.unlink()
    yield {"shared_memory_region": "r", "shared_memory_byte_size": size_bytes}


def hole_in_shared_memory(serving: Serving) -> int:
    size_bytes = 1 << 40
    with client_region(serving, size_bytes) as given:
        inputs = [{"name": "X", "datatype": "BYTES", "shape": [1], "parameters": given}]
        reply = serving.post("/v2/models/text/infer", {"inputs": inputs})
    assert f"{size_bytes} bytes" in reply.error
    return reply.status


def copies_of_others(serving: Serving) -> int:
    """Ask while the copies of other requests take what all may have together."""
    with client_region(serving, 1 << 20) as given:
        most_bytes = service._MOST_COPIED_BYTES
        others = serving.service._copies.charge(most_bytes, most_bytes)
        assert others is not None
        inputs = [{"name": "X", "datatype": "BYTES", "shape": [1], "parameters": given}]
        reply = serving.post("/v2/models/text/infer", {"inputs": inputs})
        assert "ask again later" in reply.error
        del others
    return reply.status


CASES: dict[str, list[tuple[dict[str, Any], Callable[[Serving], int], int]]] = {
    "request line and headers": [({}, head_too_long, 431)],
    "body": [({"body_bytes": 100_000}, body_too_long, 413)],
    "decompressed body": [({"inflated_bytes": 100_000}, inflated_too_long, 413)],
    "JSON, which takes many times its size in memory": [
        ({"json_bytes": 100_000}, body_too_long, 413),
        ({}, too_many("strings"), 413),
        ({}, too_many("members"), 413),
        ({}, too_many("arrays"), 413),
        ({"json_bytes": 10_000}, outputs_too_long, 400),
    ],
    "inputs in shared memory that have to be copied, of all requests at a time": [
        ({}, hole_in_shared_memory, 400),
        ({}, copies_of_others, 503),
    ],
    "all three sizes at once, as in Triton": [
        (dict.fromkeys(("body_bytes", "inflated_bytes", "json_bytes", "input_bytes"), 1000), body_too_long, 400)
    ],
    "connections": [({"connections": 1}, one_client_too_many, 503)],
    "time for the headers": [({"head_timeout_s": 0.05}, slow_head, 408)],
    "time for a body": [({"body_timeout_s": 0.05}, slow_body, 408)],
}


def rows() -> dict[str, list[int]]:
    """Return the rows of the table that name statuses, each with those."""
    table = PAGE.read_text().split("| limit | value | beyond it |\n", 1)[1].split("\n\n", 1)[0]
    cells = [re.split(r"\s*\|\s*", line)[1:4] for line in table.splitlines()[1:]]
    found = {title: [int(each) for each in re.findall(r"\b[45]\d\d\b", beyond)] for title, _, beyond in cells}
    return {title: statuses for title, statuses in found.items() if statuses}


@pytest.mark.promise("HTTP", "What is beyond a limit of the server's page has the status that the page names.")
def test_what_is_beyond_a_limit_has_its_status(runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MOST_CONTAINERS", "_MOST_MEMBERS", "_MOST_STRINGS"):
        monkeypatch.setattr(json_text, name, 1000)
    assert {title: {status for _, _, status in cases} for title, cases in CASES.items()} == {
        title: set(statuses) for title, statuses in rows().items()
    }
    for cases in CASES.values():
        for limits, ask, status in cases:
            with Serving(runtime, limits=HttpLimits(**limits)) as serving:
                assert ask(serving) == status
