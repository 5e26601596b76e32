"""Finds what is compiled: modules in Python as they are, and other forms of some, in C++ and Cython.

Theory of operation. A package names those of its modules that are compiled as they are (`use_compiled`). Whoever
imports `a` then gets the compiled module `_a`, or the file, where there is none. For any other extension, the module
that can do without it calls `load_if_there`.

An extension may be missing, as moonpool installs without a compiler. In a source tree it may also be older than its
sources, and would then do what they did. So setup.py compiles a checksum of the sources into it, and it is left out
where they differ. An installed wheel has neither types nor C++, so nothing is compared there: its parts came together.

`sources.h` is what all extensions in C++ share.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import zlib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

PURE = "MOONPOOL_PURE"

# What an extension is written in.
_KINDS = ("cpp", "h", "pyx", "pxd")
# setup.py runs this file alone, with the same path.
_PACKAGE = Path(__file__).parents[2]


# The extensions that were compared with their sources, as they were then. A comparison takes a millisecond.
_compared: dict[str, tuple[ModuleType, str]] = {}


class _Stale(ImportError):
    """The extension was compiled from other sources."""


def pure() -> str:
    """Return the value of MOONPOOL_PURE: `0`, `1` or `contained`. Raises `ValueError` for any other."""
    value = os.environ.get(PURE) or "0"
    if value not in ("0", "1", "contained"):
        raise ValueError(f"must be 0, 1 or contained, not {value!r}")
    return value


def is_wanted() -> bool:
    """Return False if MOONPOOL_PURE leaves out all that is compiled. So does a wrong value, which the load of a model
    refuses.
    """
    try:
        return pure() != "1"
    except ValueError:
        return False


def compiled_from(name: str) -> list[Path]:
    """Return the module in Python that an extension is compiled from as it is; none for any other extension.

    `a._b` is compiled from `a/b.py`, with the types in `a/b.pxd`.
    """
    place = _PACKAGE.joinpath(*name.split(".")[1:])
    module = place.with_name(f"{place.name[1:]}.py")
    return [module] if module.with_suffix(".pxd").is_file() else []


def needed(declarations: Path) -> list[str]:
    """Return the extensions whose types are in these ones."""
    text = declarations.read_text(encoding="utf-8")
    return [f"moonpool.{each}" for each in re.findall(r"^from moonpool\.(\S+) cimport", text, re.MULTILINE)]


def declarations_of(module: Path) -> list[Path]:
    """Return the types of a module in Python, and those that they refer to."""
    found = [module.with_suffix(".pxd")]
    for file in found:
        for name in needed(file):
            place = _PACKAGE.joinpath(*name.split(".")[1:])
            mine = [place.with_name(f"{place.name.lstrip('_')}.pxd"), place.with_suffix(".pxd")]
            found += [each for each in mine if each.is_file() and each not in found][:1]
    return found


def sources(name: str) -> list[Path]:
    """Return all that an extension may be compiled from, in one order. It is empty where moonpool is installed without
    sources.
    """
    place = _PACKAGE.joinpath(*name.split(".")[1:])
    shared = _PACKAGE / "ipc"
    if module := compiled_from(name):
        return [*module, *declarations_of(module[0]), *sorted(shared.glob("*/*.h"))]
    own = sorted(file for kind in _KINDS for file in place.parent.glob(f"{place.name}*.{kind}"))
    parts = ("native/*.cpp", "native/*.h", "extension/*.h", "port/*.pxd", "slots/*.pxd")
    common = [file for part in parts for file in shared.glob(part)]
    common = sorted({*common, *place.parent.glob("*.pxd")} - {*own})
    return [*own, *common] if own else []


class _Finder:
    """Finds and loads the compiled form of a module when somebody imports the module, as `importlib` asks for it."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._found: dict[str, ModuleType] = {}

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname not in self.names or not is_wanted():
            return None
        package, name = fullname.rpartition(".")[::2]
        compiled = load_if_there(f"{package}._{name}")
        if compiled is None:
            return None
        self._found[fullname] = compiled
        loader: Any = self
        return ModuleSpec(fullname, loader, origin=compiled.__file__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._found[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it was executed when it was found."""


_FINDER = _Finder()


def use_compiled(package: str, *names: str) -> None:
    """Let the compiled forms of modules of a package take their places, where they are wanted and there.

    For the package itself, before anybody imports one of them.
    """
    _FINDER.names.update(f"{package}.{name}" for name in names)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def checksum(name: str) -> str:
    """Return the checksum of the sources of an extension, empty if there are none."""
    total, files = 0, sources(name)
    for file in files:
        total = zlib.crc32(file.read_bytes(), total)
    return f"{total:08x}" if files else ""


def load(name: str) -> Any:
    """Import an extension. Raises `ImportError` if this interpreter has none, or if it is older than its sources."""
    # An older interpreter would load the file, as its name fits, and miss functions that it calls. One without its lock
    # lays out objects in another way.
    if sys.version_info < (3, 11) or sys.implementation.name != "cpython" or "t" in sys.abiflags:
        raise ImportError(f"{name} is for CPython from 3.11 on, with its lock")
    # It has the types of these. Python's forms of them would not do.
    for module in compiled_from(name):
        for other in needed(module.with_suffix(".pxd")):
            load(other)
    try:
        extension: Any = importlib.import_module(name)
    except ImportError:
        raise
    except Exception as error:  # types do not fit. If Python's form fails, too, that one says why
        raise _stale(name) from error
    compiled_of = (extension, getattr(extension, "SOURCES", ""))
    if _compared.get(name) == compiled_of:
        return extension
    expected = checksum(name)
    if expected and compiled_of[1] != expected:
        raise _stale(name)
    _compared[name] = compiled_of
    return extension


def _stale(name: str) -> _Stale:
    return _Stale(
        f"{name} is left out, since it was not compiled from the sources beside it; compile it again: "
        "python setup.py build_ext --inplace"
    )


def load_if_there(name: str) -> Any:
    """Import an extension, and return None where `load` would raise. Logs a warning if it is older than its sources."""
    try:
        return load(name)
    except _Stale as error:
        # Stubs import this module, and mostly need no log. There, the line goes to the log with what the model prints.
        import logging

        logging.getLogger("moonpool").warning("%s", error)
    except ImportError:  # not compiled, or for another machine
        pass
    return None
