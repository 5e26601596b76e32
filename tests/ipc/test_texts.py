"""Texts are measured and cut in bytes of UTF-8."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.ipc.messages import beginning, end, size_of

pytestmark = pytest.mark.promise("The wire", "Limits of texts are in bytes …")

TEXTS = st.text(st.characters() | st.sampled_from("aé€😀\ud800"))


@given(TEXTS, st.integers(0, 40))
def test_a_cut_text_fits_and_is_a_part_of_the_text(text: str, most: int) -> None:
    whole = text.encode("utf-8", "replace").decode()
    first, last = beginning(text, most), end(text, most)

    assert whole.startswith(first)
    assert whole.endswith(last)
    for cut in (first, last):
        # A cut text is at most a part of one character shorter than the limit.
        assert min(size_of(whole), most) - 3 <= len(cut.encode()) <= most
    assert size_of(text) == len(whole.encode())


@pytest.mark.parametrize("text", ["", "a", "é", "😀" * 10])
def test_a_text_that_fits_stays_as_it_is(text: str) -> None:
    assert beginning(text, size_of(text)) == end(text, size_of(text)) == text
