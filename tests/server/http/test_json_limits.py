"""JSON takes many times its own size once it is read: how much of it there may be."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import numpy as np
import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.server.http.served import served
from tests.server.http.serving import Serving

from moonpool.runtime.frontend.http.json_text import NotJson, loads
from moonpool.runtime.frontend.http.options import HttpLimits
from moonpool.runtime.frontend.tensors import of_values

MOST = 2000
PLAIN = "/v2/models/plain/infer"


@pytest.fixture(scope="module")
def limited() -> Iterator[Serving]:
    with served("plain", limits=HttpLimits(json_bytes=MOST)) as serving:
        yield serving


def binary(count: int, **parameters: object) -> tuple[bytes, dict[str, str]]:
    """A request whose input lies behind its JSON."""
    described = {
        "name": "X",
        "datatype": "UINT8",
        "shape": [count],
        "parameters": {"binary_data_size": count},
    }
    text = json.dumps({"inputs": [described], "parameters": parameters}).encode()
    return text + bytes(count), {"Inference-Header-Content-Length": str(len(text))}


def asking(count: int, **parameters: object) -> bytes:
    inputs = [{"name": "X", "datatype": "UINT8", "shape": [count], "data": [0] * count}]
    return json.dumps({"inputs": inputs, "parameters": parameters}, separators=(",", ":")).encode()


@pytest.mark.parametrize("form", ["plain", "packed", "with binary data"])
def test_json_over_the_limit_is_refused(limited: Serving, form: str) -> None:
    body, headers = asking(MOST), {}
    if form == "packed":
        body, headers = gzip.compress(body), {"Content-Encoding": "gzip"}
    elif form == "with binary data":
        headers = {"Inference-Header-Content-Length": str(len(body))}
        body += b"x"

    reply = limited.post(PLAIN, body, headers)

    assert reply.status == 413
    assert f"{MOST} bytes" in reply.error
    assert limited.post(PLAIN, asking(10)).status == 200


def test_binary_data_are_not_counted(limited: Serving) -> None:
    assert limited.post(PLAIN, *binary(10 * MOST, binary_data_output=True)).status == 200


@pytest.mark.parametrize("path", ["/v2/models/plain/generate", "/v2/logging"])
def test_so_it_is_elsewhere(limited: Serving, path: str) -> None:
    # Larger than what is read before anybody looks at it.
    body = json.dumps({"X": [0] * 200_000}).encode()

    assert limited.post(path, body).status == 413


def test_outputs_over_the_limit_are_not_sent_as_json(limited: Serving) -> None:
    reply = limited.post(PLAIN, *binary(10 * MOST))

    assert reply.status == 400
    assert "ask for binary data" in reply.error


def test_arrays_without_end_are_refused() -> None:
    with pytest.raises(NotJson, match="more than 1048576 arrays"):
        loads(b"[" + b"[]," * (1 << 20) + b"[]]")


def test_numbers_beside_arrays_are_all_taken_in_their_order() -> None:
    values = [0, [1, [[2, 3], 4]], [], 5]

    found = of_values("X", 9, [6], values)

    assert isinstance(found, np.ndarray)
    assert found.tolist() == [0, 1, 2, 3, 4, 5]
