"""Limits of JSON, whose values take many times the memory of its text."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import numpy as np
import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.server.http.listening import Client
from tests.server.http.served import served
from tests.server.http.serving import Serving

from moonpool.ipc.tensors import BYTES, CODES, encode_bytes
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.model.request import WireTensor
from moonpool.runtime.server.http import json_text
from moonpool.runtime.server.http.json_text import NotJson, loads
from moonpool.runtime.server.http.options import HttpLimits
from moonpool.runtime.server.inference.tensors import of_values
from moonpool.runtime.server.options.protocols import http_options
from moonpool.runtime.server.options.table import ServerOptions

MOST = 2000
PLAIN = "/v2/models/plain/infer"


@pytest.fixture(scope="module")
def limited() -> Iterator[Serving]:
    with served("plain", limits=HttpLimits(json_bytes=MOST)) as serving:
        yield serving


def binary(count: int, **parameters: object) -> tuple[bytes, dict[str, str]]:
    """Return a request whose input lies behind its JSON."""
    described = {"name": "X", "datatype": "UINT8", "shape": [count], "parameters": {"binary_data_size": count}}
    text = json.dumps({"inputs": [described], "parameters": parameters}).encode()
    return text + bytes(count), {"Inference-Header-Content-Length": str(len(text))}


def asking(count: int, **parameters: object) -> bytes:
    inputs = [{"name": "X", "datatype": "UINT8", "shape": [count], "data": [0] * count}]
    return json.dumps({"inputs": inputs, "parameters": parameters}, separators=(",", ":")).encode()


@pytest.mark.promise("What the server bears, and whom it answers like", "JSON over the limit is refused …")
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


@pytest.mark.promise("What the server bears, and whom it answers like", "JSON over the limit is refused …")
@pytest.mark.parametrize("path", ["/v2/models/plain/generate", "/v2/logging"])
def test_so_it_is_elsewhere(limited: Serving, path: str) -> None:
    # Larger than a body that is read before it may be refused.
    body = json.dumps({"X": [0] * 200_000}).encode()

    assert limited.post(path, body).status == 413


@pytest.mark.promise("What the server bears, and whom it answers like", "JSON over the limit is refused …")
def test_outputs_over_the_limit_are_not_sent_as_json(limited: Serving) -> None:
    reply = limited.post(PLAIN, *binary(10 * MOST))

    assert reply.status == 400
    assert "ask for binary data" in reply.error


@pytest.mark.promise("What the server bears, and whom it answers like", "JSON over the limit is refused …")
@pytest.mark.parametrize("count", [900, 60_000])
def test_the_text_of_outputs_counts_and_not_their_bytes(count: int) -> None:
    """Each value takes one byte, and four as text."""
    body, headers = binary(count)
    body = body[:-count] + b"\xff" * count
    text_bytes = 4 * count
    for most_bytes, status in ((text_bytes - 1, 400), (text_bytes + 200, 200)):
        with served("plain", limits=HttpLimits(json_bytes=most_bytes)) as serving:
            reply = serving.post(PLAIN, body, headers)
        assert reply.status == status
        assert status == 200 or "--http-max-json-bytes" in reply.error


INPUT_SIZE = "exceeds the maximum allowed value of 2000 bytes. Use --http-max-input-size to increase the limit."


@pytest.fixture(scope="module")
def sized() -> Iterator[Serving]:
    """Start a server with Triton's limit, as its flag sets it."""
    limits = http_options(ServerOptions(http_max_input_size=MOST)).limits
    with served("plain", limits=limits) as serving:
        yield serving


@pytest.mark.promise(
    "HTTP",
    "`--http-max-input-size` limits a request as it is sent and after its decompression, with Triton's error text.",
)
def test_a_request_over_tritons_limit_is_refused_in_tritons_words(sized: Serving) -> None:
    text = asking(MOST)
    packed = gzip.compress(text), {"Content-Encoding": "gzip"}
    body, headers = binary(10 * MOST, binary_data_output=True)
    packed_binary = gzip.compress(body), {**headers, "Content-Encoding": "gzip"}
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    for what, sent, more in (
        (f"Request JSON size of {len(text)}", text, {}),
        ("Request JSON size of more than 2000", *packed),
        (f"Request size of {len(body)}", body, headers),
        ("Request size of more than 2000", *packed_binary),
    ):
        reply = sized.post(PLAIN, sent, more)
        assert (reply.status, reply.error) == (400, f"{what} bytes {INPUT_SIZE}")
    with Client(sized.port) as client:
        client.send(f"POST {PLAIN} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode(), chunked)
        answer = client.answer("POST")
        assert answer.status == 400
        assert INPUT_SIZE in json.loads(answer.body)["error"]
    assert sized.post("/v2/logging", {"x": "y" * MOST}).status == 400
    assert sized.post(PLAIN, asking(10)).status == 200
    assert sized.post(PLAIN, *binary(900)).status == 200


@pytest.mark.promise("HTTP", "`--http-max-input-size` limits a request as it …")
def test_tritons_limit_is_that_of_json_unless_something_else_is_said() -> None:
    def json_bytes(**options: int) -> int:
        return http_options(ServerOptions(**options)).limits.json_bytes  # type: ignore[arg-type]

    assert json_bytes() == 64 << 20
    assert json_bytes(http_max_input_size=128 << 20) == 128 << 20
    assert json_bytes(http_max_input_size=128 << 20, http_max_json_bytes=1 << 20) == 1 << 20
    assert json_bytes(http_max_input_size=1 << 10, http_max_json_bytes=1 << 20) == 1 << 10


@pytest.mark.promise("What the server bears, and whom it answers like", "JSON over the limit is refused …")
def test_arrays_without_end_are_refused() -> None:
    with pytest.raises(NotJson, match="more than 1048576 arrays"):
        loads(b"[" + b"[]," * (1 << 20) + b"[]]")


@pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "JSON over the limit is refused before it is parsed, compressed or not. So are too "
    "many arrays or members of objects, and outputs that would become such JSON.",
)
def test_members_without_end_are_refused() -> None:
    for space in (b"", b" \t\n"):
        members = b",".join(b'"%d"%b:1' % (number, space) for number in range((1 << 20) + 1))
        with pytest.raises(NotJson, match="more than 1048576 members"):
            loads(b"{" + members + b"}")


def test_texts_may_have_any_number_of_colons() -> None:
    text = "a:b" * (1 << 20)

    assert loads(json.dumps({"text": text}).encode()) == {"text": text}


@pytest.mark.promise("What the server bears, and whom it answers like", "JSON over the limit is refused …")
def test_strings_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "_MOST_STRINGS", 1 << 20)
    with pytest.raises(NotJson, match="more than 1048576 strings"):
        loads(b"[" + b'"",' * (1 << 20) + b'"\\""]')
    assert len(loads(b"[" + b'"",' * ((1 << 20) - 1) + b'""]')) == 1 << 20
    # Quotes in a text are no strings.
    text = '"' * (3 << 20)
    assert loads(json.dumps([text, "x\\"]).encode()) == [text, "x\\"]


@pytest.mark.parametrize("count", [(1 << 16) - 1, 1 << 16, 200_000])
def test_many_values_are_read_as_few_are(count: int) -> None:
    numbers = list(range(count))
    found = of_values("X", CODES["INT32"], [2, count], [numbers, numbers])
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [numbers, numbers]
    texts = [str(number) for number in numbers]
    strings = of_values("X", BYTES, [count], texts)
    assert isinstance(strings, WireTensor)
    whole = np.array(texts, object)
    assert strings.raw.tobytes() == encode_bytes(whole)


def test_an_error_names_the_place_among_many_strings() -> None:
    texts = ["a"] * 100_000 + ["\ud800"]

    with pytest.raises(InvalidRequest, match="element 100000"):
        of_values("X", BYTES, [len(texts)], texts)
    with pytest.raises(InvalidRequest, match="do not fit"):
        of_values("X", CODES["INT8"], [100_001], [1] * 100_000 + [1000])


def test_numbers_beside_arrays_are_all_taken_in_their_order() -> None:
    values = [0, [1, [[2, 3], 4]], [], 5]

    found = of_values("X", 9, [6], values)

    assert isinstance(found, np.ndarray)
    assert found.tolist() == [0, 1, 2, 3, 4, 5]
