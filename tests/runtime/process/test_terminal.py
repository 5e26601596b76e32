"""Text of strangers is shown to a terminal, and does not steer it."""

from __future__ import annotations

import pytest

from moonpool.runtime.process.terminal import harmless


def test_characters_that_turn_text_around_are_escaped() -> None:
    assert harmless("a\u202eb\u2066c\u2028d\u200fe") == r"a\u202eb\u2066c\u2028d\u200fe"


@pytest.mark.parametrize("text", ["plain", "tab\tis fine", "ünïcode ☃", ""])
def test_harmless_text_stays_as_it_is(text: str) -> None:
    assert harmless(text) == text
