"""The source of a model's code."""

from __future__ import annotations

import builtins
import os
from pathlib import Path

import pytest
from tests.runtime import recorder

from moonpool import LoadFailed
from moonpool.runtime.model.source import ModelSource, of_file
from moonpool.runtime.repository.loading import Wanted, prepare
from moonpool.runtime.repository.repository import ModelRepositories


class TopLevel:
    class Inner:
        pass


class TritonPythonModel:
    pass


def test_a_file_is_a_native_model_unless_it_defines_tritons_class(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine: ...\n")
    source = of_file(file)
    assert (source.kind, source.file, source.class_name) == ("native", file, None)
    assert source.model_directory == source.version_directory == tmp_path
    file.write_text("class TritonPythonModel: ...\n")
    assert of_file(file).kind == "triton"


def test_a_relative_path_is_meant_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert of_file("mine.py").file == tmp_path / "mine.py"
    assert of_file(os.fspath(tmp_path) + "/./mine.py").file == tmp_path / "mine.py"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.py", tmp_path):
        with pytest.raises(LoadFailed, match=f"Python model file not found in '{path}'") as caught:
            of_file(path)
        assert caught.value.stage == "find"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.symlink_to("/proc/self/mem")  # not even by root
    with pytest.raises(LoadFailed, match=r"cannot read '.*mine\.py': (Input/output error|Permission denied)"):
        of_file(file)


def test_a_file_in_another_encoding_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_bytes("# -*- coding: latin-1 -*-\n# über\nclass TritonPythonModel: ...".encode("latin-1"))
    assert of_file(file).kind == "triton"


def class_source(model_class: type) -> ModelSource:
    """Return the source that a load finds for a class."""
    return prepare(Wanted("model", model_class), ModelRepositories(()), lambda _: None).models[0].source


def test_a_class_is_found_in_its_file() -> None:
    source = class_source(TopLevel)
    assert source.file == Path(__file__)
    assert (source.kind, source.class_name) == ("native", "TopLevel")
    assert class_source(TopLevel.Inner).class_name == "TopLevel.Inner"
    assert class_source(TritonPythonModel).kind == "triton"
    assert class_source(recorder.Recorder).file == Path(recorder.__file__)


def test_a_class_inside_a_function_is_refused_with_advice() -> None:
    class Local:
        pass

    with pytest.raises(LoadFailed, match=r"defined inside a function.* top level"):
        class_source(Local)


def test_a_class_without_a_file_is_refused_with_advice() -> None:
    namespace: dict[str, type] = {}
    builtins.exec("class Typed: ...", namespace)
    for each in (int, namespace["Typed"]):
        with pytest.raises(LoadFailed, match="put the class into a file"):
            class_source(each)
