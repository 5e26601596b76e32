"""Errors of the wire and of the memory, and what all errors have: codes, statuses, and texts for readers outside of the
process.
"""

from __future__ import annotations

# Triton's error codes; the index is the number on the wire.
CODES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED")


# The status of an HTTP response by the code of its error. Triton's frontend answers 400 unless it says otherwise.
HTTP_STATUSES = {
    "UNKNOWN": 400,
    "INTERNAL": 500,
    "NOT_FOUND": 404,
    "INVALID_ARG": 400,
    "UNAVAILABLE": 503,
    "UNSUPPORTED": 501,
    "ALREADY_EXISTS": 400,
    "CANCELLED": 499,
}
# Who can do something about an error, by its code, unless its class knows better.
_FAULTS = {"NOT_FOUND": "caller", "INVALID_ARG": "caller", "UNSUPPORTED": "caller"}
_FAULTS.update({"ALREADY_EXISTS": "caller", "CANCELLED": "caller", "UNAVAILABLE": "load"})


# A path in quotes may have spaces in it. In other paths, a name ends at a space, or at a character that names rarely
# have.
_QUOTED = r"""(["'])(?:file://)?/(?:[^"'\n/]*/)+([^"'\n/]*)\1"""
_PATH = r"""(?:file:/?/?|(?<![\w./-]))/(?:[^\s/"'(),:;<>=|]+/)+([^\s/"'(),:;<>=|]*)"""
# A repository may be named by a relative path, and then errors of its configurations are. It begins at the beginning of
# a word only: if each character of one could begin it, a long word of a model's would take hours.
_RELATIVE = r"""(?<![^\s"'(),:;<>=|])(?:[^\s/"'(),:;<>=|]+/)+(config\.pbtxt)\b"""
_ADDRESS = r"\b0x[0-9a-fA-F]{6,}\b"
_FRAME = r'\s*File ".*", line \d+'
_SOURCE = " " * 4
# The most characters that are searched, which takes some milliseconds on the thread that answers all clients.
_MOST_SCRUBBED = 1 << 16


def scrubbed(text: str) -> str:
    """Return the text without folders, addresses and lines of source. The last name of a path stays, and the line of a
    frame.

    Callers that have room for less cut the result: a path that was cut in two would not be found any more. A text that
    is too long to be searched is cut here.
    """
    import re  # no stub needs it for this

    if len(text) > _MOST_SCRUBBED:
        text = _beginning(text)
    text = re.sub(_QUOTED, r"\1\2\1", text)
    text = re.sub(_RELATIVE, r"\1", re.sub(_PATH, r"\1", text))
    text = re.sub(_ADDRESS, "0x…", text)
    if 'File "' not in text:
        return text
    kept = []
    is_frame = False
    for line in text.split("\n"):
        if is_frame and line.startswith(_SOURCE):
            continue
        is_frame = re.match(_FRAME, line) is not None
        kept.append(line)
    return "\n".join(kept)


def _beginning(text: str) -> str:
    """Return as much of a text as is searched, without a part of a path at its end."""
    text = text[:_MOST_SCRUBBED]
    # A path in quotes is not found without the second one. Any other ends at a space.
    end = max(map(text.rfind, "\n\"'"))
    if end < 0:
        end = text.rfind(" ")
    return text[: end + 1] + "..."


class MoonpoolError(Exception):
    """The base of all errors that moonpool itself raises.

    `code` is one of Triton's codes. `str(error)` is for you and your log: it may have paths, and lines of a model's
    code. Show strangers `error.public_text()`.
    """

    __module__ = "moonpool"

    code: str = "INTERNAL"
    # The text for readers outside of the runtime's process, if they may not see the whole text.
    public_message: str | None = None
    # The seconds after which the same request may succeed, if that is known.
    retry_after_s: float | None = None
    # If a model asks for what this machine lacks and another one may have: the options with which it does without,
    # where there are any. None for all other errors.
    instead: dict[str, str] | None = None
    # What the caller may have meant. Readers outside of the process do not get it: it may name what they must not know
    # of.
    hint = ""
    # True if the text names what its reader has sent, and nothing of this machine.
    _quotes_reader = False
    # As in `fault`; empty if the code says it.
    _fault = ""

    def __str__(self) -> str:
        return super().__str__() + self.hint

    @property
    def http_status(self) -> int:
        """The status of the response that `moonpool serve` gives over HTTP."""
        return HTTP_STATUSES[self.code]

    @property
    def fault(self) -> str:
        """The one whose fault it is: `caller`, `model`, `setup`, `load`, `backend` or `moonpool`. See
        `help(moonpool.errors)`.
        """
        return self._fault or _FAULTS.get(self.code, "moonpool")

    def public_text(self, request_id: str = "", *, is_for_contained: bool = False) -> str:
        """Return the text that clients of a server get, without folders, addresses and lines of source.

        If it leaves something out, it refers to the server's log, and names `request_id`, so that the entry there can
        be found. Errors that a model answers with are as in Triton if the model is not contained (`best-effort`,
        `strict`), except for a reader that is itself.
        """
        text = super().__str__() if self.public_message is None else self.public_message
        if not self._is_kept(is_for_contained=is_for_contained):
            text = scrubbed(text)
        if self.public_message is None:
            return text
        where = f" (request id: {request_id})" if request_id else ""
        return f"{text}; see the server's log{where}"

    def _is_kept(self, *, is_for_contained: bool) -> bool:  # noqa: ARG002 - as in ModelError
        """Return True if the whole text is for readers outside, too."""
        return self._quotes_reader


class ProtocolError(MoonpoolError):
    """A message that the tables in `ipc.messages` do not allow."""


class LocalProtocolError(ProtocolError):
    """This side was about to break the rules; nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules. Nothing that it sends can be trusted any more."""

    _fault = "model"


class PeerGone(MoonpoolError):
    """The process at the other end of the channel has ended or closed it."""

    _fault = "model"
    was_taken = True
    """False if it certainly has not taken the last message that was sent to it."""


class Closed(MoonpoolError):
    """This side closed the object earlier."""

    code = "UNAVAILABLE"
    _fault = "caller"


class OutOfMemory(MoonpoolError):
    """No region has room, and none may be added."""

    __module__ = "moonpool"

    code = "UNAVAILABLE"


class CudaUnavailable(MoonpoolError):
    """No device can be used: there is no driver, no device of that number, or it cannot share memory."""

    code = "UNAVAILABLE"
    _fault = "setup"


class CudaError(MoonpoolError):
    """The driver refused a call. Has the name and the number of the driver's error."""

    _fault = "setup"

    def __init__(self, text: str, name: str, number: int) -> None:
        super().__init__(text)
        self.name = name
        self.number = number


class BadTensor(MoonpoolError):
    """An array or a tensor description that cannot be a tensor."""

    code = "INVALID_ARG"
    _quotes_reader = True
