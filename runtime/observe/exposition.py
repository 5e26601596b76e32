"""Metrics in the text form that Prometheus reads, as Triton writes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

Labels: TypeAlias = "tuple[tuple[str, str], ...]"
_IN_VALUES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_IN_DESCRIPTIONS = str.maketrans({"\\": r"\\", "\n": r"\n"})
_NOT_FINITE = {"nan": "Nan", "inf": "+Inf", "-inf": "-Inf"}


class Sample(NamedTuple):
    """One line: the suffix of the family's name, the labels, the value."""

    suffix: str
    labels: Labels
    value: float


class ExposedFamily(NamedTuple):
    """The lines of one name. `type` is `counter`, `gauge`, `histogram` or `summary`."""

    name: str
    description: str
    type: str
    samples: list[Sample]


def expose(families: Iterable[ExposedFamily]) -> str:
    """Return the text; every line ends with a newline.

    Families without samples are left out. Families of one name are shown as one, with the first one's description.
    """
    by_name: dict[str, ExposedFamily] = {}
    for family in families:
        if family.samples:
            by_name.setdefault(family.name, family._replace(samples=[])).samples.extend(family.samples)
    lines = []
    for family in by_name.values():
        lines.append(f"# HELP {family.name} {family.description.translate(_IN_DESCRIPTIONS)}\n")
        lines.append(f"# TYPE {family.name} {family.type}\n")
        lines.extend(
            f"{family.name}{suffix}{_braced(labels)} {shown(value)}\n" for suffix, labels, value in family.samples
        )
    return "".join(lines)


def shown(number: float) -> str:
    """Return a number with at most 16 digits; whole numbers have no point."""
    # A float has no more than 16 digits. A count that was added up for years may have more.
    text = str(number) if isinstance(number, int) else f"{number:.16g}"
    return _NOT_FINITE.get(text, text)


def _braced(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{k}="{v.translate(_IN_VALUES)}"' for k, v in labels) + "}"
