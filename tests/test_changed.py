"""`make changed` finds the tests of what has changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.programs import load_program

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / ".ci" / "changed.py"

pytestmark = pytest.mark.skipif(not PROGRAM.is_file(), reason="only the tests are here")

FILES = {
    "runtime/schedule/batcher.py": "",
    "tests/conftest.py": "",
    "tests/test_layout.py": "",
    "tests/test_docs.py": "",
    "tests/helper.py": "import moonpool.runtime.schedule.batcher",
    "tests/runtime/test_api.py": "import moonpool",
    "tests/runtime/schedule/test_batcher.py": "from moonpool.runtime.schedule.batcher import take",
    "tests/runtime/schedule/test_slots.py": "",
    "tests/runtime/hosting/test_backend.py": "from tests.helper import double",
    "tests/runtime/hosting/test_other.py": "from moonpool.runtime.schedule import slots",
    "tests/server/test_serve.py": "from moonpool.runtime.schedule import batcher",
}


@pytest.fixture
def changed(tmp_path: Path) -> ModuleType:
    """The program, for a repository of a few files, all committed."""
    for name, source in {**FILES, ".ci/changed.py": PROGRAM.read_text(encoding="utf-8")}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source, encoding="utf-8")
    for words in ("init --quiet --initial-branch main", "add .", "commit --quiet --message all"):
        author = ("-c", "user.name=tests", "-c", "user.email=tests@example.org")
        subprocess.run(["git", "-C", tmp_path, *author, *words.split()], check=True)
    return load_program(tmp_path / ".ci" / "changed.py")


def found_for(changed: ModuleType, name: str) -> set[str]:
    """Return what it prints after a change to one file."""
    (changed.ROOT / name).parent.mkdir(parents=True, exist_ok=True)
    (changed.ROOT / name).write_text("# changed\n", encoding="utf-8")
    ended = subprocess.run([sys.executable, str(changed.__file__)], capture_output=True, text=True, check=True)
    found = set(ended.stdout.split())
    assert "tests/test_layout.py" in found
    return found - {"tests/test_layout.py"}


def test_a_file_has_the_tests_of_its_package_and_those_that_import_it(changed: ModuleType) -> None:
    assert found_for(changed, "runtime/schedule/batcher.py") == {
        "tests/runtime/schedule/test_batcher.py",
        "tests/runtime/schedule/test_slots.py",
        "tests/runtime/hosting/test_backend.py",
    }


def test_a_new_file_has_the_tests_of_its_package(changed: ModuleType) -> None:
    assert found_for(changed, "runtime/schedule/slots.py") == {
        "tests/runtime/schedule/test_batcher.py",
        "tests/runtime/schedule/test_slots.py",
        "tests/runtime/hosting/test_other.py",
    }


def test_a_test_is_its_own_and_a_helper_has_those_that_use_it(changed: ModuleType) -> None:
    assert found_for(changed, "tests/server/test_serve.py") == {"tests/server/test_serve.py"}
    assert found_for(changed, "tests/helper.py") == {
        "tests/server/test_serve.py",
        "tests/runtime/hosting/test_backend.py",
    }


def test_a_page_has_the_tests_of_pages(changed: ModuleType) -> None:
    assert found_for(changed, "docs/NEW.md") == {"tests/test_docs.py"}


def test_nothing_belongs_to_no_change(changed: ModuleType) -> None:
    ended = subprocess.run([sys.executable, str(changed.__file__), "HEAD"], capture_output=True, text=True, check=True)

    assert ended.stdout == ""
