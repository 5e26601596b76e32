"""How an RPC ends that is not answered."""

from __future__ import annotations

import logging
from typing import NamedTuple

import grpc

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.frontend.statuses import grpc_status
from moonpool.runtime.public_text import public_text

_log = logging.getLogger("moonpool")
_DETAILS_BYTES = 6000
# gRPC's core wants numbers.
_NUMBERS: dict[str, int] = {code.name: code.value[0] for code in grpc.StatusCode}


class Status(NamedTuple):
    """The name of one of gRPC's codes, and what a person may read."""

    code: str
    text: str

    @property
    def number(self) -> int:
        """The code as it travels."""
        return _NUMBERS[self.code]

    @property
    def details(self) -> bytes:
        """The text as it travels: in a header, which clients refuse when it is too large."""
        left = _DETAILS_BYTES
        for index, char in enumerate(self.text):
            # What is not printable ASCII is written as three characters a byte.
            encoded = char.encode("utf-8", "replace")
            left -= 1 if " " <= char <= "~" and char != "%" else 3 * len(encoded)
            if left < 0:
                return f"{self.text[:index]} …".encode("utf-8", "replace")
        return self.text.encode("utf-8", "replace")


OK = Status("OK", "")


def status_of(error: BaseException, request_id: str = "") -> Status:
    """What a client is told of an error; one that nobody foresaw is logged, and told as such."""
    if isinstance(error, MoonpoolError):
        return Status(grpc_status(error), public_text(error, request_id))
    _log.error("an RPC failed: %r", error, exc_info=error)
    return Status("INTERNAL", public_text(error, request_id))
