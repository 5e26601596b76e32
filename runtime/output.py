"""What a stub prints, as log lines of the runtime: whole, marked with the instance, harmless, not too many."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from typing import TYPE_CHECKING

from moonpool.runtime.budgets import LOG_LINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("moonpool.stub")
_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)
# Of the record of what a model logged on purpose.
LOGGED = {"is_logged": True}
_READ_BYTES = 1 << 16
# Of a line that the model logs on purpose, which counts as several if it is long.
_LOGGED_CHARACTERS = 8 * LOG_LINE_BYTES
_CUT = " … (cut)"
_TAIL_LINES = 40
# What a stub may print in a second before it has to wait, also of what is left out. A line takes as long as so many bytes.
_BYTES_PER_S = 64 << 20
_BYTES_FOR_A_LINE = 128
# A pipe holds no more than one or two reads.
_DRAIN_READS = 64
# Other than newline and tab; a terminal obeys some of them.
_CONTROL = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)] if code != 9}
# What begins a line, or turns the direction of one around, so that it reads as something else.
_DIRECTIONS = [0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x2070)]
_CONTROL |= {code: f"\\u{code:04x}" for code in _DIRECTIONS}
# Also for the library in tritonserver, which has no Python.
SHOWN_CODES = tuple(sorted(_CONTROL))
_IN_JSON = {code: f"\\u{code:04x}" for code in _CONTROL}


def harmless(text: str) -> str:
    """The text with control characters shown rather than obeyed."""
    return text.translate(_CONTROL)


def one_line(text: str) -> str:
    """Return the text as one line of a log: harmless, and with its newlines shown as well."""
    return harmless(text.rstrip("\n").replace("\n", "\\n"))


def harmless_json(text: str) -> str:
    """Escape the same characters in the text of a JSON value, which stays the same value."""
    return text.translate(_IN_JSON)


def _shown(line: bytes) -> str:
    return harmless(line.decode("utf-8", "backslashreplace").rstrip("\r"))


class Budget:
    """How many lines may be logged: so many a second, saved up for one second at most."""

    def __init__(self, lines_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.lines_per_s = lines_per_s
        self._clock = clock
        self._left = float(lines_per_s)
        self._at = clock()
        self.dropped = 0

    def spend(self, lines: int = 1) -> bool:
        """Whether one more may be logged, which counts as so many; counts those that may not."""
        now = self._clock()
        self._left = min(self.lines_per_s, self._left + (now - self._at) * self.lines_per_s)
        self._at = now
        if self._left < 1:
            self.dropped += 1
            return False
        # A long one is paid for by those that come after it.
        self._left -= lines
        return True


class Output:
    """The read end of a stub's output. For the reactor's thread, but for `tail`."""

    def __init__(self, instance: str, fd: int, lines_per_s: int) -> None:
        """Own `fd` from now on."""
        os.set_blocking(fd, False)
        self.fd = fd
        self._instance = instance
        self._budget = Budget(lines_per_s)
        self._pace = Budget(_BYTES_PER_S)
        # Whether it has printed more than that: the next `ready` is to be a little later.
        self.is_ahead = False
        self._rest = b""
        self._seen = 0
        # Of all lines, also those over the budget: how a stub died is said in its last ones.
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)

    def ready(self) -> bool:
        """Log what is there; False at the end of the output."""
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

    def drain(self) -> None:
        """Log all that is there now, but not for ever where somebody goes on writing."""
        for _ in range(_DRAIN_READS):
            seen = self._seen
            if self.fd < 0:
                return
            if not self.ready() or seen == self._seen:
                break
        self.flush()

    def log(self, level: int, message: str, file: str, line: int) -> None:
        """What the model logged on purpose; `level` is as in LOG."""
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
        """Log lines, of which the last one has lost its end."""
        last = lines.rsplit(b"\n", _TAIL_LINES)[-_TAIL_LINES:]
        self._tail.extend(line[:LOG_LINE_BYTES] for line in last)
        start = end = 0
        while end >= 0:
            # What is left out must cost nothing: a pipe holds a line in every byte.
            if not self._allowed():
                self._budget.dropped += lines.count(b"\n", start)
                return
            end = lines.find(b"\n", start)
            line = lines[start : end if end >= 0 else None]
            start = end + 1
            cut = _CUT if len(line) > LOG_LINE_BYTES else ""
            _log.info("[%s] %s%s", self._instance, _shown(line[:LOG_LINE_BYTES]), cut)

    def _allowed(self, lines: int = 1) -> bool:
        if not self._budget.spend(lines):
            return False
        self._tell_dropped()
        return True

    def _tell_dropped(self) -> None:
        if self._budget.dropped:
            _log.warning(
                "[%s] %d lines were left out: too many a second (MOONPOOL_LOG_LINES_PER_S is %d)",
                self._instance,
                self._budget.dropped,
                self._budget.lines_per_s,
            )
            self._budget.dropped = 0

    def flush(self) -> None:
        """Log what has no end of line yet, and how much was left out."""
        if self._rest:
            self._print(self._rest)
            self._rest = b""
        self._tell_dropped()

    def tail(self) -> list[str]:
        """The last lines, for explaining why a stub did not start."""
        return [_shown(line) for line in list(self._tail)]

    def close(self) -> None:
        """Close the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
