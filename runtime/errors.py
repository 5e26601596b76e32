"""The errors of the runtime, one class for each thing that a caller can do about it.

Every class derives from `MoonpoolError` and carries one of Triton's codes in `.code`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from errno import EAGAIN
from typing import Any, TypeVar

from moonpool.ipc.errors import Closed, MoonpoolError

T = TypeVar("T")


class InvalidRequest(MoonpoolError):
    """The request does not fit the model: names, datatypes, shapes. Correct it."""

    __module__ = "moonpool"
    _quotes_reader = True
    code = "INVALID_ARG"


class BadEnvironment(MoonpoolError):
    """An execution environment that cannot be used. The text names its path and says what to do."""

    __module__ = "moonpool"
    _fault = "setup"
    code = "INVALID_ARG"


class SequenceLost(MoonpoolError):
    """The instance that had the sequence's state ended. Start the sequence again."""

    __module__ = "moonpool"
    code = "UNAVAILABLE"


class ModelNotFound(MoonpoolError):
    """No such model or version is loaded."""

    __module__ = "moonpool"
    code = "NOT_FOUND"


class NotGranted(MoonpoolError):
    """A model asked for something that its sandbox does not allow. Its configuration may grant it."""

    _fault = "setup"
    code = "UNAVAILABLE"


class ModelUnavailable(MoonpoolError):
    """The model is loading, unloading or has failed for good; the text says why. Try later."""

    __module__ = "moonpool"
    code = "UNAVAILABLE"


class LoadFailed(MoonpoolError):
    """A model could not be loaded. `stage` says where in its life, `traceback` is the model's own."""

    __module__ = "moonpool"
    _fault = "model"

    # False if the text is that of a model which is not contained: clients get it as in Triton.
    is_confined = True

    def __init__(self, message: str, *, stage: str = "load", traceback: str = "") -> None:
        super().__init__(message)
        self.stage = stage
        self.traceback = traceback
        # The version of the model that failed, once that is known.
        self.version: int | None = None

    def _is_kept(self, *, is_for_contained: bool) -> bool:
        return not (self.is_confined or is_for_contained)


class ModelError(MoonpoolError):
    """The model answered this request with an error; `code` is the model's."""

    __module__ = "moonpool"
    _fault = "model"

    # True if the model is contained, so that addresses and paths of this machine are kept from clients.
    is_confined = False

    def __init__(self, message: str, code: str = "INTERNAL") -> None:
        super().__init__(message)
        self.code = code

    def _is_kept(self, *, is_for_contained: bool) -> bool:
        return not (self.is_confined or is_for_contained)


class HookFailed(MoonpoolError):
    """The model's `sleep` or `wake` raised, or took longer than its limit. No request was inside."""

    _fault = "model"


class StubDied(MoonpoolError):
    """The process of the instance ended while it had this request. Other instances serve on."""

    __module__ = "moonpool"
    _fault = "model"

    def __init__(self, message: str, public_message: str | None = None) -> None:
        super().__init__(message)
        self.public_message = public_message


class SandboxError(MoonpoolError):
    """Source that ran in a sandbox has no value: it raised, or met a limit. `result` is its `RunResult`."""

    __module__ = "moonpool"
    _fault = "model"

    def __init__(self, result: Any) -> None:
        super().__init__(str(result.error))
        self.result = result


class ClientCutMemory(StubDied):
    """The process ended because a client truncated memory that it had lent. It counts as no death of the model."""

    _fault = "caller"


class CallerInterrupted(MoonpoolError):
    """A signal handler raised in a caller that sent a batch or read its answer, so nobody knows what the process has
    done.

    The process has to end, and that counts as no death of the model.
    """


class QueueFull(MoonpoolError):
    """The queue is full: the request's level holds as many requests as its policy allows."""

    __module__ = "moonpool"
    code = "UNAVAILABLE"

    def __init__(self) -> None:
        super().__init__("Exceeds maximum queue size")


class BacklogFull(MoonpoolError):
    """Too many responses to the request waited for a reader that is too slow. The text names the option."""

    code = "UNAVAILABLE"


class QueueTimeout(MoonpoolError):
    """The request waited longer than its policy allows; it was not executed."""

    __module__ = "moonpool"
    code = "UNAVAILABLE"

    def __init__(self) -> None:
        super().__init__("Request timeout expired")


class RequestTimedOut(MoonpoolError, TimeoutError):
    """The time that was set for this request has passed. The model may still be executing it."""

    __module__ = "moonpool"
    code = "UNAVAILABLE"


class ExecuteTimedOut(MoonpoolError, TimeoutError):
    """The model took longer than its limit for one execute; its process was ended."""

    __module__ = "moonpool"
    _fault = "model"
    code = "UNAVAILABLE"


class OutOfThreads(MoonpoolError, OSError):
    """The operating system refuses the runtime a thread. The text says for what, and which limits to raise."""

    __module__ = "moonpool"
    code = "UNAVAILABLE"
    # As it is in the error of fork at the same limits.
    errno = EAGAIN


class RuntimeClosed(Closed):
    """The runtime was closed; make another."""

    __module__ = "moonpool"


class BackendError(MoonpoolError):
    """A backend broke its contract, or one of its functions raised. The cause is chained."""

    _fault = "backend"


def own(error: BaseException) -> BaseException:
    """Copy an error: one error may belong to a whole batch, while each caller needs a traceback of its own."""
    kind = type(error)
    other: BaseException = kind.__new__(kind, *error.args)
    other.__dict__.update(error.__dict__)
    other.__cause__ = error.__cause__
    other.__suppress_context__ = True
    return other


def all_of(act: Callable[[T], object], items: Iterable[T]) -> None:
    """Call `act` for each item, whatever it raised for the one before. Raises the first error after the last item.

    For items of different owners, none of whom must be able to end the loop.
    """
    first: BaseException | None = None
    for item in items:
        try:
            act(item)
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
