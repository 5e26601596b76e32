"""Patterns of names mean the same in the runtime and in the library for tritonserver: one table, which both ends
run.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import tests
from tests.compiled import compiled
from tests.runtime.triton.library import NATIVE

from moonpool.runtime.model.config.options import ModelOption
from moonpool.runtime.model.config.patterns import fits, fits_any

Fits = Callable[[list[tuple[str, str]]], list[bool]]
# A pattern, the names for which it stands, and names for which it does not.
CASES: list[tuple[str, list[str], list[str]]] = [
    ("", [""], ["a"]),
    ("*", ["", "a", "a.b", "*", "ä€"], []),
    ("**", ["", "a"], []),
    ("model", ["model"], ["model1", "amodel", "Model", ""]),
    ("model*", ["model", "model1", "model*"], ["mode", "amodel"]),
    ("*model", ["model", "amodel"], ["model1"]),
    ("a*b", ["ab", "a1b", "abab"], ["a", "b", "aba", "ba"]),
    ("aa*aa", ["aaaa", "aaXaa"], ["aa", "aaa"]),
    ("a*b*c", ["abc", "a1b2c", "abbc", "abcbc"], ["ac", "acb", "a1c"]),
    ("*b*b*", ["bb", "abab", "bbb"], ["b", "ab"]),
    ("*ab*ba*", ["abba", "ababa"], ["aba"]),
    # Signs of other grammars stand for themselves.
    ("model[^1]", ["model[^1]"], ["model1", "model2", "model^"]),
    ("model[!1]", ["model[!1]"], ["model2", "model!"]),
    ("m[[:digit:]]", ["m[[:digit:]]"], ["m1", "m:]"]),
    ("m?", ["m?"], ["m1", "m"]),
    ("m\\*", ["m\\", "m\\x"], ["m*", "m"]),
    ("m.n", ["m.n"], ["mxn"]),
    ("{a,b}", ["{a,b}"], ["a"]),
    ("ä*", ["ä", "äß"], ["a", "Ä"]),
    # Many stars cost no more than the name is long.
    ("a*" * 500 + "b", ["a" * 500 + "b"], ["a" * 5000]),
]
TABLE = [(pattern, name, True) for pattern, yes, _ in CASES for name in yes]
TABLE += [(pattern, name, False) for pattern, _, no in CASES for name in no]


@pytest.fixture(params=["the runtime", "the library"])
def end(request: pytest.FixtureRequest, tmp_path: Path) -> Fits:
    if request.param == "the runtime":
        return lambda asked: [fits(*each) for each in asked]
    source = Path(tests.__path__[0]) / "runtime/triton/pattern_program.cpp"
    program = compiled(tmp_path / "patterns", [source], f"-I{NATIVE}")

    def ask(asked: list[tuple[str, str]]) -> list[bool]:
        lines = "".join(f"{pattern}\t{name}\n" for pattern, name in asked)
        told = subprocess.run([program], input=lines, capture_output=True, text=True, check=True)
        return [line == "1" for line in told.stdout.splitlines()]

    return ask


@pytest.mark.promise(
    "Containment",
    "A pattern for names has one sign, `*`, which stands for any characters. A grant with patterns gives the same in a "
    "runtime and in a tritonserver.",
)
def test_both_ends_decide_alike(end: Fits) -> None:
    told = end([(pattern, name) for pattern, name, _ in TABLE])

    assert [(*each[:2], is_one) for each, is_one in zip(TABLE, told, strict=True)] == TABLE


def test_options_of_models_and_lists_of_patterns_have_this_grammar() -> None:
    for pattern, name, is_one in TABLE:
        assert ModelOption(pattern, "", "").is_for(name) is is_one
        assert fits_any(["-", pattern], name) is is_one
