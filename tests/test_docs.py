"""The documents say what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="the documents are not in the wheel")


def diagrams() -> ModuleType:
    spec = importlib.util.spec_from_file_location("diagrams", DOCS / "diagrams.py")
    if spec is None or spec.loader is None:
        pytest.fail("docs/diagrams.py is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_drawings_of_the_architecture_are_current() -> None:
    page = (DOCS / "ARCHITECTURE.md").read_text(encoding="utf-8")

    assert diagrams().drawn(page) == page


def test_every_table_is_drawn() -> None:
    page = (DOCS / "ARCHITECTURE.md").read_text(encoding="utf-8")

    assert set(re.findall(r"<!-- drawn: (\w+) -->", page)) == set(diagrams().drawings())


def promises() -> list[tuple[str, str]]:
    """Each line of the specification's tables with the tests that it names."""
    page = (DOCS / "SPECIFICATION.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!---|promise)(.+?) \| (.+?) \|$", page, flags=re.MULTILINE)
    return [
        (promise, where) for promise, tests in rows for where in re.findall(r"`([^`]+)`", tests)
    ]


@pytest.mark.parametrize(("promise", "where"), promises() if DOCS.is_dir() else [])
def test_every_promise_has_its_test(promise: str, where: str) -> None:
    path, _, name = where.partition("::")
    file = ROOT / path

    assert file.exists(), f"{promise}: there is no {path}"
    if name:
        assert re.search(rf"(def|class) {re.escape(name)}\b", file.read_text(encoding="utf-8"))
