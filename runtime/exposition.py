"""Metrics in the text form that Prometheus reads, as Triton writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeAlias

    Labels: TypeAlias = "tuple[tuple[str, str], ...]"

_IN_VALUES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_IN_DESCRIPTIONS = str.maketrans({"\\": r"\\", "\n": r"\n"})
_NOT_FINITE = {"nan": "Nan", "inf": "+Inf", "-inf": "-Inf"}


class Sample(NamedTuple):
    """One line: what is added to the family's name, the labels, the value."""

    suffix: str
    labels: Labels
    value: float


class Family(NamedTuple):
    """Lines of one name. `type` is `counter`, `gauge`, `histogram` or `summary`."""

    name: str
    description: str
    type: str
    samples: list[Sample]


def expose(families: Iterable[Family]) -> str:
    """The text, every line with its end.

    Families without samples are left out, and those of one name are shown as the first one.
    """
    by_name: dict[str, Family] = {}
    for family in families:
        if family.samples:
            by_name.setdefault(family.name, family._replace(samples=[])).samples.extend(
                family.samples
            )
    lines = []
    for family in by_name.values():
        lines.append(f"# HELP {family.name} {family.description.translate(_IN_DESCRIPTIONS)}\n")
        lines.append(f"# TYPE {family.name} {family.type}\n")
        lines.extend(
            f"{family.name}{suffix}{_braced(labels)} {shown(value)}\n"
            for suffix, labels, value in family.samples
        )
    return "".join(lines)


def shown(number: float) -> str:
    """The shortest of at most 16 digits, whole numbers without a point."""
    # More digits than 16 are in no float, but in the counts that have been added up for years.
    text = str(number) if isinstance(number, int) else f"{number:.16g}"
    return _NOT_FINITE.get(text, text)


def _braced(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{k}="{v.translate(_IN_VALUES)}"' for k, v in labels) + "}"
