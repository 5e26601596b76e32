"""Pieces of Python that a model may run: the same value or the same exception on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.triton.both import Both, agree

pytestmark = [
    pytest.mark.triton,
    pytest.mark.promise(
        "Fidelity",
        "A model gets from `triton_python_backend_utils` the values and exceptions that it gets in a real Triton.",
    ),
]


def snippets() -> list[Any]:
    """The lines of `snippets/*.txt` but the headings; ` ;; ` ends a line of Python."""
    return [
        _param(line.replace(" ;; ", "\n"))
        for file in sorted((Path(__file__).parent / "snippets").glob("*.txt"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]


def _param(code: str) -> object:
    """Mark a snippet whose error, from another model, contains a place in that model's files."""
    tells_paths = "ValueError('on purpose')" in code and ").exec(" in code
    return pytest.param(code, marks=pytest.mark.needs("paths in errors") if tells_paths else ())


@pytest.mark.parametrize("code", snippets(), ids=lambda code: code.replace("\n", " ;; ")[:150])
def test_a_snippet_comes_to_the_same(both: Both, code: str) -> None:
    theirs, ours = both.said(code)

    if not agree(theirs, ours):
        assert ours == theirs
