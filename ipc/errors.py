"""Errors of the wire and of the memory, named by whose doing it was."""

from __future__ import annotations

# Triton's error codes; the index is the number on the wire.
CODES = (
    "UNKNOWN",
    "INTERNAL",
    "NOT_FOUND",
    "INVALID_ARG",
    "UNAVAILABLE",
    "UNSUPPORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
)


class MoonpoolError(Exception):
    """Whatever moonpool itself raises. `code` is one of `CODES`."""

    code: str = "INTERNAL"
    # What may be said of it outside of the runtime's process, where that is less than the whole text.
    told: str | None = None


class ProtocolError(MoonpoolError):
    """A message that the tables in `ipc.messages` do not allow."""


class LocalProtocolError(ProtocolError):
    """This side was about to break the rules; nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules; it is not to be trusted any further."""


class PeerGone(MoonpoolError):
    """The process at the other end of the channel has ended or closed it."""


class Closed(MoonpoolError):
    """This side closed the object earlier."""

    code = "UNAVAILABLE"


class OutOfMemory(MoonpoolError):
    """No region can hold the tensor, and none may be added."""

    code = "UNAVAILABLE"


class CudaUnavailable(MoonpoolError):
    """No device can be used here: no driver, no device of that number, or one that cannot share memory."""

    code = "UNAVAILABLE"


class CudaError(MoonpoolError):
    """The driver refused, with the name and the number of its error."""

    def __init__(self, text: str, name: str, number: int) -> None:
        super().__init__(text)
        self.name = name
        self.number = number


class BadTensor(MoonpoolError):
    """An array or a tensor description that cannot be a tensor."""

    code = "INVALID_ARG"
