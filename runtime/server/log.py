"""The log of a server: its lines, in Triton's form or as JSON, and its settings, which clients change by Triton's
logging extension.

Theory of operation. Any thread logs, and any thread may change the settings. `_writing` keeps lines whole, and keeps
the descriptor of the log file open while a line is written to it. `_changing` makes a change of the settings one step:
the new file is opened first, then it takes the place of the old one under `_writing`, and only then is the old one
closed. `_changing` is always taken before `_writing`, and no line is written with `_changing` held. A handler of
Python's has a lock besides, for which `logging` waits at the end of the program. There is none here, as a write may be
stuck for ever if nobody reads what the server logs, and neither `close` nor the end of the server may wait for that.
`LogControl` has a lock of its own, so that the server's log and the models' loggers, which are changed one after the
other, end with the same settings when two clients change them at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, TextIO

from moonpool.runtime.hosting.progress import Progress
from moonpool.runtime.log import END_S, flush
from moonpool.runtime.observe.log_settings import LogSettings
from moonpool.runtime.process.terminal import harmless, harmless_json, one_line
from moonpool.runtime.server.setting_values import BadSetting, boolean, text, unsigned

FORMATS = ("default", "ISO8601", "json")
_LETTERS = {"DEBUG": "I", "INFO": "I", "WARNING": "W", "ERROR": "E", "CRITICAL": "F"}


@dataclass(frozen=True)
class LogOptions:
    """The settings of the log, by their names in Triton's logging extension."""

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
    """Writes the lines of moonpool and of its models. Thread-safe.

    A line is `I1121 14:45:39.210248 4680 file.py:31] text`, as Triton writes it, in UTC and with the process's id; or
    with an ISO 8601 time; or a JSON object. Every message is one line, whatever it contains. Only tables of the server
    itself have several.
    """

    def __init__(
        self, options: LogOptions | None = None, stream: TextIO | None = None, progress: Progress | None = None
    ) -> None:
        """Open the log. `stream` is stderr by default. With `progress`, which draws on the terminal, lines are written
        above it.

        Raises `OSError` if the file cannot be opened.
        """
        super().__init__()
        self._stream = sys.stderr if stream is None else stream
        self._progress = progress
        self._fd: int | None = None
        self._changing = threading.Lock()
        self._writing = threading.Lock()
        self.options = LogOptions()
        self.change(options or LogOptions())

    def createLock(self) -> None:  # noqa: N802 - Python's name
        """Make no lock."""
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a record that no filter takes out. From Python 3.13 on, the method of the base class needs the lock."""
        found: Any = self.filter(record)
        if found:
            self.emit(found if isinstance(found, logging.LogRecord) else record)
        return bool(found)

    def change(self, options: LogOptions) -> None:
        """Replace the settings. Raises `OSError` if the file cannot be opened, and then nothing changes."""
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
            # `logged` restores the level, so it is set only inside of it.
            if self in log.handlers:
                log.setLevel(logging.DEBUG if options.log_verbose_level > 0 else logging.INFO)

    def update(self, **changes: str | bool | int) -> LogOptions:
        """Change some settings, and return all of them. Raises as `change`."""
        self.change(replace(self.options, **changes))  # type: ignore[arg-type]
        return self.options

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as a line, if its level is logged."""
        if not self._wants(record.levelno):
            return
        try:
            text = self._line(record)
        except Exception:  # a malformed record must not fail the code that logs it
            self.handleError(record)
            return
        # A full disk or a reader that is gone must not end the server.
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
        with self._changing:
            if self._writing.acquire(timeout=END_S):
                try:
                    if self._fd is not None:
                        os.close(self._fd)
                        self._fd = None
                finally:
                    self._writing.release()
        super().close()


@contextlib.contextmanager
def logged(log: ServerLog) -> Iterator[ServerLog]:
    """Send moonpool's log to `log` and nowhere else, and warnings of libraries too, while inside. Closes `log` at the
    end.
    """
    ours, libraries = logging.getLogger("moonpool"), logging.getLogger()
    before = ours.level, ours.propagate
    ours.propagate = False
    ours.addHandler(log)
    libraries.addHandler(log)
    try:
        log.change(log.options)
        yield log
    finally:
        flush()
        ours.removeHandler(log)
        libraries.removeHandler(log)
        # Loggers below cache the level until it is set again.
        ours.setLevel(before[0])
        ours.propagate = before[1]
        log.close()


_BOOLEANS = ("log_info", "log_warning", "log_error")
_MOST_VERBOSE = 2**32 - 1


class LogControl:
    """The settings of the server's log and of the loggers of models. Any thread may call any method."""

    def __init__(
        self, change_models: Callable[[Mapping[str, object]], LogSettings], log: ServerLog | None = None
    ) -> None:
        """`change_models` is `Stubs.change_log`. Without a `log`, only the loggers of models have settings."""
        self._change_models = change_models
        self._log = log
        self._lock = threading.Lock()

    def settings(self, changes: Mapping[str, object] | None = None) -> dict[str, str | bool | int]:
        """Apply changes, and return all settings in the protocol's JSON form.

        As in Triton, None and unknown names change nothing. Raises `BadSetting`, and then nothing is changed.
        """
        checked = _checked(changes or {})
        with self._lock:
            if checked and self._log is not None:
                self._log.update(**checked)
            of_models = {name: value for name, value in checked.items() if name != "log_format"}
            said = self._change_models(of_models).as_dict()
        shown: dict[str, str | bool | int] = {"log_file": "", **said, "log_format": "default"}
        if self._log is not None:
            shown |= asdict(self._log.options)
        return shown


def _checked(changes: Mapping[str, object]) -> dict[str, str | bool | int]:
    checked: dict[str, str | bool | int] = {}
    for name, value in changes.items():
        if value is None:
            continue
        if name in _BOOLEANS:
            checked[name] = boolean(value)
        elif name == "log_verbose_level":
            checked[name] = min(unsigned(value), _MOST_VERBOSE)
        elif name == "log_format":
            checked[name] = text(value)
            if value not in FORMATS:
                raise BadSetting(f"invalid argument for --log_format, got: {value!s:.80}", "UNAVAILABLE")
        elif name == "log_file":
            raise BadSetting("log file location can not be updated through network protocol", "UNSUPPORTED")
    return checked


def check_parameters(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the changes of a gRPC request, by name. A value that the message leaves open is None.

    Raises `BadSetting` with the texts of Triton's gRPC frontend.
    """
    for name, value in settings.items():
        if name in _BOOLEANS and not isinstance(value, bool):
            raise BadSetting(f"expect boolean for '{name}'")
        if name == "log_verbose_level" and type(value) is not int:
            raise BadSetting(f"expect int32 for '{name}'")
        if name == "log_format":
            if not isinstance(value, str):
                raise BadSetting(f"expect string for '{name}'")
            if value not in FORMATS:
                raise BadSetting(f"invalid argument for {name}, got: {value:.80}")
    return dict(settings)
