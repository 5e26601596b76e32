"""Tests the import rules for models, and the errors of imports that fail."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import moonpool.stub.pb_utils as pb_utils
from moonpool.stub.loader import LoadError, load_native, load_triton

pytestmark = [
    pytest.mark.usefixtures("imports"),
    pytest.mark.promise("Models", "A model is imported as Triton imports it."),
]

EMPTY_MODEL = "class TritonPythonModel: pass\n"


def write(folder: Path, **files: str) -> None:
    """Write `model="…"` as model.py, and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in files.items():
        (folder / f"{name}.py").write_text(dedent(source))


def load(root: Path, file: str = "model.py", version: str = "1") -> Any:
    model_dir = root / "m"
    return load_triton(file, str(model_dir / version), str(model_dir), str(root / "backend"))


def refusal(root: Path, file: str = "model.py") -> LoadError:
    with pytest.raises(LoadError) as caught:
        load(root, file)
    return caught.value


def test_all_names_are_there_while_the_file_is_imported(tmp_path: Path) -> None:
    write(
        tmp_path / "m" / "1",
        model="""
        import c_python_backend_utils
        import triton_python_backend_utils as pb_utils
        from triton_python_backend_utils import *
        from c_python_backend_utils import Tensor as Other

        class TritonPythonModel:
            same = Tensor is Other is pb_utils.Tensor is c_python_backend_utils.Tensor
            folder = pb_utils.get_model_dir()
        """,
    )
    model = load(tmp_path)

    assert model.same
    assert model.folder == str(tmp_path / "m" / "1")
    assert model.__module__ == "1.model"


def test_a_model_imports_its_neighbours_in_both_ways(tmp_path: Path) -> None:
    write(
        tmp_path / "m" / "1",
        model="""
        from . import file2
        import file1
        import in_model_dir, in_backend_dir
        from .file2 import word

        class TritonPythonModel:
            words = [file1.word, file2.word, word, in_model_dir.word, in_backend_dir.word]
        """,
        file1="import triton_python_backend_utils as pb_utils\nword = pb_utils.Tensor.__name__",
        file2="word = 'two'",
    )
    write(tmp_path / "m", in_model_dir="word = 'model'")
    write(tmp_path / "backend", in_backend_dir="word = 'backend'")

    assert load(tmp_path).words == ["Tensor", "two", "two", "model", "backend"]


def test_folders_are_appended_in_tritons_order(tmp_path: Path) -> None:
    write(tmp_path / "m" / "1", model=EMPTY_MODEL)
    before = list(sys.path)
    load(tmp_path)

    folders = [tmp_path / "m" / "1", tmp_path / "m", tmp_path / "backend"]
    importable = Path(pb_utils.__file__).resolve().parents[1] / "importable"
    assert sys.path == [*before, *map(str, folders), str(importable)]


def test_a_folder_of_the_same_name_elsewhere_is_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "elsewhere" / "1", model="class TritonPythonModel: who = 'stranger'")
    write(tmp_path / "m" / "1", model="class TritonPythonModel: who = 'model'")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))

    assert load(tmp_path).who == "model"


@pytest.mark.parametrize("folder", ["v1.2", "json", "my model", "class"])
@pytest.mark.parametrize("file", ["model.py", "my.model.py"])
def test_a_folder_and_a_file_may_have_names_that_python_has_other_uses_for(
    tmp_path: Path, folder: str, file: str
) -> None:
    write(
        tmp_path / "m" / folder,
        model="from . import near\nimport json\nclass TritonPythonModel: said = near.word, json.dumps(1)",
        near="word = 'near'",
    )
    (tmp_path / "m" / folder / "model.py").rename(tmp_path / "m" / folder / file)

    assert load(tmp_path, file, folder).said == ("near", "1")


def test_the_version_may_be_an_ordinary_package(tmp_path: Path) -> None:
    write(
        tmp_path / "m" / "1",
        __init__="word = 'package'",
        model="from . import word\nclass TritonPythonModel: said = word",
    )

    assert load(tmp_path).said == "package"


def test_another_file_name_is_honoured(tmp_path: Path) -> None:
    write(tmp_path / "m" / "7", other="class TritonPythonModel: pass")
    model = load_triton("other.py", str(tmp_path / "m" / "7"), str(tmp_path / "m"), str(tmp_path / "backend"))

    assert model.__module__ == "7.other"


def test_a_file_that_serves_several_models_is_imported_by_its_own_name(tmp_path: Path) -> None:
    write(tmp_path / "backend", model="import near\nclass TritonPythonModel: said = near.word")
    write(tmp_path / "backend", near="word = 'near'")
    model: Any = load_triton(
        str(tmp_path / "backend" / "model.py"),
        str(tmp_path / "m" / "1"),
        str(tmp_path / "m"),
        str(tmp_path / "backend"),
    )

    assert (model.said, model.__module__) == ("near", "model")
    assert pb_utils.get_model_dir() == str(tmp_path / "m" / "1")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    error = refusal(tmp_path)

    assert error.stage == "file"
    assert str(error) == f"Python model file not found in '{tmp_path}/m/1/model.py'"


@pytest.mark.parametrize("name", ["model", "model.pyc", "", ".py"])
def test_a_name_that_does_not_end_in_py_is_refused(tmp_path: Path, name: str) -> None:
    error = refusal(tmp_path, name)

    assert str(error) == f"Model name must end with '.py'. Model name is \"{name}\"."


def test_a_syntax_error_is_told_with_its_place(tmp_path: Path) -> None:
    write(tmp_path / "m" / "1", model="x = 1\ndef broken(:\n")
    error = refusal(tmp_path)

    assert error.stage == "import"
    assert str(error).startswith("SyntaxError: invalid syntax (model.py, line 2)")
    assert str(tmp_path / "m" / "1" / "model.py") in str(error)
    assert "def broken(:" in error.traceback


@pytest.mark.parametrize("source", ["class Other: pass", "TritonPythonModel = 3\nclass Other: 1"])
def test_a_file_without_the_class_is_told_what_it_has(tmp_path: Path, source: str) -> None:
    write(tmp_path / "m" / "1", model=source)
    error = refusal(tmp_path)

    assert error.stage == "class"
    assert str(error).startswith("AttributeError: module '1.model' has no attribute 'TritonPythonModel'")
    assert "it defines Other" in str(error)


NATIVE = """
from moonpool import Batch, Float32
from near import word

class Helper: pass

class Model:
    said = word
    def __call__(self, X: Float32[Batch, 2]) -> Float32[Batch, 2]:
        return X

def double(X: Float32[2]) -> Float32[2]:
    return 2 * X
"""


def test_the_only_class_with_a_call_is_the_model(tmp_path: Path) -> None:
    write(tmp_path, mine=NATIVE, near="word = 'near'")
    model: Any = load_native(str(tmp_path / "mine.py"))

    assert (model.__name__, model.said) == ("Model", "near")


def test_a_class_or_function_can_be_named(tmp_path: Path) -> None:
    write(tmp_path, mine=NATIVE, near="word = 'near'")
    double: Any = load_native(str(tmp_path / "mine.py"), "double")

    assert double.__name__ == "double"
    with pytest.raises(LoadError, match="has no class or function 'Modell'; it defines Helper"):
        load_native(str(tmp_path / "mine.py"), "Modell")


@pytest.mark.parametrize(
    ("source", "names"),
    [("class A:\n  def __call__(self): 1\nclass B:\n  def __call__(self): 1", "A, B"), ("class A: pass", "A")],
)
def test_none_and_several_are_refused(tmp_path: Path, source: str, names: str) -> None:
    write(tmp_path, mine=source)

    with pytest.raises(LoadError, match=f"TritonPythonModel, or exactly one class .* it defines {names};"):
        load_native(str(tmp_path / "mine.py"))
