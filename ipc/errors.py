"""Errors of the wire and of the memory. Their names say which side caused them."""

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
    """The base of all errors that moonpool itself raises. `code` is one of `CODES`."""

    code: str = "INTERNAL"
    # The text for readers outside of the runtime's process, if they may not see the whole text.
    public_message: str | None = None
    # The seconds after which the same request may succeed, if that is known.
    retry_after_s: float | None = None


class ProtocolError(MoonpoolError):
    """A message that the tables in `ipc.messages` do not allow."""


class LocalProtocolError(ProtocolError):
    """This side was about to break the rules; nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules. Nothing that it sends can be trusted any more."""


class PeerGone(MoonpoolError):
    """The process at the other end of the channel has ended or closed it."""


class Closed(MoonpoolError):
    """This side closed the object earlier."""

    code = "UNAVAILABLE"


class OutOfMemory(MoonpoolError):
    """No region has room, and none may be added."""

    code = "UNAVAILABLE"


class CudaUnavailable(MoonpoolError):
    """No device can be used: there is no driver, no device of that number, or it cannot share memory."""

    code = "UNAVAILABLE"


class CudaError(MoonpoolError):
    """The driver refused a call. Has the name and the number of the driver's error."""

    def __init__(self, text: str, name: str, number: int) -> None:
        super().__init__(text)
        self.name = name
        self.number = number


class BadTensor(MoonpoolError):
    """An array or a tensor description that cannot be a tensor."""

    code = "INVALID_ARG"
