"""Finds the source of a class or function that was typed into a session: into the cells of a notebook, or at Python's
prompt.

A stub imports a model from a file. A session keeps its inputs as text, so the class is cut out of that text, with the
imports, functions, classes and constants that it uses. Nothing is run or pickled for this. A name whose value is the
result of running code is refused, because in the stub that code could give another value.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import linecache
import re
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.model.source import Definition, file_of, kind_of

# The inputs of Python's own prompt, from 3.13 on.
_PROMPT = re.compile(r"<python-input-\d+>")
# The parts of expressions that have the same value in the stub.
_PLAIN = (
    ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Dict,
    ast.Set, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.expr_context, ast.operator,
    ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Expressions that make a container of their parts.
_DISPLAYS: dict[type[ast.expr], type] = {ast.List: list, ast.Tuple: tuple, ast.Dict: dict, ast.Set: set}


class _Unreachable(Exception):
    """A name that the class uses cannot be taken along. The text says why."""


class _Statement(NamedTuple):
    """A statement at the top level of a session, by its cell and its number there."""

    cell: int
    number: int
    node: ast.stmt


def source_of(definition: Definition) -> str:
    """Return the text of a file with this class or function and everything that it uses from its session. Raises
    `LoadFailed`.
    """
    namespace = vars(sys.modules.get(definition.__module__, builtins))
    root = definition.__qualname__.partition(".")[0]
    try:
        if "<locals>" in definition.__qualname__:
            raise _Unreachable("it is defined inside a function")
        if "<" in root:
            raise _Unreachable("it has no name")
        return _session(_cells(namespace)).cut(root, namespace)
    except _Unreachable as error:
        file, kind = f"{root.lower()}.py", kind_of(definition)
        raise LoadFailed(
            f"{kind} {definition.__qualname__} cannot be taken out of this session: {error}. A stub is another "
            f"process and imports the model from a file, so put the {kind} into a file and load that:\n"
            f"  %%writefile {file}          (the first line of the cell with the {kind} and its imports)\n"
            f'  runtime.load("{root.lower()}", "{file}")',
            stage="find",
        ) from error


def function_source(function: FunctionType) -> tuple[str, str]:
    """Return a text with a function and everything that it uses, and the name of the function there.

    The function is in a file or in a session. Raises `LoadFailed`.
    """
    namespace = vars(sys.modules.get(function.__module__, builtins))
    name = function.__qualname__
    file = file_of(function)
    try:
        if not name.isidentifier():
            raise _Unreachable("it is not at the top level")
        if namespace.get(name) is not function:
            raise _Unreachable(f"'{name}' is something else by now")
        cells = _cells(namespace) if file is None else ["".join(linecache.getlines(str(file)))]
        return _session(cells).cut(name, namespace), name
    except _Unreachable as error:
        where = "this session" if file is None else str(file)
        raise LoadFailed(
            f"function {name} cannot be taken out of {where}: {error}. Put what it needs into it, or give a text",
            stage="find",
        ) from error


def _cells(namespace: Mapping[str, Any]) -> list[str]:
    """Return the inputs of a session, in order."""
    # IPython's own list. It also has cells that were run again or have failed, and magics as calls.
    typed = namespace.get("In")
    if isinstance(typed, list) and all(isinstance(cell, str) for cell in typed):
        return typed
    names = [name for name in list(linecache.cache) if _PROMPT.fullmatch(name)]
    return ["".join(linecache.getlines(name)) for name in names]


def _session(cells: Sequence[str]) -> _Session:
    return copy.copy(_parsed(tuple(cells)))


@functools.lru_cache(maxsize=16)
def _parsed(cells: tuple[str, ...]) -> _Session:
    """Parse a session. A function may be run many times, and its file may be long."""
    return _Session(cells)


class _Session:
    def __init__(self, cells: Sequence[str]) -> None:
        self._namespace: Mapping[str, Any] = {}
        # The last statements that bind each name: one, but for imports of parts of one package.
        self._bound: dict[str, list[_Statement]] = {}
        # Imports of `__future__`, which hold for everything.
        self._always: set[_Statement] = set()
        # Imports of all names of a module, which may define any name.
        self._stars: set[_Statement] = set()
        self._taken: set[_Statement] = set()
        # What statements use, and their text, for all copies: the same function may be run again and again.
        self._used: dict[_Statement, list[str]] = {}
        self._texts: dict[_Statement, str] = {}
        for cell, text in enumerate(cells):
            for number, node in enumerate(_statements(text)):
                self._note(_Statement(cell, number, node))

    def _note(self, statement: _Statement) -> None:
        node = statement.node
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            self._always.add(statement)
            return
        for name in _names_bound(node):
            before = self._bound.get(name, [])
            is_part = isinstance(node, ast.Import) and all(isinstance(other.node, ast.Import) for other in before)
            self._bound[name] = [*before, statement] if is_part else [statement]
            if name == "*":
                self._stars.add(statement)
        for name in _names_patched(node):
            if any(isinstance(each.node, _DEFINITIONS) for each in self._bound.get(name, ())):
                self._bound[name] = [statement]

    def cut(self, name: str, namespace: Mapping[str, Any]) -> str:
        """Return the text of all that this name needs, in the session's order. Raises `_Unreachable`.

        `namespace` has the present values. Not for the session in the cache, but for a copy.
        """
        self._namespace, self._taken = namespace, set()
        if name not in self._bound:
            raise _Unreachable("what was typed there is not kept")
        self._take(name)
        statements = sorted(self._always) + sorted(self._taken - self._always)
        return "\n\n\n".join(map(self._text_of, statements)) + "\n"

    def _text_of(self, statement: _Statement) -> str:
        text = self._texts.get(statement)
        if text is None:
            text = self._texts[statement] = ast.unparse(statement.node)
        return text

    def _take(self, name: str) -> None:
        if name not in self._bound:
            if name in self._namespace and not hasattr(builtins, name):
                if not self._stars:
                    raise _Unreachable(f"it uses '{name}', which nothing that was typed defines")
                self._taken |= self._stars
            return
        for statement in self._bound[name]:
            if statement not in self._taken:
                self._taken.add(statement)
                self._take_one(name, statement)

    def _take_one(self, name: str, statement: _Statement) -> None:
        node = statement.node
        if isinstance(node, ast.Import | ast.ImportFrom):
            return
        if not isinstance(node, _DEFINITIONS):
            self._check_constant(name, node)
        used = self._used.get(statement)
        if used is None:
            used = self._used[statement] = sorted(_names_used(node))
        for other in used:
            self._take(other)

    def _check_constant(self, name: str, node: ast.stmt) -> None:
        """Raise `_Unreachable` unless running the statement again gives the name the value that it has now."""
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        is_plain = (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and [target.id for target in targets if isinstance(target, ast.Name)] == [name]
            and len(targets) == 1
            and value is not None
            and all(isinstance(part, _PLAIN) for part in ast.walk(value))
        )
        if not is_plain:
            raise _Unreachable(f"it uses '{name}', whose value is the result of running code; compute it in __init__")
        if not self._is_value_of(value, self._namespace.get(name)):  # type: ignore[arg-type]
            raise _Unreachable(f"it uses '{name}', which was changed after it was set")

    def _is_value_of(self, node: ast.expr, value: object) -> bool:
        """Tell if an expression still has this value, as far as that is known without running code."""
        try:
            return repr(value) == repr(ast.literal_eval(node))
        except (ValueError, TypeError):
            pass  # It is made of other names, which are checked themselves.
        if isinstance(node, ast.Name):
            return value is self._namespace.get(node.id, getattr(builtins, node.id, None))
        kind = _DISPLAYS.get(type(node))
        if kind is None:
            # A list, dictionary or set may have been changed in place, and there is nothing to compare it with.
            return not isinstance(value, list | dict | set)
        if type(value) is not kind:
            return False
        parts = _parts_of(node)
        values = [*value, *value.values()] if isinstance(value, dict) else [*value]  # type: ignore[misc]
        if isinstance(value, set):  # which has an order of its own
            return len(values) <= len(parts)
        return len(parts) == len(values) and all(map(self._is_value_of, parts, values))


def _statements(text: str) -> list[ast.stmt]:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        tree = compile(text, "<cell>", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return []  # It did not run, either.
    return tree.body if isinstance(tree, ast.Module) else []


def _names_bound(node: ast.stmt) -> Iterator[str]:
    """List the names that a statement binds or deletes; `*` for an import of all names."""
    parts: Iterator[ast.AST] = iter([node])
    if not isinstance(node, _DEFINITIONS):
        parts = ast.walk(node)
    for part in parts:
        if isinstance(part, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield part.name
        elif isinstance(part, ast.Import):
            yield from (each.asname or each.name.partition(".")[0] for each in part.names)
        elif isinstance(part, ast.ImportFrom):
            yield from (each.asname or each.name for each in part.names)
        elif isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
            yield part.id


def _parts_of(display: ast.expr) -> list[ast.expr]:
    """Return the elements of a list, tuple or set, or the keys of a dictionary and then its values."""
    if isinstance(display, ast.Dict):
        # Another dictionary that is unpacked in this one has no key.
        return [*filter(None, display.keys), *display.values]
    parts: list[ast.expr] = getattr(display, "elts", [])
    return parts


def _names_patched(node: ast.stmt) -> Iterator[str]:
    """Yield the names of objects whose attributes a statement changes, such as `Model` for `Model.limit = 5`."""
    if isinstance(node, _DEFINITIONS):
        return
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and not isinstance(part.ctx, ast.Load):
            root: ast.expr = part
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name):
                yield root.id


def _names_used(node: ast.stmt) -> set[str]:
    """List the names of the session that a statement uses, also inside functions and in hints that are text."""
    tables = [symtable.symtable(ast.unparse(node), "<cell>", "exec")]
    found = {each.get_name() for each in tables[0].get_symbols() if each.is_referenced()}
    while tables:
        table = tables.pop()
        tables += table.get_children()
        if table.get_type() != "module":
            found |= {each.get_name() for each in table.get_symbols() if each.is_global()}
    for part in ast.walk(node):
        for hint in (getattr(part, "annotation", None), getattr(part, "returns", None)):
            if hint is not None:
                found.update(_names_in_hint(hint))
    return found


def _names_in_hint(hint: ast.AST) -> Iterator[str]:
    """List the names of a hint. A text in it may be no name: `Float32[Batch, "width"]`."""
    for part in ast.walk(hint):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            for statement in _statements(part.value):
                yield from _names_in_hint(statement)
