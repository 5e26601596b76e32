"""Writes the output of stubs into the runtime's log, or prints it: whole lines, marked, harmless to a terminal,
rate-limited.

Theory of operation. The reactor's thread reads the output of stubs (`StubOutput`). It must never wait until somebody
reads the output of this program. A program that keeps a log gets the lines there (`runtime/log.py`). For any other,
`Printer` has them written by an outlet as well. The end of a runtime waits for the lines (`wait`), but not for ever: a
program ends even if nobody reads its output.

A notebook shows output below the cell in whose context it is written. IPython calls back when a cell begins and ends,
on the thread that runs it. At the beginning its context is kept, and `_write` runs in it. At the end, all output of
models until then is read and written, so that none of it stands below the next cell. Output between two cells goes to
the earlier one.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from moonpool.runtime.log import END_S, Outlet, RuntimeLog
from moonpool.runtime.model.budgets import LOG_LINE_BYTES
from moonpool.runtime.process.terminal import harmless

_log = RuntimeLog("moonpool.stub")
_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)
# Marks the record of a line that a model logged on purpose.
LOGGED = {"is_logged": True}
_READ_BYTES = 1 << 16
# The longest line that a model may log on purpose. A long one counts as several.
_LOGGED_CHARACTERS = 8 * LOG_LINE_BYTES
_CUT = " … (cut)"
_TAIL_LINES = 40
# A frame in the stacks that Python writes when a signal ends it. The last words of a library stand before all of them.
_FRAME = re.compile(rb'  File ".*", line \d+ in ')
_FRAMES = 1000
# The bytes that a stub may print in a second before it has to wait, left out or not. A line counts as so many bytes
# more.
_BYTES_PER_S = 64 << 20
_BYTES_FOR_A_LINE = 128
# A pipe holds no more than one or two reads.
_DRAIN_READS = 64


def _shown(line: bytes) -> str:
    return harmless(line.decode("utf-8", "backslashreplace").rstrip("\r"))


class Budget:
    """Counts lines against a limit: so many a second, saved up for one second at most."""

    def __init__(self, lines_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.lines_per_s = lines_per_s
        self._clock = clock
        self._left = float(lines_per_s)
        self._at = clock()
        self.dropped = 0

    def spend(self, lines: int = 1) -> bool:
        """Return True if one more line may be logged, which counts as `lines`. Otherwise count it as dropped."""
        now = self._clock()
        self._left = min(self.lines_per_s, self._left + (now - self._at) * self.lines_per_s)
        self._at = now
        if self._left < 1:
            self.dropped += 1
            return False
        # A long line may take more than is left. Later lines wait for that.
        self._left -= lines
        return True


class StubOutput:
    """The read end of a stub's output. For the reactor's thread, except `tail`."""

    def __init__(
        self,
        instance: str,
        fd: int,
        lines_per_s: int,
        printer: Printer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Own `fd`. Lines that are not logged go to `printer`, by default that of the standard output."""
        os.set_blocking(fd, False)
        self.fd = fd
        self._instance = instance
        self._printer = printer or PRINTER
        self._budget = Budget(lines_per_s, clock)
        self._pace = Budget(_BYTES_PER_S, clock)
        # True if the stub has printed more than `_BYTES_PER_S`. Then its output should not be read for a moment.
        self.is_ahead = False
        self._rest = b""
        self._seen = 0
        # The last lines, also those over the budget: they often tell why a stub died.
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)

    def ready(self) -> bool:
        """Log what has come. Returns False at the end of the output."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            self.flush()
            return False
        self._seen += len(data)
        self.is_ahead = not self._pace.spend(len(data) + _BYTES_FOR_A_LINE * data.count(b"\n"))
        lines, end, self._rest = (self._rest + data).rpartition(b"\n")
        if end:
            self._print(lines)
        if len(self._rest) > LOG_LINE_BYTES:
            self._print(self._rest)
            self._rest = b""
        return True

    def catch_up(self) -> None:
        """Log the lines that the stub has written so far. Ends even if the stub goes on writing."""
        for _ in range(_DRAIN_READS):
            seen = self._seen
            if self.fd < 0:
                return
            if not self.ready() or seen == self._seen:
                break

    def drain(self) -> None:
        """Log all that has come, also a line without an end."""
        self.catch_up()
        if self.fd >= 0:
            self.flush()

    def log(self, level: int, message: str, file: str, line: int) -> None:
        """Log a message that the model logged on purpose. `level` is as in LOG."""
        where = f" ({os.path.basename(harmless(file))}:{line})" if line else ""
        lines = message.rstrip("\n").split("\n")
        for number, part in enumerate(lines):
            text = part if len(part) <= _LOGGED_CHARACTERS else part[:_LOGGED_CHARACTERS] + _CUT
            if not self._allowed(1 + len(text) // LOG_LINE_BYTES):
                self._budget.dropped += len(lines) - number - 1
                return
            line_of_log = "[%s] %s%s", self._instance, harmless(text), where
            _log.log(_LEVELS[level], *line_of_log, extra=LOGGED)

    def _print(self, lines: bytes) -> None:
        """Log lines. The last one comes without its end of line."""
        most = _TAIL_LINES + _FRAMES
        last = [line[:LOG_LINE_BYTES] for line in lines.rsplit(b"\n", most)[-most:]]
        self._tail.extend(line for line in last if not _FRAME.match(line))
        start = end = 0
        while end >= 0:
            # Lines over the budget must cost nothing: every byte in the pipe may be a line.
            if not self._allowed():
                self._budget.dropped += lines.count(b"\n", start)
                return
            end = lines.find(b"\n", start)
            line = lines[start : end if end >= 0 else None]
            start = end + 1
            cut = _CUT if len(line) > LOG_LINE_BYTES else ""
            self._say(logging.INFO, _shown(line[:LOG_LINE_BYTES]) + cut)

    def _say(self, level: int, text: str) -> None:
        """Log a line, or print it if the program keeps no log."""
        if are_logged():
            _log.log(level, "[%s] %s", self._instance, text)
        else:
            self._printer.say(f"[{self._instance}] {text}")

    def _allowed(self, lines: int = 1) -> bool:
        if not self._budget.spend(lines):
            return False
        self._log_dropped()
        return True

    def _log_dropped(self) -> None:
        if self._budget.dropped:
            text = (
                f"{self._budget.dropped} lines were left out: too many a second "
                f"(MOONPOOL_LOG_LINES_PER_S is {self._budget.lines_per_s})"
            )
            self._say(logging.WARNING, text)
            self._budget.dropped = 0

    def flush(self) -> None:
        """Log a line that has no end yet, and the number of lines that were left out."""
        if self._rest:
            self._print(self._rest)
            self._rest = b""
        self._log_dropped()

    def tail(self) -> list[str]:
        """Return the last lines, for the text about the end of a stub."""
        return [_shown(line) for line in list(self._tail)]

    def close(self) -> None:
        """Close the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


_OURS = (_log.logger, RuntimeLog("moonpool").logger)
# Lines that wait to be written, each of at most some kilobytes.
_MOST_WAITING = 4096


def are_logged() -> bool:
    """Return True if lines of models go to a log: the program has one for this level, or has set up a logger of
    moonpool's.

    `logging.basicConfig()` alone takes no lines of this level, so it does not count.
    """
    if any(logger.level != logging.NOTSET or logger.handlers for logger in _OURS):
        return True
    return _log.logger.hasHandlers() and _log.is_enabled(logging.INFO)


class Printer:
    """Writes lines to `sys.stdout` or `sys.stderr`, as it is at that moment. Any thread may call any method."""

    def __init__(self, stream: str = "stdout") -> None:
        self._stream = stream
        self._outlet: Outlet[str] = Outlet("moonpool-prints", self._write, _MOST_WAITING)
        # Replaced, and never changed. So the thread of the outlet sees one or the other.
        self._context = contextvars.Context()
        self._reads: Callable[[], object] | None = None

    def forget(self) -> None:
        """Start empty, in a fork."""
        self._outlet.forget()
        self._context = contextvars.Context()
        self._reads = None

    def say(self, line: str) -> None:
        """Write a line soon. Does not block."""
        self._outlet.put(line)

    def wait(self, timeout_s: float = END_S) -> None:
        """Return when all is written, or after so long. Writes the lines itself if no thread can be started."""
        self._outlet.flush(timeout_s)

    def _write(self, lines: list[str], dropped: int) -> None:
        if dropped:
            lines.append(f"{dropped} lines of models were dropped: this output is not being read")
        # The cell itself may run in its context, and no context can be entered twice. A copy leads to the same cell.
        self._context.copy().run(_write, self._stream, "".join(f"{line}\n" for line in lines))

    def follow_cells(self, read: Callable[[], object]) -> None:
        """Write lines below the cell that runs, if this is IPython. `read` reads the output of models until now.

        To be called by the thread that runs a cell.
        """
        shell = _shell()
        if shell is None:
            return
        self._begin_cell()
        if self._reads is None:
            shell.events.register("pre_run_cell", self._begin_cell)
            shell.events.register("post_run_cell", self._end_cell)
        self._reads = read

    def _begin_cell(self, *_: object) -> None:
        self._context = contextvars.copy_context()

    def _end_cell(self, *_: object) -> None:
        if self._reads is not None:
            self._reads()
        self.wait()


def _write(name: str, text: str) -> None:
    stream = getattr(sys, name)
    if stream is None:
        return
    # The stream may be closed, have no reader, or be an object of the program's that raises anything.
    with contextlib.suppress(Exception, SystemExit):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def _shell() -> Any:
    """Return the shell of IPython that this process is, None in any other."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


PRINTER, ERRORS = Printer(), Printer("stderr")
for _each in (PRINTER, ERRORS):
    os.register_at_fork(after_in_child=_each.forget)
    atexit.register(_each.wait)
