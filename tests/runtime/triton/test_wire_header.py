"""The native side's tables are those of the code."""

from __future__ import annotations

from moonpool.runtime.triton.wire_header import HEADER, header


def test_the_header_of_the_wire_is_current() -> None:
    written = HEADER.read_text(encoding="utf-8")

    assert written == header(), "run python -m moonpool.runtime.triton.wire_header"
