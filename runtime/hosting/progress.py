"""A progress display for terminals: shows models and instances while they load.

Theory of operation. Listeners are called on whichever thread changes a state. One lock guards what is shown and the
terminal. While something loads, a ticker thread redraws the last line, so that its time goes on. The thread ends under
the lock when nothing loads any more, and the next load starts another one.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TextIO

from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.model.states import InstanceState, ModelState
from moonpool.runtime.process.terminal import Terminal, harmless
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.repository.cloud_copies import WATCHERS

_TICK_S = 0.1
_BAR = 20


class Progress:
    """A listener for `Runtime` that shows how models load, and instances that die and come back.

        runtime = moonpool.Runtime("models/", listener=moonpool.Progress())

    Each instance gets a line when it is ready or has failed. The last line names the instances that are still
    starting. With `is_brief`, only instances that failed get lines. If the stream (stderr by default) is no terminal,
    nothing is shown. Thread-safe. Errors in writing are ignored: no model fails because of them.
    """

    def __init__(self, stream: TextIO | None = None, *, is_brief: bool = False) -> None:
        self._terminal = Terminal(sys.stderr if stream is None else stream)
        self._is_brief = is_brief
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # Models that load and instances that start, each with the time at which that began.
        self._models: dict[str, float] = {}
        self._instances: dict[str, float] = {}
        self._status = ""
        self._ticker: threading.Thread | None = None
        # Models that are copied from afar: the bytes that are there, and all bytes.
        self._copies: dict[str, tuple[int, int]] = {}
        WATCHERS.add(self)

    def copying(self, what: str, copied_bytes: int, all_bytes: int) -> None:
        """Show how far the copy of a model is. At its end, both numbers are 0."""
        if not self._terminal.is_terminal:
            return
        with self._lock, contextlib.suppress(OSError, ValueError):
            if all_bytes:
                self._copies[what] = copied_bytes, all_bytes
            else:
                self._copies.pop(what, None)
            self._draw()

    def __call__(self, subject: str, state: str, because: str) -> None:
        """Show that `subject` is in `state` now, `because` of this."""
        if not self._terminal.is_terminal:
            return
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._take(subject, state, because)
            self._draw()
            if self._waiting() and self._ticker is None:
                self._begin_ticks()
            self._changed.notify_all()

    def _begin_ticks(self) -> None:
        """Draw the time of a start while it passes. Without a thread for that, each change still is drawn."""
        ticker = threading.Thread(target=self._tick, name="moonpool-progress", daemon=True)
        with contextlib.suppress(OutOfThreads):
            start_thread(ticker)
            self._ticker = ticker

    def say(self, text: str) -> None:
        """Write lines that stay, above the one that changes, also if the stream is no terminal."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._say(text)
            self._draw()

    def _take(self, subject: str, state: str, because: str) -> None:
        now_s = time.monotonic()
        if state == ModelState.LOADING:
            self._models[subject] = now_s
        elif state == InstanceState.STARTING:
            self._instances[subject] = now_s
        elif subject in self._models:
            del self._models[subject]
        elif state == InstanceState.READY:
            took_s = now_s - self._instances.pop(subject, now_s)
            if not self._is_brief:
                self._say(f"{subject} {self._terminal.paint('ready', 'green')} {took_s:.1f} s")
        elif state in (InstanceState.FAILED, InstanceState.BACKING_OFF):
            self._instances.pop(subject, None)
            word = "failed" if state == InstanceState.FAILED else "lost"
            reason = harmless(because.partition("\n")[0])
            self._say(f"{subject} {self._terminal.paint(word, 'red')} {reason}")
        elif state != InstanceState.DRAINING:
            self._instances.pop(subject, None)

    def _waiting(self) -> str:
        """Return the last line: the model that is copied, the instances that start, or the models that have none
        yet.
        """
        if self._copies:
            return self._bar(*next(iter(self._copies.items())))
        if not (self._instances or self._models):
            return ""
        word = "starting" if self._instances else "loading"
        since = self._instances or self._models
        took_s = time.monotonic() - min(since.values())
        end = f" {word}… {took_s:.1f} s"
        names = harmless(", ".join(since))
        # A line that wraps cannot be replaced.
        room = self._terminal.width - len(end) - 1
        if len(names) > room:
            names = names[: max(0, room - 1)] + "…"
        return names + end

    def _bar(self, what: str, sizes: tuple[int, int]) -> str:
        copied_bytes, all_bytes = sizes
        full = min(_BAR, _BAR * copied_bytes // all_bytes)
        end = f" [{'#' * full}{'.' * (_BAR - full)}] {copied_bytes / 1e6:,.1f} of {all_bytes / 1e6:,.1f} MB"
        return harmless(what)[: max(0, self._terminal.width - len(end) - 1)] + end

    def _say(self, text: str) -> None:
        if self._status:
            self._terminal.replace_line("")
            self._status = ""
        self._terminal.line(text)

    def _draw(self) -> None:
        status = self._waiting()
        if status != self._status:
            self._terminal.replace_line(status)
            self._status = status

    def _tick(self) -> None:
        """Redraw the last line as long as something loads, as it shows the time."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            while self._waiting():
                self._draw()
                self._changed.wait(_TICK_S)
            self._draw()
            self._ticker = None
