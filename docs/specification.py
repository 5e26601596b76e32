"""Prints the specification: the promises that tests are marked with, below the headings of site/SPECIFICATION.md.

The site (`make site`) has the same page. A test, a class of tests or, as `pytestmark`, a file says

    @pytest.mark.promise("Containment", "Descriptors that a stub sends reach nobody.")

A sentence stands once. Other tests of the same promise have its beginning, with an ellipsis: "Descriptors that a stub
…". Nothing is imported: the marks are read from the source.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "site" / "SPECIFICATION.md"
MARK = "pytest.mark.promise"
REST = " …"
PLACE = "<!-- promises -->"


class Mark(NamedTuple):
    """A promise as one test, class or file has it."""

    section: str
    text: str
    path: str
    line: int
    name: str  # "" for a whole file

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def link(self) -> str:
        return f'[test](../../{self.path} "{self.name or self.path}")'


class Wrong(Exception):
    """A mark that cannot be written into the page: the text says where it is and what to do."""


def marks(folder: Path = ROOT / "tests") -> list[Mark]:
    """All marks of the tests below a folder, in the order of files and lines. Raises Wrong."""
    found: list[Mark] = []
    for file in sorted(folder.rglob("test_*.py")):
        source = file.read_text(encoding="utf-8")
        if MARK in source:
            path = file.relative_to(folder.parent).as_posix()
            found += _marks_of(ast.parse(source).body, path)
    return found


def _marks_of(body: list[ast.stmt], path: str) -> Iterator[Mark]:
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            several = node.value.elts if isinstance(node.value, ast.List) else [node.value]
            yield from _promises_in(several, path, "")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _promises_in(node.decorator_list, path, node.name)
            if isinstance(node, ast.ClassDef):
                yield from _marks_of(node.body, path)


def _promises_in(expressions: list[ast.expr], path: str, name: str) -> Iterator[Mark]:
    for call in expressions:
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != MARK:
            continue
        if name and not name.startswith(("test_", "Test")):
            raise Wrong(f"{path}:{call.lineno}: {name} is no test")
        texts = [word.value for word in call.args if isinstance(word, ast.Constant)]
        if len(texts) != 2 or call.keywords or not all(isinstance(text, str) for text in texts):
            raise Wrong(f"{path}:{call.lineno}: a promise has a section and a sentence, as literals")
        section, text = map(str, texts)
        yield Mark(section, text, path, call.lineno, name)


def sections(found: list[Mark]) -> dict[str, dict[str, list[Mark]]]:
    """The marks of each sentence of each section. Raises Wrong where a beginning is of no sentence, or a sentence
    stands twice.
    """
    made: dict[str, dict[str, list[Mark]]] = {}
    for mark in found:
        if not mark.text.endswith(REST):
            sentences = made.setdefault(mark.section, {})
            if mark.text in sentences:
                raise Wrong(
                    f"{mark.place}: the sentence stands at {sentences[mark.text][0].place} already; "
                    f"give its beginning and{REST}"
                )
            sentences[mark.text] = [mark]
    for mark in found:
        if mark.text.endswith(REST):
            sentences = made.get(mark.section, {})
            begins = mark.text.removesuffix(REST)
            of = [sentence for sentence in sentences if sentence.startswith(begins)]
            if len(of) != 1:
                what = "several sentences" if of else "no sentence"
                raise Wrong(f"{mark.place}: {what} of {mark.section!r} begin with {begins!r}")
            sentences[of[0]].append(mark)
    return made


def written(page: str, found: list[Mark]) -> str:
    """The page with the promises of the marks, in the order of their files.

    Raises Wrong where its headings and the sections of the marks differ.
    """
    made = sections(found)
    named: list[str] = []

    def filled(match: re.Match[str]) -> str:
        heading, section, notes = match.groups()
        named.append(section)
        return f"{heading}{notes}{_listed(made.get(section, {}))}"

    text = re.sub(rf"^(## (.+)\n)((?:(?!## ).*\n)*?){PLACE}\n", filled, page, flags=re.MULTILINE)
    if sorted(named) != sorted(made):
        different = ", ".join(sorted(set(named) ^ set(made)))
        raise Wrong(f"{PAGE.name} has a heading without marks, or marks have none: {different}")
    return text


def _listed(sentences: dict[str, list[Mark]]) -> str:
    return "".join(
        f"- {sentence} ({', '.join(mark.link for mark in those)})\n" for sentence, those in sentences.items()
    )


def page() -> str:
    """Return the whole page. Raises Wrong."""
    return written(PAGE.read_text(encoding="utf-8"), marks())


if __name__ == "__main__":
    sys.stdout.write(page())
