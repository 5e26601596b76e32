"""The grammar of patterns for names, of models and of variables of the environment: `*` stands for any characters, all
else for itself.

A grant depends on it, and the library in a tritonserver decides the same in C++ (`runtime/triton/native/pattern.h`). So
neither end takes it from a library of its language: those know more characters, and do not agree about them. The tests
of both run one table of cases.
"""

from __future__ import annotations

from collections.abc import Iterable


def fits(pattern: str, name: str) -> bool:
    """Return True if a name is one for which a pattern stands. Takes a time that grows with the name, however many
    stars there are.
    """
    first, *rest = pattern.split("*")
    if not rest:
        return name == pattern
    *middle, last = rest
    if not name.startswith(first) or len(name) < len(first) + len(last) or not name.endswith(last):
        return False
    at, end = len(first), len(name) - len(last)
    for part in middle:
        # The first place is as good as any later one, so nothing is ever tried twice.
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def fits_any(patterns: Iterable[str], name: str) -> bool:
    """Return True if one of the patterns stands for a name."""
    return any(fits(pattern, name) for pattern in patterns)
