"""The documents say what the code says."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import moonpool

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


def test_every_drawing_is_current() -> None:
    for path in diagrams().PAGES:
        page = path.read_text(encoding="utf-8")

        assert diagrams().drawn(page) == page, f"{path.name}: run python docs/diagrams.py"


def test_every_table_is_drawn() -> None:
    pages = [path.read_text(encoding="utf-8") for path in diagrams().PAGES]
    drawn = {name for page in pages for name in re.findall(r"<!-- drawn: (\w+) -->", page)}

    assert drawn == set(diagrams().drawings())


def promises() -> list[tuple[str, str]]:
    """Each line of the tables of promises with the tests that it names."""
    tables: list[str] = []
    for name in ("SPECIFICATION.md", "SANDBOX.md"):
        page = (DOCS / name).read_text(encoding="utf-8")
        tables += re.findall(r"^\| promise \| test \|\n((?:\|.*\|\n)+)", page, flags=re.MULTILINE)
    rows = re.findall(r"^\| (?!---)(.+?) \| (.+?) \|$", "".join(tables), flags=re.MULTILINE)
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


def test_every_difference_from_triton_has_its_test() -> None:
    page = (DOCS / "FIDELITY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!---|\|)(.+?) \|.*\| (.+?) \|$", page, flags=re.MULTILINE)

    assert rows
    for row, where in rows:
        path, _, name = where.strip("`").partition("::")
        file = ROOT / path if "/" in path else ROOT / "tests" / "triton" / path
        assert file.exists(), f"{row}: there is no {path}"
        assert f"def {name}(" in file.read_text(encoding="utf-8") or not name, f"{row}: no {name}"


def test_the_example_of_the_readme_works_when_it_is_pasted(tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    model, program = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "scale.py").write_text(model, encoding="utf-8")
    (tmp_path / "use.py").write_text(program, encoding="utf-8")
    source = str(Path(next(iter(moonpool.__path__))).parent)

    ended = subprocess.run(
        [sys.executable, "use.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.stderr == ""
    doubled = "[[ 0.  2.  4.]\n [ 6.  8. 10.]]\n"
    assert ended.stdout == doubled * 2
