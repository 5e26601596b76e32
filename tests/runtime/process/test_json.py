"""JSON that others have written is read by one function, which knows texts that are nested too deeply."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moonpool.runtime.process.files import parsed_json

RUNTIME = Path(__file__).parents[3] / "runtime"
# What the runtime's own processes say, the server's JSON, which has a reader of its own, and answers in order.
OURS = {
    "cli/sandbox.py", "conformance/comparing.py", "process/blank_templates.py", "process/files.py",
    "server/http/json_text.py",
}  # fmt: skip
# They are no part of the runtime.
MODELS = RUNTIME / "conformance" / "models"


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "{", b"\xff"])
def test_a_text_that_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|Expecting|decode"):
        parsed_json(text)


def test_nothing_else_reads_json_of_others() -> None:
    reading = {
        str(path.relative_to(RUNTIME))
        for path in RUNTIME.rglob("*.py")
        if MODELS not in path.parents and re.search(r"(?<!or)json\.loads?\(", path.read_text())
    }
    assert reading == OURS
