"""Models' imports work in a program that is no stub."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path

import pytest

import moonpool
from moonpool import testing
from moonpool.stub import pb_utils

pytestmark = pytest.mark.promise(
    "Testing models",
    "In a run of pytest, and inside `testing.utilities`, models' imports work; a Triton that is "
    "there goes first; an ordinary program does not find the names; a run that needs no model "
    "loads nothing of moonpool.",
)

NAMES = ["triton_python_backend_utils", "c_python_backend_utils"]
SOURCE = str(Path(moonpool.__path__[0]).parent)
# pytest does not load moonpool's plug-in by itself, so the tests can run with and without it.
PLAIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.fixture(autouse=True)
def _without_the_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [f for f in sys.meta_path if type(f).__name__ != "UtilitiesFinder"]
    monkeypatch.setattr(sys, "meta_path", others)
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("name", NAMES)
def test_inside_the_names_are_the_module_that_models_get(name: str) -> None:
    before = pb_utils.__spec__
    with testing.utilities():
        assert importlib.util.find_spec(name) is not None
        assert import_module(name) is pb_utils
        assert import_module(name) is pb_utils

    assert pb_utils.__spec__ is before
    assert name not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        import_module(name)


def test_one_may_be_inside_twice() -> None:
    with testing.utilities():
        with testing.utilities():
            import_module(NAMES[0])

        assert import_module(NAMES[0]) is pb_utils
    assert NAMES[0] not in sys.modules


@pytest.mark.parametrize("name", NAMES)
def test_a_module_of_tritons_that_can_be_imported_stays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{name}.py").write_text("is_tritons = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with testing.utilities():
        module = import_module(name)

        assert module.is_tritons
    assert sys.modules[name] is module


def test_a_module_of_tritons_that_is_there_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NAMES[1], sys)
    with testing.utilities():
        assert import_module(NAMES[1]) is sys

    assert sys.modules[NAMES[1]] is sys


def run_pytest(folder: Path, arguments: Sequence[str], typed: str = "", **variables: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SOURCE, **PLAIN, **variables},
        capture_output=True,
        text=True,
        input=typed,
        check=False,
        timeout=170,
    )
    return ended.stdout + ended.stderr


def test_a_plain_run_of_pytest_imports_a_model(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import c_python_backend_utils as c\n")
    (tmp_path / "model.py").write_text("from triton_python_backend_utils import Tensor\n")
    (tmp_path / "test_model.py").write_text(
        "import numpy\nfrom model import Tensor\n\n"
        "def test_it():\n    assert Tensor('X', numpy.ones(3)).shape() == [3]\n"
    )

    assert "1 passed" in run_pytest(tmp_path, ["-p", "moonpool_pytest"])
    assert "No module named 'c_python_backend_utils'" in run_pytest(tmp_path, [])


def test_pytests_debugger_starts_where_the_model_raised(tmp_path: Path) -> None:
    (tmp_path / "test_model.py").write_text(
        "from moonpool import testing\n\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        found = 40 + len(requests)\n"
        "        raise ValueError(found)\n\n"
        "X = {'name': 'X', 'data_type': 'TYPE_INT8', 'dims': [1]}\n\n"
        "def test_it():\n"
        "    with testing.load(TritonPythonModel, config={'input': [X], 'output': [X]}) as model:\n"
        "        model.infer(X=[1])\n"
    )

    assert "(Pdb) 'found is 41'\n" in run_pytest(tmp_path, ["--pdb"], "p f'found is {found}'\nq\n")


def test_a_run_that_needs_no_model_loads_nothing_of_moonpool(tmp_path: Path) -> None:
    (tmp_path / "test_none.py").write_text(
        "import sys\n\ndef test_it():\n"
        "    assert 'moonpool_pytest' in sys.modules\n"
        "    assert not {'moonpool', 'numpy'} & set(sys.modules)\n"
    )

    assert "1 passed" in run_pytest(tmp_path, ["-p", "moonpool_pytest"])


def test_an_ordinary_program_does_not_find_the_names() -> None:
    program = f"import importlib.util, moonpool.testing\nprint([importlib.util.find_spec(name) for name in {NAMES!r}])"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        check=True,
    )

    assert ended.stdout == "[None, None]\n"


def test_an_installed_moonpool_names_its_plug_in() -> None:
    installed = [found for found in metadata.distributions(name="moonpool") if found.read_text("RECORD")]
    if not installed:
        pytest.skip("moonpool is not installed here")

    found = {(e.group, e.name, e.value) for d in installed for e in d.entry_points}
    assert ("pytest11", "moonpool_pytest", "moonpool_pytest") in found
