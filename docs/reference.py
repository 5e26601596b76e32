"""Writes the public names with the first sentences of their docstrings into API.md.

Run it with `python docs/reference.py` after a change to one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import GetSetDescriptorType, ModuleType

import moonpool
import moonpool.errors
import moonpool.testing
from moonpool import TensorType

PAGE = Path(__file__).parent / "API.md"
BEGIN, END = "<!-- names -->", "<!-- end -->"
MODULES = (moonpool, moonpool.errors, moonpool.testing)


def names(module: ModuleType) -> list[str]:
    """Return what a module offers to programs. The errors have a section of their own."""
    found = [name for name in dir(module) if not name.startswith("_")]
    if module is moonpool:
        found = [name for name in found if name not in vars(moonpool.errors)]
    return [name for name in found if callable(getattr(module, name))]


def first_sentence(value: object) -> str:
    first = (value.__doc__ or "").strip().partition("\n\n")[0]
    text = " ".join(first.split())
    # A point within code or in "e.g." has no capital letter after it.
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", text)[0]


# Those who write a backend read `help()`, those who write tests TESTING_MODELS, and the page stays short.
WITHOUT_MEMBERS = {
    *("Backend", "Model", "ModelInstance", "ResponseAllocator"),
    *("EnsembleModel", "InProcessModel", "LoadedModel", "RecordingHost"),
}


def members(value: object) -> Iterator[tuple[str, object]]:
    """Yield the public methods and properties that a class defines and explains."""
    if getattr(value, "__name__", "") in WITHOUT_MEMBERS:
        return
    if isinstance(value, type) and not issubclass(value, BaseException):
        for name, member in vars(value).items():
            is_explained = isinstance(member, property | GetSetDescriptorType) or callable(member)
            if not name.startswith("_") and is_explained and member.__doc__:
                yield name, member


def listed(module: ModuleType) -> Iterator[str]:
    yield f"## {module.__name__}\n"
    types = [name for name in names(module) if isinstance(getattr(module, name), TensorType)]
    if types:
        yield f"- {', '.join(f'`{name}`' for name in types)}: {first_sentence(TensorType)}"
    for name in names(module):
        value = getattr(module, name)
        if name in types:
            continue
        yield f"- `{name}`: {first_sentence(value)}"
        for member, explained in members(value):
            yield f"  - `{member}`: {first_sentence(explained)}"
    yield ""


def written(page: str) -> str:
    """Return the page with the names as they are now."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    text = "\n".join(line for module in MODULES for line in listed(module))
    return f"{before}{BEGIN}\n{text}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
