"""Heads that differ in their lengths alone are parsed once."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.runtime.server.http.head import BadHttpMessage, Head, Heads

_NAMES = (
    "method", "target", "version", "headers", "content_length", "header_length", "is_chunked", "keeps_alive",
    "expects_continue", "forwarded",
)  # fmt: skip


def _raw(*headers: bytes) -> bytes:
    return b"\r\n".join([b"POST /v2/models/m/infer HTTP/1.1", b"Host: h", *headers, b"", b""])


def _of(head: Head) -> dict[str, Any]:
    return {name: getattr(head, name) for name in _NAMES}


@pytest.fixture
def heads() -> Heads:
    """Reader of heads that knows some forms, for which the handler has decided."""
    heads = Heads()
    for raw in (
        _raw(b"Content-Length: 5"),
        _raw(b"Content-Length: 5", b"Inference-Header-Content-Length: 2"),
        _raw(b"inference-header-content-length: 2", b"content-length: 5"),
        _raw(b"Inference-Header-Content-Length: +2x", b"Content-Length: 5"),
        _raw(b"X-Content-Length: 2", b"Content-Length: 5"),
    ):
        heads.read(raw, None).plan = "decided"
    return heads


@pytest.mark.parametrize(
    "headers",
    [
        [b"Content-Length: 77"],
        [b"Content-Length: 077"],
        [b"Content-Length: 77", b"Inference-Header-Content-Length: 66"],
        [b"inference-header-content-length: 66", b"content-length: 77"],
        [b"Inference-Header-Content-Length: +2x", b"Content-Length: 77"],
        [b"X-Content-Length: 2", b"Content-Length: 77"],
    ],
)
def test_other_lengths_are_those_of_the_message(heads: Heads, headers: list[bytes]) -> None:
    raw = _raw(*headers)
    head = heads.read(raw, None)
    assert head.plan == "decided"
    assert head.content_length == 77
    assert _of(head) == _of(Heads().read(raw, None))
    assert heads.read(raw, None) is head


@pytest.mark.parametrize(
    "headers",
    [
        [b"X-Content-Length: 3", b"Content-Length: 77"],
        [b"Content-Length:  77"],
        [b"CONTENT-LENGTH: 77"],
        [b"Inference-Header-Content-Length: -2", b"Content-Length: 77"],
    ],
)
def test_heads_of_other_forms_are_parsed(heads: Heads, headers: list[bytes]) -> None:
    head = heads.read(_raw(*headers), None)
    assert head.plan is None
    assert _of(head) == _of(Heads().read(_raw(*headers), None))


@pytest.mark.parametrize(
    "headers",
    [
        [b"Content-Length: 5", b"Content-Length: 5"],
        [b"Content-Length: 5", b"Content-Length: 6"],
        [b"Content-Length: 5x"],
        [b"Content-Length: 9999999999999999999999"],
        [b"Content-Length: 5", b"Inference-Header-Content-Length: 2", b"Inference-Header-Content-Length: 3"],
        [b"Content-Length: 5", b"Transfer-Encoding: chunked"],
    ],
)
def test_malformed_heads_are_refused_whatever_is_known(heads: Heads, headers: list[bytes]) -> None:
    for _ in range(2):
        with pytest.raises(BadHttpMessage):
            heads.read(_raw(*headers), None)


def test_a_length_that_models_get_is_that_of_the_message(heads: Heads) -> None:
    known = heads.read(_raw(b"Content-Length: 5"), None)
    known.forwarded = {"Content-Length": "5"}
    head = heads.read(_raw(b"Content-Length: 77"), None)
    assert head.plan is None
    assert (b"Content-Length", b"77") in head.raw_headers


def test_a_head_is_parsed_again_until_its_handler_has_decided() -> None:
    heads = Heads()
    heads.read(_raw(b"Content-Length: 5"), None)
    assert (b"Content-Length", b"77") in heads.read(_raw(b"Content-Length: 77"), None).raw_headers
