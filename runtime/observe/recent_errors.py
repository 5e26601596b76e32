"""The recent errors that a server's page shows: failed requests, deaths of instances, loads that failed.

Theory of operation. Any thread notes errors, so one lock guards the table. A stub's error and its traceback may arrive
in either order, as the log is another channel than the answers. A traceback that comes first waits in `_early` for its
error. Both tables are bounded, since models choose the texts.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.messages import beginning, end, size_of

# The most that is kept of a text or a traceback.
MAX_BYTES = 8192
_GAP = "\n[…]\n"
_TRACEBACK = "\nTraceback (most recent call last):\n"


@dataclass
class RecentError:
    """One error, which may have come many times. Times are milliseconds since the epoch."""

    model: str
    version: int | None
    text: str
    traceback: str
    first_ms: int
    last_ms: int
    # The last instance and request that it came from; "" for an error outside of instances, or a request without an id.
    instance: str
    request_id: str
    # The number of requests that ended with it; 0 if an idle instance died.
    requests: int


# (model, version, text)
_Key = tuple[str, int | None, str]


class RecentErrors:
    """The latest errors that differ in their model or their text. Any thread may call any method.

    An error that comes again moves to the front and is counted; new ones replace the oldest.
    """

    def __init__(self, most: int = 50) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._errors: OrderedDict[_Key, RecentError] = OrderedDict()
        # The tracebacks of errors that have not arrived yet.
        self._early: OrderedDict[_Key, str] = OrderedDict()

    def add(
        self,
        model: str,
        version: int | None,
        error: BaseException | str,
        instance: str = "",
        request_id: str = "",
        requests: int = 0,
    ) -> None:
        """Note that so many requests ended with this error, or that something broke without a request."""
        text = _cut(_text(error))
        traceback = _cut(getattr(error, "traceback", ""))
        now_ms = time.time_ns() // 1_000_000
        key = model, version, text
        with self._lock:
            traceback = self._early.pop(key, traceback)
            known = self._errors.get(key)
            if known is None:
                self._errors[key] = RecentError(
                    model, version, text, traceback, now_ms, now_ms, instance, request_id, requests
                )
                if len(self._errors) > self._most:
                    self._errors.popitem(last=False)
                return
            self._errors.move_to_end(key)
            known.last_ms = now_ms
            known.requests += requests
            known.traceback = known.traceback or traceback
            known.instance = instance or known.instance
            known.request_id = request_id or known.request_id

    def logged(self, model: str, version: int, message: str) -> None:
        """Take in a message that a stub logged. If it is an error with a traceback, keep that with the error."""
        text, mark, rest = message.partition(_TRACEBACK)
        if not mark:
            return
        key, traceback = (model, version, _cut(text)), _cut((mark + rest).lstrip("\n"))
        with self._lock:
            known = self._errors.get(key)
            if known is not None:
                known.traceback = traceback
                return
            self._early[key] = traceback
            if len(self._early) > self._most:
                self._early.popitem(last=False)

    @contextlib.contextmanager
    def noting(self, model: str) -> Iterator[None]:
        """Note a `MoonpoolError` that is raised inside; it goes on."""
        try:
            yield
        except MoonpoolError as error:
            self.add(model, getattr(error, "version", None), error)
            raise

    def latest(self) -> list[RecentError]:
        """Return copies of all errors, the latest first."""
        with self._lock:
            return [RecentError(**vars(error)) for error in reversed(self._errors.values())]


def _text(error: BaseException | str) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:  # an error of a backend's own can be anything
        return type(error).__name__


def _cut(text: str) -> str:
    """Shorten a text to its beginning and its end: a message begins with the error, a traceback ends with it."""
    # A text may contain names of files that are not valid Unicode.
    text = text.rstrip("\n").encode("utf-8", "replace").decode()
    if size_of(text) <= MAX_BYTES:
        return text
    half = (MAX_BYTES - size_of(_GAP)) // 2
    return beginning(text, half) + _GAP + end(text, half)
