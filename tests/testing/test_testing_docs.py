"""The tests that the page on testing models shows, and those of the examples, pass as they are."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import moonpool

pytestmark = pytest.mark.promise("Testing models", "The tests in the document on testing models pass.")

PACKAGE = Path(moonpool.__path__[0])
PAGE = Path(__file__).parents[2] / "docs" / "TESTING_MODELS.md"

no_page = pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not in the wheel")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of the page beside the examples."""
    os.symlink(PACKAGE / "examples" / "models", tmp_path / "models")
    blocks = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == PAGE.read_text().count("```python")
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    return ended.stdout + ended.stderr


@no_page
@pytest.mark.slow
def test_the_tests_of_the_page_pass(folder: Path) -> None:
    said = run(folder, "-m", "pytest", "-p", "moonpool_pytest", "-p", "no:cacheprovider", "-rA")

    files = sorted(path.name for path in folder.glob("test_*.py"))
    assert sorted({*re.findall(r"^PASSED (test_\w+\.py)", said, re.MULTILINE)}) == files, said
    assert re.search(r"^=+ (\d+) passed in", said, re.MULTILINE), said


@no_page
def test_the_program_of_the_page_runs(folder: Path) -> None:
    assert run(folder, "use_model.py") == "float32\n"


@pytest.mark.slow
def test_the_tests_of_the_examples_pass(tmp_path: Path) -> None:
    # Where it lies: the settings of the repository above must not be in the way.
    file = PACKAGE / "examples" / "test_models.py"
    said = run(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", str(file))

    assert re.search(r"^=+ 20 passed in", said, re.MULTILINE), said


@no_page
def test_the_command_of_the_page_runs(folder: Path) -> None:
    (command,) = re.findall(r"```sh\nmoonpool (.*?)\n```", PAGE.read_text(), re.DOTALL)
    said = run(folder, "-m", "moonpool", *shlex.split(command))

    assert re.search(r"OUTPUT0.*6.*8.*10.*12", said, re.DOTALL), said
