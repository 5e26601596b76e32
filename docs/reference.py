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


def first_sentence(value: object) -> str:
    first = (value.__doc__ or "").strip().partition("\n\n")[0]
    text = " ".join(first.split())
    # A point within code or in "e.g." has no capital letter after it.
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", text)[0]


# Those who write a backend read `help()`, those who write tests TESTING_MODELS, and the page stays short.
WITHOUT_MEMBERS = {
    *("Backend", "DeviceArray", "Model", "ModelInstance", "Progress", "Resident", "ResponseAllocator"),
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
    values = {name: getattr(module, name) for name in sorted(module.__all__)}
    types = [name for name, value in values.items() if isinstance(value, TensorType)]
    if types:
        yield f"- {', '.join(f'`{name}`' for name in types)}: {first_sentence(TensorType)}"
    for name, value in values.items():
        if name in types:
            continue
        if isinstance(value, str):
            yield f"- `{name}`: A dimension in the brackets of a datatype."
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
