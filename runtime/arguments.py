"""Checks of the arguments that a program gives: each error is a sentence that names the argument and what it may be.

Arguments of a runtime raise ValueError (`OF_RUNTIME`), those of a load `ConfigError` (`OF_LOAD` in
`model.config.options`), and those of a request or of a loaded model `InvalidRequest` (`OF_REQUEST`).
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from moonpool.runtime.errors import InvalidRequest

# Some 23 days: the kernel counts the milliseconds of a wait in 31 bits.
LONGEST_S = 2_000_000
_SECONDS = f"a number of seconds from 0 to {LONGEST_S}"


class Arguments:
    """Checks the arguments of one way in. Each method returns what it has checked, or raises the error of that way."""

    def __init__(self, error: Callable[[str, str], Exception]) -> None:
        """`error` makes an error from the name of an argument and what is wrong with it."""
        self._error = error

    def refuse(self, name: str, wanted: str, given: object) -> NoReturn:
        """Raise the error for an argument that is not what is `wanted`."""
        raise self._error(name, f"must be {wanted}, not {given!r:.80}") from None

    def whole(self, name: str, given: Any, low: int, high: int | None = None, also: str = "") -> int:
        """Check a whole number. `also` names what else the argument may be, which the caller has checked."""
        try:
            number = -1 if isinstance(given, bool) else operator.index(given)
        except TypeError:
            number = -1
        if number < low or (high is not None and number > high):
            self.refuse(name, f"a whole number from {low} {'on' if high is None else f'to {high}'}{also}", given)
        return number

    def seconds(self, name: str, given: float) -> float:
        """Check a time in seconds."""
        if not _is_time(given):
            self.refuse(name, _SECONDS, given)
        return given

    def boolean(self, name: str, given: Any) -> bool:
        """Check a truth value."""
        if not isinstance(given, bool):
            self.refuse(name, "True or False", given)
        return given

    def one(self, name: str, given: Any, kind: type, wanted: str) -> Any:
        """Check an object of a kind, or None."""
        if given is not None and not isinstance(given, kind):
            self.refuse(name, wanted, given)
        return given

    def items(self, name: str, given: Any, wanted: str = "a list") -> list[Any]:
        """Check anything that can be iterated over, but a text: it would be taken for a list of its letters."""
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            self.refuse(name, wanted, given)
        return list(given)

    def texts(self, name: str, given: Any, wanted: str = "a list of texts") -> list[str]:
        """Check a list of texts."""
        texts = self.items(name, given, wanted)
        if not all(isinstance(each, str) for each in texts):
            self.refuse(name, wanted, given)
        return texts

    def map(self, name: str, given: Any, wanted: str = "a map") -> Mapping[Any, Any]:
        """Check a mapping whose keys are texts."""
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            self.refuse(name, wanted, given)
        return given

    def path(self, name: str, given: Any) -> str | os.PathLike[str]:
        """Check a path."""
        if not isinstance(given, str | os.PathLike):
            self.refuse(name, "a path, as a text or a Path", given)
        return given


OF_RUNTIME = Arguments(lambda name, what: ValueError(f"{name} {what}"))
OF_REQUEST = Arguments(lambda name, what: InvalidRequest(f"{name} {what}"))


def check_timeout(timeout_s: float | None) -> None:
    """Raise `InvalidRequest` unless this is a time for which a caller may wait."""
    if timeout_s is not None and not _is_time(timeout_s):
        OF_REQUEST.refuse("timeout_s", f"{_SECONDS}, or None for no limit", timeout_s)


def _is_time(given: Any) -> bool:
    try:
        return bool(0 <= given <= LONGEST_S)
    except (TypeError, ValueError):
        return False


def shape_of(given: int | Iterable[int]) -> tuple[int, ...]:
    """Return a shape as a tuple. Raises `InvalidRequest`."""
    try:
        dims = (given,) if isinstance(given, int) else tuple(map(operator.index, given))
    except TypeError:
        dims = (-1,)
    if any(dim < 0 for dim in dims):
        OF_REQUEST.refuse("shape", "a whole number from 0 on, or a list of these", given)
    return dims
