"""Pieces of answers, as models write them and as the runtime reads them."""

from __future__ import annotations

import json

import pytest

from moonpool.runtime.errors import ModelError
from moonpool.runtime.openai.pieces import piece_of
from moonpool.stub.openai.pieces import encoded

TEXTS = [
    "",
    "plain",
    'a "quoted" one',
    "back\\slash",
    "\n\t\x00",
    "日本 🎉",
    "half \ud83c",
    '","index":"1',
    '"}',
    "x" * 5000,
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_arrives_as_it_was_yielded(text: str) -> None:
    written = encoded(text)

    assert json.loads(written)["content"] == text.replace("\ud83c", "?")
    assert piece_of(memoryview(written), "m").delta == {"content": text.replace("\ud83c", "?")}


@pytest.mark.parametrize(
    "raw", [b'{"content":"}', b'{"content":"', b'{"content":"\xff"}', b'{"content":"a","b"}', b'"}', b""]
)
def test_what_only_looks_like_a_text_is_refused(raw: bytes) -> None:
    with pytest.raises(ModelError, match="a wrong piece: it is not JSON"):
        piece_of(memoryview(raw), "m")


def test_a_second_field_beside_a_text_is_read() -> None:
    assert piece_of(memoryview(b'{"content":"a","refusal":"b"}'), "m").delta == {"content": "a", "refusal": "b"}
    assert piece_of(memoryview(b'{"content":"a","index":1}'), "m").choice == 1
