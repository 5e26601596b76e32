"""Pieces of Python that a model may run: the same value or the same exception on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.triton.both import Both, agree

pytestmark = pytest.mark.triton


def snippets() -> list[str]:
    """The lines of `snippets/*.txt` but the headings; ` ;; ` ends a line of Python."""
    return [
        line.replace(" ;; ", "\n")
        for file in sorted((Path(__file__).parent / "snippets").glob("*.txt"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]


@pytest.mark.parametrize("code", snippets(), ids=lambda code: code.replace("\n", " ;; ")[:150])
def test_a_snippet_comes_to_the_same(both: Both, code: str) -> None:
    theirs, ours = both.said(code)

    if not agree(theirs, ours):
        assert ours == theirs
