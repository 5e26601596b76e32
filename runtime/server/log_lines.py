"""The log of a server: one line a message, in Triton's form or as JSON, on stderr or in a file."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from moonpool.runtime.output import harmless, harmless_json, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

    from moonpool.runtime.progress import Progress

FORMATS = ("default", "ISO8601", "json")
_LETTERS = {"DEBUG": "I", "INFO": "I", "WARNING": "W", "ERROR": "E", "CRITICAL": "F"}


@dataclass(frozen=True)
class LogOptions:
    """What is logged, where and how; the names are those of Triton's logging extension."""

    log_file: str = ""
    """A path; empty for stderr."""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    """From 1 on, verbose messages are logged."""
    log_format: str = "default"
    """One of `FORMATS`."""


class ServerLog(logging.Handler):
    """All that moonpool and its models log and print. Thread-safe.

    A line is `I1121 14:45:39.210248 4680 file.py:31] text`, as Triton writes it, in UTC and with the process's id;
    or with an ISO 8601 time; or a JSON object. A message is one line whatever is in it, but for
    tables of the server's own.
    """

    def __init__(
        self,
        options: LogOptions | None = None,
        stream: TextIO | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`stream` is stderr unless given; `progress` shows the lines where it has the terminal.

        Raises `OSError` where the file cannot be written.
        """
        super().__init__()
        self._stream = sys.stderr if stream is None else stream
        self._progress = progress
        self._fd: int | None = None
        self._changing = threading.Lock()
        self._writing = threading.Lock()
        self.options = LogOptions()
        self.change(options or LogOptions())

    def change(self, options: LogOptions) -> None:
        """From now on, log like this. Raises `OSError` where the file cannot be written; nothing changes then."""
        with self._changing:
            before = self._fd
            if options.log_file != self.options.log_file:
                opened = None
                if options.log_file:
                    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                    opened = os.open(options.log_file, flags, 0o644)
                with self._writing:
                    self._fd = opened
                if before is not None:
                    os.close(before)
            self.options = options
            log = logging.getLogger("moonpool")
            # `logged` puts the level back, so it is changed in there only.
            if self in log.handlers:
                log.setLevel(logging.DEBUG if options.log_verbose_level > 0 else logging.INFO)

    def update(self, **changes: str | bool | int) -> LogOptions:
        """As `change`, with these fields anew; returns all of them."""
        self.change(replace(self.options, **changes))  # type: ignore[arg-type]
        return self.options

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, if it is wanted."""
        if not self._wants(record.levelno):
            return
        try:
            text = self._line(record)
        except Exception:  # whoever logs wrongly is not to fail for it
            self.handleError(record)
            return
        # A disk that is full, or a reader that has gone, is no reason to end a server.
        with contextlib.suppress(OSError, ValueError), self._writing:
            if self._fd is not None:
                os.write(self._fd, f"{text}\n".encode("utf-8", "replace"))
            elif self._progress is not None:
                self._progress.say(text)
            else:
                print(text, file=self._stream, flush=True)

    def _wants(self, level: int) -> bool:
        options = self.options
        if level >= logging.ERROR:
            return options.log_error
        if level >= logging.WARNING:
            return options.log_warning
        if level >= logging.INFO:
            return options.log_info
        return options.log_verbose_level > 0

    def _line(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        time = datetime.fromtimestamp(record.created, UTC)
        place = f"{record.filename}:{record.lineno}"
        if self.options.log_format == "json":
            shown: dict[str, str | int] = {
                "time": time.isoformat(timespec="microseconds").replace("+00:00", "Z"),
                "level": record.levelname.lower(),
                "pid": os.getpid(),
                "place": place,
                "logger": record.name,
                "text": text,
            }
            return harmless_json(json.dumps(shown, ensure_ascii=False))
        letter = _LETTERS.get(record.levelname, "I")
        if self.options.log_format == "ISO8601":
            head = f"{time:%Y-%m-%dT%H:%M:%SZ} {letter}"
        else:
            head = f"{letter}{time:%m%d %H:%M:%S.%f}"
        if getattr(record, "is_table", False):
            text = "\n" + "\n".join(harmless(line) for line in text.split("\n")) + "\n"
        else:
            text = one_line(text)
        return f"{head} {os.getpid()} {place}] {text}"

    def close(self) -> None:
        """Close the file."""
        with self._changing, self._writing:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
        super().close()


@contextlib.contextmanager
def logged(log: ServerLog) -> Iterator[ServerLog]:
    """Inside, moonpool's log goes there and nowhere else, and so do warnings of libraries; closed at the end."""
    ours, libraries = logging.getLogger("moonpool"), logging.getLogger()
    before = ours.level, ours.propagate
    ours.propagate = False
    ours.addHandler(log)
    libraries.addHandler(log)
    try:
        log.change(log.options)
        yield log
    finally:
        ours.removeHandler(log)
        libraries.removeHandler(log)
        # Loggers below keep in mind what the level was until it is set again.
        ours.setLevel(before[0])
        ours.propagate = before[1]
        log.close()
