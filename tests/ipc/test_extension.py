"""Tests of what is compiled: that it is as new as its sources, or left out."""

from __future__ import annotations

import ast
import importlib
import logging
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import moonpool
from moonpool.ipc import extension

NAMES = (
    "moonpool.ipc._copy",
    "moonpool.ipc.port._port",
    "moonpool.runtime.schedule._lane",
    "moonpool.runtime.server.grpc._http2",
    "moonpool.stub.peers._stub_calls",
    "moonpool.stub.peers._stub_port",
)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an extension whose sources have changed since it was compiled."""
    name = NAMES[0]
    if not extension.checksum(name):
        pytest.skip("the sources of the extensions are not installed")
    module = ModuleType(name)
    module.SOURCES = "00000000"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return name


@pytest.mark.parametrize("name", NAMES)
def test_what_is_compiled_is_of_the_sources_beside_it(name: str) -> None:
    pytest.importorskip(name, reason="moonpool was built without extensions")
    assert extension.load(name) is importlib.import_module(name)


@pytest.mark.parametrize("name", NAMES)
def test_each_source_counts(name: str) -> None:
    files = [file.name for file in extension.sources(name)]
    if not files:
        pytest.skip("the sources of the extensions are not installed")
    own = name.rpartition(".")[2]
    assert {f"{own}.cpp", f"{own}.pyx", f"{own[1:]}.py"} & set(files)
    assert {"wire.h", "sources.h"} <= set(files)
    assert len(set(files)) == len(files)


@pytest.mark.promise(
    "The tree",
    "What was compiled from other sources than those beside it is left out, and the log says how to compile it again.",
)
def test_what_is_older_than_its_sources_is_left_out(other: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "moonpool"):
        assert extension.load_if_there(other) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"{other} is left out, since it was not compiled from the sources beside it; compile it again: "
        "python setup.py build_ext --inplace"
    ]
    with pytest.raises(ImportError, match="compile it again"):
        extension.load(other)


def test_what_has_the_types_of_one_that_is_left_out_is_left_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, statistics = "moonpool.runtime.schedule._lane", "moonpool.runtime.observe._statistics"
    pytest.importorskip(lane, reason="moonpool was built without extensions")
    if not extension.checksum(lane):
        pytest.skip("the sources of the extensions are not installed")
    monkeypatch.setattr(sys.modules[statistics], "SOURCES", "00000000")
    with pytest.raises(ImportError, match=rf"{statistics} is left out"):
        extension.load(lane)


def test_what_has_no_sources_beside_it_is_taken(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "sources", lambda _: [])
    assert extension.load(other) is sys.modules[other]


def test_a_python_without_its_lock_takes_nothing_that_is_compiled(
    other: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(extension, "sources", lambda _: [])
    monkeypatch.setattr(sys, "abiflags", "t")
    assert extension.load_if_there(other) is None
    assert caplog.text == ""


def test_what_is_not_compiled_is_missing_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert extension.load_if_there("moonpool.ipc._nothing") is None
    assert caplog.records == []


@pytest.mark.parametrize(
    ("value", "is_wanted"), [("", True), ("0", True), ("contained", True), ("1", False), ("yes", False)]
)
def test_the_operator_may_do_without(monkeypatch: pytest.MonkeyPatch, value: str, is_wanted: bool) -> None:
    monkeypatch.setenv(extension.PURE, value)
    assert extension.is_wanted() is is_wanted
    if value == "yes":
        with pytest.raises(ValueError, match="must be 0, 1 or contained, not 'yes'"):
            extension.pure()
    else:
        assert extension.pure() == (value or "0")


class Declared(NamedTuple):
    """A class that is compiled: its file, the class that it derives from, and what C alone finds in it."""

    module: Path
    base: str
    of_c: frozenset[str]


def declared() -> dict[str, Declared]:
    """The classes that are compiled from modules in Python, by name."""
    found: dict[str, Declared] = {}
    for types in Path(moonpool.__file__).parent.glob("runtime/**/*.pxd"):
        if not types.with_suffix(".py").is_file():
            continue
        for name, base, body in re.findall(
            r"^cdef class (\w+)(?:\((?:\w+\.)*(\w+)\))?:\n((?:    .*\n|\n)*)", types.read_text(), re.MULTILINE
        ):
            of_c = set()
            for line in re.findall(r"^    cdef (?!public )(.*)", body, re.MULTILINE):
                before = line.partition("(")[0]
                of_c |= {before.split()[-1]} if "(" in line else set(re.findall(r"(\w+)(?:,|$)", before))
            found[name] = Declared(types.with_suffix(".py"), base, frozenset(of_c))
    return found


def test_the_python_form_of_a_class_finds_in_a_compiled_base_what_it_uses() -> None:
    """One extension may be missing, or be left out, while that of the base is there."""
    classes = declared()
    assert "InferCall" in classes
    wrong = []
    for name, (module, base, _) in classes.items():
        hidden: frozenset[str] = frozenset()
        while base in classes and classes[base].module != module:
            hidden |= classes[base].of_c
            base = classes[base].base
        (own,) = [each for each in ast.walk(ast.parse(module.read_text())) if getattr(each, "name", "") == name]
        used = {
            each.attr
            for each in ast.walk(own)
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self"
        }
        wrong += [f"{name}: {each}" for each in sorted(used & hidden)]
    assert wrong == []
