"""What went wrong lately, for a person who looks: failed requests, deaths of instances, loads that failed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.texts import beginning, end, size_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of a text and of a traceback.
MAX_BYTES = 8192
_GAP = "\n[…]\n"
_TRACEBACK = "\nTraceback (most recent call last):\n"


@dataclass
class RecentError:
    """One error, however often it came. Times are milliseconds since the epoch."""

    model: str
    version: int | None
    text: str
    traceback: str
    first_ms: int
    last_ms: int
    # Where it came last; "" where it was in no instance, or the request had no name.
    instance: str
    request_id: str
    # How many requests ended with it: none where an instance died idle.
    requests: int


# Model, version, text.
_Key = tuple[str, int | None, str]


class RecentErrors:
    """The latest errors that differ in their model or their text. Any thread may call any method.

    An error that comes again moves to the front and is counted; the oldest make room for new ones.
    """

    def __init__(self, most: int = 50) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._errors: OrderedDict[_Key, RecentError] = OrderedDict()
        # Of errors that are on their way still, as the log is another one.
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
        """Note that so many requests ended with this error, or that something broke without any."""
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
        """What a stub logged: where it is an error with its traceback, keep that with the error."""
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
        """Note what moonpool raises inside, which goes on."""
        try:
            yield
        except MoonpoolError as error:
            self.add(model, getattr(error, "version", None), error)
            raise

    def take(self) -> list[RecentError]:
        """All of them, the latest last; they are forgotten here."""
        with self._lock:
            taken = list(self._errors.values())
            self._errors.clear()
            return taken

    def latest(self) -> list[RecentError]:
        """Copies, the latest first."""
        with self._lock:
            return [RecentError(**vars(error)) for error in reversed(self._errors.values())]


def _text(error: BaseException | str) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:  # an error of a backend's own can be anything
        return type(error).__name__


def _cut(text: str) -> str:
    """The end of a traceback says what happened, the beginning of a text does; keep both."""
    # Names of files, which may stand in it, need not be text.
    text = text.rstrip("\n").encode("utf-8", "replace").decode()
    if size_of(text) <= MAX_BYTES:
        return text
    half = (MAX_BYTES - size_of(_GAP)) // 2
    return beginning(text, half) + _GAP + end(text, half)
