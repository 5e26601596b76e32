"""Signal handlers that raise at chosen moments in the main thread."""

from __future__ import annotations

import gc
import itertools
import linecache
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import moonpool

PACKAGES = tuple(str(Path(moonpool.__path__[0], name)) for name in ("runtime", "ipc"))
# What a model's main thread runs.
OF_A_STUB = tuple(str(Path(moonpool.__path__[0], name)) for name in ("stub", "ipc"))
# No signal handler can run between the end of a block and the release of its lock, nor at a `try`, which is no
# instruction, nor from an exception to the end of the first call after it.
_NO_STEPS = re.compile(r"\s*(with (self\.)?_\w+:|try:|except BaseException:)")
_FIRST_CALL = ".soon.append("


class Interrupted(BaseException):
    """The exception that the signal handler raises."""


def interrupt() -> None:
    """Do what a handler does that raises."""
    raise Interrupted


def interrupted_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, after: bool = False) -> None:
    """Let a method raise, before or after its work, at the next call by the main thread."""
    method: Callable[..., Any] = getattr(owner, name)
    left = [None]

    def call(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() or not left:
            return method(*arguments, **options)
        left.pop()
        if after:
            method(*arguments, **options)
        raise Interrupted

    monkeypatch.setattr(owner, name, call)


class Alarm:
    """Has the handler of a signal raise on the main thread after a time, once."""

    def __init__(self, error: type[BaseException], after_s: float) -> None:
        self._error = error
        main = threading.main_thread().ident or 0
        self._timer = threading.Timer(after_s, signal.pthread_kill, [main, signal.SIGUSR1])

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGUSR1, self._raise)
        self._timer.start()

    def _raise(self, _: int, __: FrameType | None) -> None:
        raise self._error

    def __exit__(self, *_: object) -> None:
        self._timer.join()
        signal.signal(signal.SIGUSR1, self._before)


class RaisesAt:
    """Lets the main thread raise at an event of its own, by number: at a line, or where a function begins or one in C
    has returned.

    Python runs handlers of signals when a function begins, when a loop goes on, and after a call.
    """

    def __init__(
        self,
        *numbers: int,
        within: tuple[str, ...] = PACKAGES,
        at_lines: bool = True,
        in_destructors: bool = False,
        act: Callable[[], object] = interrupt,
    ) -> None:
        """Raise at the first of these events, and then so many events later at the next one. `within` are the folders
        that count.

        Without `at_lines`, only calls and returns count. Between two lines without one, Python runs no handler. `act`
        is called in place of raising. What is raised with `in_destructors`, Python reports, and goes on.
        """
        self.left = list(numbers)
        self._within = within
        self._at_lines = at_lines
        self._in_destructors = in_destructors
        self._act = act

    def __enter__(self) -> RaisesAt:
        # The end of an object of another test is no place to raise.
        gc.disable()
        sys.setprofile(self._see)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys.setprofile(None)
        gc.enable()

    @property
    def is_over(self) -> bool:
        """True if all of them have come."""
        return not self.left

    def _counts(self, frame: FrameType) -> bool:
        name = frame.f_code.co_name
        is_destructor = name == "__del__" or (frame.f_back and frame.f_back.f_code.co_name == "__del__")
        return (self._in_destructors or not is_destructor) and frame.f_code.co_filename.startswith(self._within)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and self._counts(frame):
            self._count()

    def _trace(self, frame: FrameType, _: str, __: object) -> Any:
        return self._line if self._at_lines and self._counts(frame) else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if not _NO_STEPS.match(line) and _FIRST_CALL not in line:
                self._count()
        return self._line

    def _count(self) -> None:
        if self.left:
            self.left[0] -= 1
            if not self.left[0]:
                self.left.pop(0)
                self._act()


def interrupted_everywhere(
    ask: Callable[[], Any],
    check: Callable[[], Any],
    *,
    within: tuple[str, ...] = PACKAGES,
    step: int = 1,
    again: int = 0,
    at_lines: bool = True,
    in_destructors: bool = False,
    act: Callable[[], object] = interrupt,
) -> int:
    """Interrupt `ask` at one event after the other, and `check` after each. Returns the number of events.

    With `again`, a second handler raises so many events after the first one. With `step`, only each `step`th event is
    taken. The others are those of `RaisesAt`.
    """
    for number in itertools.count(1, step):
        raises = RaisesAt(
            number,
            *([again] if again else []),
            within=within,
            at_lines=at_lines,
            in_destructors=in_destructors,
            act=act,
        )
        with suppress(Interrupted):
            next(_apart(ask, raises))
        has_ended = len(raises.left) > bool(again)
        check()
        if has_ended:
            return number
    raise AssertionError


def _apart(ask: Callable[[], Any], raises: RaisesAt) -> Iterator[None]:
    """Ask, and raise, in a generator, whose exceptions are its own.

    Where a trace function raises at the first line of an `except`, CPython leaves the exception behind that was
    handled there, and every later error of the thread would have it for its context.
    """
    with raises:
        ask()
    yield
