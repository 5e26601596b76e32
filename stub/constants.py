"""Named numbers, as Triton's modules have them."""

from __future__ import annotations

from enum import Enum


class Constant(Enum):
    """One of a set of named numbers. It equals its number, and converts to it; it has no order."""

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return int(self.value) == other
        return self is other

    def __hash__(self) -> int:
        return hash(self.value)
