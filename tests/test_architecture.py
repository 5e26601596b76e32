"""The pages name the threads, the extensions and the storeys that the code has."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.test_layout import ROOT, _keeps_the_trees_until_the_end, nodes

__all__ = ["_keeps_the_trees_until_the_end"]

PAGE = ROOT / "docs" / "ARCHITECTURE.md"
THREADS = ROOT / "docs" / "site" / "THREADS.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not in the wheel")

# Names that begin like those of threads: of files, folders and applications.
OTHERS = {
    "moonpool-bench",
    "moonpool-environment.json",
    "moonpool-hosts",
    "moonpool-hub",
    "moonpool-ingress",
    "moonpool-message",
    "moonpool-model",
    "moonpool-models",
    "moonpool-scratch",
}


def texts() -> Iterator[str]:
    """Every text in the code, up to its first value if it is an f-string."""
    for _, node in nodes():
        if isinstance(node, ast.JoinedStr):
            node = node.values[0]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_page_names_the_threads_of_the_code() -> None:
    code = {text.rstrip("-") for text in texts() if re.fullmatch(r"moonpool-[\w.-]+", text)}
    names = re.findall(r"`(moonpool-[a-z][\w-]*)`", THREADS.read_text(encoding="utf-8"))
    page = {re.sub(r"-[A-Z_]+$", "", name) for name in names}

    assert sorted(code - OTHERS - page) == [], "not on the page"
    assert sorted(page - code) == [], "not in the code"
    assert code >= OTHERS


def test_every_thread_has_a_name() -> None:
    assert [
        place
        for place, node in nodes()
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) == "Thread"
        and not any(keyword.arg == "name" for keyword in node.keywords)
    ] == []


def test_the_page_has_each_extension() -> None:
    setup = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    names = {node.value for node in ast.walk(setup) if isinstance(node, ast.Constant)}
    built = {
        name.removeprefix("moonpool.").replace(".", "/")
        for name in names
        if isinstance(name, str) and re.fullmatch(r"moonpool\.[\w.]+\._\w+", name)
    }
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("| extension | made from | without it |\n")[2].partition("\n\n")[0]
    rows = [row.split(" | ")[0] for row in table.splitlines()[1:]]

    assert {name for row in rows for name in re.findall(r"`([\w/]+)`", row)} == built


def storeys() -> list[set[str]]:
    """The storeys of the runtime that imports are checked against, from the highest to the lowest."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = [
        contract["layers"]
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["name"].startswith("Imports between the packages of the runtime")
    ]
    return [{name.rpartition(".")[2] for name in layer.split(" | ")} for layer in layers]


def test_the_page_has_the_storeys_of_the_runtime_in_their_order() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("| in `runtime/`, highest first | holds |\n")[2].partition("\n\n")[0]
    shown = [
        [Path(name).stem for name in re.findall(r"`([\w.]+)/?`", row.split(" | ")[0])] for row in table.splitlines()[1:]
    ]
    names = [name for row in shown for name in row]

    wanted = storeys()
    assert sorted(names) == sorted(name for storey in wanted for name in storey)
    place = {name: number for number, storey in enumerate(wanted) for name in storey}
    assert [place[name] for name in names] == sorted(place[name] for name in names)
