"""Compressed bodies."""

from __future__ import annotations

import gzip
import os
import zlib
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.runtime.server.http import body
from moonpool.runtime.server.http.body import inflate
from moonpool.runtime.server.http.head import BadHttpMessage


class Counted:
    """A decompressor that counts the bytes that it gets and those that it leaves, as both are copied."""

    handled_bytes = 0

    def __init__(self, wbits: int) -> None:
        self._real = zlib.decompressobj(wbits)

    def decompress(self, given: Any, most: int) -> bytes:
        piece = self._real.decompress(given, most)
        Counted.handled_bytes += len(given) + len(self.unconsumed_tail)
        return piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.mark.promise(
    "At the limits", "The work for a compressed body grows in proportion to its size, whatever its content."
)
@pytest.mark.parametrize(
    "packed",
    [
        gzip.compress(os.urandom(8 << 20), 0),
        gzip.compress(bytes(8 << 20)),
        b"".join(gzip.compress(os.urandom(4096), 0) for _ in range(256)),
    ],
    ids=["stored", "packed", "parts"],
)
def test_the_work_for_a_body_grows_as_the_body_does(packed: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "handled_bytes", 0)
    fakes = SimpleNamespace(decompressobj=Counted, error=zlib.error)
    monkeypatch.setattr(body, "zlib", fakes)

    plain = inflate(packed, 16 << 20)

    assert plain == gzip.decompress(packed)
    # A piece of the body may hold many parts, and its rest is handled again for each part.
    assert Counted.handled_bytes <= 3 * len(packed) + 256 * (1 << 17)


@pytest.mark.promise("At the limits", "The work for a compressed body …")
def test_parts_without_end_are_refused() -> None:
    with pytest.raises(BadHttpMessage, match="more than 65536 parts") as refused:
        inflate(gzip.compress(b"", mtime=0) * 70_000, 1 << 20)

    assert refused.value.status == HTTPStatus.BAD_REQUEST
