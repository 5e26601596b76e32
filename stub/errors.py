"""What goes wrong in a model, as objects: Triton's two error types and one of moonpool's."""

from __future__ import annotations

from moonpool.ipc.errors import MoonpoolError
from moonpool.stub.constants import Constant


class ErrorCode(Constant):
    """Triton's error codes."""

    __module__ = "c_python_backend_utils"

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


# Triton's name for it, which models show when they print a code.
ErrorCode.__name__ = ErrorCode.__qualname__ = "__ErrorCode"


class TritonError:
    """Says in a response what went wrong with one request. A value, not an exception."""

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
        # Whoever wrote the model may have passed anything.
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
    """Raised by every function of `triton_python_backend_utils` that refuses, and by models."""

    __module__ = "c_python_backend_utils"


class InvalidReturn(MoonpoolError):
    """What the model returned cannot be an answer to the requests it was given."""


def shown(value: object) -> str:
    """A value in the text of an error, shortened; also one whose own methods fail."""
    try:
        return f"{value!r:.200}"
    except Exception:
        return object.__repr__(value)


def bad_arguments(owner: str, signature: str, *given: object) -> TypeError:
    """The TypeError for arguments of types that `owner`'s constructor does not take."""
    invoked = ", ".join(map(shown, given))
    return TypeError(
        "__init__(): incompatible constructor arguments. The following argument types are "
        f"supported:\n    1. c_python_backend_utils.{owner}({signature})\n\nInvoked with: {invoked}"
    )


def as_text(value: str | bytes) -> str:
    """A str of exactly that type; Triton's functions take bytes and subclasses of str as well.

    Raises TypeError for a str with half a surrogate pair, which cannot be sent.
    """
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    try:
        return value.encode().decode()
    except UnicodeEncodeError:
        raise TypeError(
            f"incompatible arguments: a text that has no UTF-8 form: {shown(value)}"
        ) from None
