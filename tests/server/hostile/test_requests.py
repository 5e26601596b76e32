"""Requests that are wrong anywhere in them get an error soon, and nothing else happens."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server.hostile.conftest import BODY_BYTES, INFLATED_BYTES, Target
from tests.server.hostile.mutations import wrong_requests

from moonpool.runtime.conformance.tensors import GOOD, A, B, lent, output, tensor
from moonpool.runtime.conformance.wire import Http, WireReply, as_bytes, binary, get, infer, post, send

MANY = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def _is_proper(reply: WireReply) -> None:
    """Check that an answer is a result or an expected error in words."""
    assert reply.status in {200, 400, 404, 405, 409, 413, 431, 499, 500, 501, 503}, reply
    if reply.status >= 400:
        text = reply.body.decode().removeprefix("data: ")
        said = json.loads(text)["error"]
        assert said
        assert "internal error" not in said, said


@pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "A request that is wrong in any place gets an error with a text, and soon.",
)
@MANY
@given(request=wrong_requests(), lie=st.sampled_from([None, None, 0, 1, -1, 10, 2**31, 2**64, "x"]))
def test_wrong_values_are_told(target: Target, request: tuple[str, bytes], lie: object) -> None:
    path, body = request
    headers = {} if lie is None else {"Inference_Header_Content_Length": str(lie)}

    _is_proper(send(target.http_port, post(path, body, **headers)))


NAMES = [
    "..", "../..", "..%2f..", "%00", "%0a", "%ff", "a%2fb", "%2e%2e", "add_sub%00", "add_sub\x7f", "add_sub\xff", "\xc3\xa9",
    "a" * 5000, "-", "~", "%", "%%", "%zz", "add_sub;x=1", "*", "$(id)", "'", '"', "<b>",
]  # fmt: skip


@pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "Names of models, versions, regions and objects find nothing but the thing of that name.",
)
@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/{}", "/v2/models/{}/infer", "/v2/models/{}/versions/1/ready", "/v2/models/{}/stats",
        "/v2/repository/models/{}/load", "/v2/repository/models/{}/unload", "/v2/systemsharedmemory/region/{}/register",
        "/v2/models/{}/trace/setting", "/v2/models/{}/generate_stream",
    ],
)  # fmt: skip
def test_strange_names_are_names_of_nothing(target: Target, path: str) -> None:
    for name in NAMES:
        body = {"key": f"/{name}", "byte_size": 1} if "sharedmemory" in path else GOOD

        for request in (get(path.format(name)), post(path.format(name), body)):
            reply = send(target.http_port, request)
            assert reply.status in {200, 400, 404, 405, 500, 501}, (name, reply)
            if reply.status == 200:
                assert path.endswith("unload"), name


@pytest.mark.promise("What the server bears, and whom it answers like", "Names of models, versions, regions and …")
@pytest.mark.parametrize("key", ["/../etc/passwd", "..", "/", "/a/b", "/\0", "a\0b", "/" + "x" * 300, "/é", "sem.x"])
def test_strange_keys_open_nothing(target: Target, key: str) -> None:
    body = {"key": key, "byte_size": 1}

    reply = send(target.http_port, post("/v2/systemsharedmemory/region/r/register", body))

    assert reply.status in {400, 500}
    _is_proper(reply)


@pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "No shape, count, depth or length that a client states is believed before it is checked.",
)
@pytest.mark.parametrize(
    ("what", "request_"),
    [
        ("a deep array", infer("add_sub", b"[" * 100_000)),
        ("a deep value", infer("add_sub", b'{"inputs":' + b"[" * 50_000 + b"]" * 50_000 + b"}")),
        ("deep data", infer("add_sub", {"inputs": [{**A, "data": json.loads("[" * 90 + "]" * 90)}, B]})),
        ("a huge shape", infer("add_sub", {"inputs": [{**A, "shape": [2**40], "data": [1]}, B]})),
        ("a huge shape without data", binary("add_sub", {"inputs": [lent("INPUT0", 16, shape=[2**40]), B]}, bytes(16))),
        ("a shape of many dimensions", infer("add_sub", {"inputs": [{**A, "shape": [1] * 100_000}, B]})),
        ("a shape of zeros and much else", infer("every", {"inputs": [lent("IN_FP32", 0, shape=[0, 2**62])]})),
        ("many inputs", infer("add_sub", {"inputs": [A] * 10_000})),
        ("very many inputs", infer("add_sub", {"inputs": [[]] * 100_000})),
        ("many names", infer("add_sub", {"inputs": [{**A, "name": str(i)} for i in range(10_000)]})),
        ("many outputs", infer("add_sub", {**GOOD, "outputs": [output(str(i)) for i in range(10_000)]})),
        ("many parameters", infer("add_sub", {**GOOD, "parameters": {str(i): {} for i in range(10_000)}})),
        ("a long number", infer("add_sub", b'{"inputs":' + b"1" * 100_000 + b"}")),
        ("a long id", infer("nope", {**GOOD, "id": "x" * 1_000_000})),
        ("a binary size beyond everything", binary("add_sub", {"inputs": [lent("INPUT0", 2**62), B]}, bytes(16))),
    ],
)  # fmt: skip
def test_sizes_that_nothing_has_are_refused(target: Target, what: str, request_: Http) -> None:
    reply = send(target.http_port, request_)

    assert reply.status >= 400, what
    _is_proper(reply)


def test_classes_of_texts_are_refused(target: Target) -> None:
    body = {"inputs": [tensor("IN_STRING", ["a"], "BYTES")], "outputs": [output("OUT_STRING", classification=1)]}

    reply = send(target.http_port, infer("every", body))

    assert reply.status == 400
    _is_proper(reply)


def _bomb(encoding: str, size_bytes: int) -> bytes:
    zeros = bytes(1 << 20)
    packer = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)
    parts = [packer.compress(zeros) for _ in range(size_bytes >> 20)]
    return b"".join([*parts, packer.flush()])


@pytest.mark.promise(
    "What the server bears, and whom it answers like", "A body that decompresses to more than is allowed is refused."
)
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("path", ["/v2/models/add_sub/infer", "/v2/repository/index"])
def test_a_body_that_decompresses_to_too_much_is_refused(target: Target, encoding: str, path: str) -> None:
    packed = _bomb(encoding, 4 * INFLATED_BYTES)
    assert len(packed) < BODY_BYTES

    reply = send(target.http_port, post(path, packed, Content_Encoding=encoding))

    # A body that is not unpacked is refused as invalid JSON.
    assert reply.status in {400, 413, 500, 501}
    _is_proper(reply)


@pytest.mark.parametrize(
    "packed", [b"", b"\x1f\x8b", gzip.compress(as_bytes(GOOD))[:-4], b"\x1f\x8b" + bytes(100), b"x" * 100]
)
def test_a_body_that_does_not_decompress_is_refused(target: Target, packed: bytes) -> None:
    reply = send(target.http_port, infer("add_sub", packed, Content_Encoding="gzip"))

    assert reply.status in {200, 400, 500}
    _is_proper(reply)


def test_a_body_that_is_too_large_is_refused(target: Target) -> None:
    reply = send(target.http_port, infer("add_sub", bytes(BODY_BYTES + 1)))

    assert reply.status == 413
    _is_proper(reply)
