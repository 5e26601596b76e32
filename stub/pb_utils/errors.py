"""Defines the error types of Triton's module and its named numbers, and texts for bad arguments."""

from __future__ import annotations

from enum import Enum

from moonpool.ipc.errors import MoonpoolError


class Constant(Enum):
    """Is one of a set of named numbers, equal to its number and convertible to it, without an order."""

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return int(self.value) == other
        return self is other

    def __hash__(self) -> int:
        return hash(self.value)


class ErrorCode(Constant):
    """Lists Triton's error codes."""

    __module__ = "c_python_backend_utils"

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


# Triton's name for the class, which models show when they print a code.
ErrorCode.__name__ = ErrorCode.__qualname__ = "__ErrorCode"


class TritonError:
    """Describes in a response what went wrong with one request. It is a value, not an exception."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("_code", "_message")

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        # A model may pass anything.
        given: tuple[object, object] = (message, code)
        if not isinstance(given[0], (str, bytes)) or not isinstance(given[1], ErrorCode):
            raise bad_arguments("TritonError", "message: str, code: TritonError.INTERNAL", *given)
        self._message = as_text(message)
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> ErrorCode:
        return self._code

    def __repr__(self) -> str:
        return f"TritonError({self._message!r}, TritonError.{self._code.name})"


class TritonModelException(Exception):
    """Says why a function of `triton_python_backend_utils` refuses. Models raise it, too."""

    __module__ = "c_python_backend_utils"


class InvalidReturn(MoonpoolError):
    """Says why the return value of `execute` is no answer to the requests."""


def shown(value: object) -> str:
    """Return a value as text for an error, shortened, even if the value's own methods fail."""
    try:
        return f"{value!r:.200}"
    except Exception:
        return object.__repr__(value)


def bad_arguments(owner: str, signature: str, *given: object) -> TypeError:
    """Return the TypeError for arguments of types that the constructor of `owner` does not take."""
    invoked = ", ".join(map(shown, given))
    return TypeError(
        "__init__(): incompatible constructor arguments. The following argument types are "
        f"supported:\n    1. c_python_backend_utils.{owner}({signature})\n\nInvoked with: {invoked}"
    )


def as_text(value: str | bytes) -> str:
    """Return a plain str. Triton's functions also take bytes and subclasses of str.

    Raises TypeError for a str with half a surrogate pair, which cannot be sent.
    """
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    try:
        return value.encode().decode()
    except UnicodeEncodeError:
        raise TypeError(f"incompatible arguments: a text that has no UTF-8 form: {shown(value)}") from None
