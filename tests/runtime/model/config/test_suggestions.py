"""Test what an error suggests in place of a word."""

from __future__ import annotations

from collections.abc import Iterator

from moonpool.runtime.model.config.schema import suggestion


def test_a_close_word_is_suggested_and_no_other() -> None:
    assert suggestion("scael", ["sums", "scale"]) == '; did you mean "scale"?'
    assert suggestion("nothing", ["sums", "scale"]) == ""


def test_many_known_words_and_long_ones_are_not_all_compared() -> None:
    seen = []

    def known() -> Iterator[str]:
        for number in range(1_000_000):
            seen.append(number)
            yield f"model_{number:06}"

    assert suggestion("model_000O01", known()).startswith('; did you mean "model_000')
    assert len(seen) < 5000
    assert suggestion("m" * 1_000_000, ["m" * 1_000_000]) == ""
