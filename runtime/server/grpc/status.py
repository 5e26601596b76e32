"""The statuses that RPCs end with, and those of errors."""

from __future__ import annotations

from typing import NamedTuple

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.isolation.public_text import public_text
from moonpool.runtime.log import RuntimeLog

_log = RuntimeLog("moonpool")
_DETAILS_BYTES = 6000
# Triton's frontend maps the codes of errors so.
_CODES = {
    "UNKNOWN": "UNKNOWN",
    "INTERNAL": "INTERNAL",
    "NOT_FOUND": "NOT_FOUND",
    "INVALID_ARG": "INVALID_ARGUMENT",
    "UNAVAILABLE": "UNAVAILABLE",
    "UNSUPPORTED": "UNIMPLEMENTED",
    "ALREADY_EXISTS": "ALREADY_EXISTS",
    "CANCELLED": "CANCELLED",
}
# They travel as numbers: the place in this list.
_NAMES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
_NUMBERS = {name: number for number, name in enumerate(_NAMES)}


class Status(NamedTuple):
    """The name of one of gRPC's codes, and a text for people."""

    code: str
    text: str

    @property
    def number(self) -> int:
        """The code as it travels."""
        return _NUMBERS[self.code]

    @property
    def details(self) -> bytes:
        """The text as it travels: in a header, which clients refuse if it is too large."""
        left = _DETAILS_BYTES
        for index, char in enumerate(self.text):
            # Each byte that is not printable ASCII is written as three characters.
            encoded = char.encode("utf-8", "replace")
            left -= 1 if " " <= char <= "~" and char != "%" else 3 * len(encoded)
            if left < 0:
                return f"{self.text[:index]} …".encode("utf-8", "replace")
        return self.text.encode("utf-8", "replace")


OK = Status("OK", "")
UNREADABLE = Status("INTERNAL", "Unable to parse request")
ENDING = Status("UNAVAILABLE", "the server is ending")


def status_of(error: BaseException, request_id: str = "") -> Status:
    """Return the status for an error. Errors that are not moonpool's are logged, and their status is INTERNAL."""
    if isinstance(error, MoonpoolError):
        return Status(_CODES[error.code], public_text(error, request_id))
    _log.error("an RPC failed: %r", error, exc_info=error)
    return Status("INTERNAL", public_text(error, request_id))
