"""Headers of HTTP/2, by the examples of RFC 7541 and by what others write."""

from __future__ import annotations

import pytest

from moonpool.benchmarks.generator import hpack
from moonpool.benchmarks.generator.engine import WireError


@pytest.mark.parametrize(
    ("coded", "text"),
    [
        ("f1e3c2e5f23a6ba0ab90f4ff", b"www.example.com"),
        ("a8eb10649cbf", b"no-cache"),
        ("25a849e95ba97d7f", b"custom-key"),
        ("d07abe941054d444a8200595040b8166e082a62d1bff", b"Mon, 21 Oct 2013 20:13:21 GMT"),
        ("", b""),
    ],
)
def test_strings_in_huffmans_code_are_read(coded: str, text: bytes) -> None:
    assert hpack.text_of(bytes.fromhex(coded)) == text


@pytest.mark.parametrize("coded", ["ffffffff", "00" * 3 + "1e", "ffff"])
def test_a_malformed_string_is_refused(coded: str) -> None:
    with pytest.raises(WireError):
        hpack.text_of(bytes.fromhex(coded))


@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 300, 20_000])
def test_a_written_block_can_be_read(size: int) -> None:
    block = hpack.literal(b"grpc-status", b"0") + hpack.literal(b"x", b"y" * size)

    assert hpack.headers_of(block) == {b"grpc-status": b"0", b"x": b"y" * size}


def test_a_status_has_its_name() -> None:
    # The headers have a size of the table, an entry of the static table, and one of its names with another value.
    assert hpack.headers_of(b"\x20\x88") == {b":status": b"200"}
    assert hpack.headers_of(b"\x08\x03302") == {b":status": b"302"}


@pytest.mark.parametrize(
    "block", [b"\xbe", b"\x80", b"\x00", b"\x00\x05abc", b"\x7f\xff\xff\xff\xff\xff"]
)
def test_a_block_that_cannot_be_is_refused(block: bytes) -> None:
    with pytest.raises(WireError):
        hpack.headers_of(block)
