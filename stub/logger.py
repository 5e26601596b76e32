"""What a model says on purpose, through Triton's `Logger` or through Python's `logging`."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Callable, Optional

from moonpool.stub.constants import Constant

if TYPE_CHECKING:
    import logging

# Called with level (as in LogLevel), message, file and line, from any thread of the model.
Sink = Callable[[int, str, str, int], None]

INFO = 0
WARNING = 1
ERROR = 2
VERBOSE = 3


class LogLevel(Constant):
    """Triton's levels. Verbose messages are dropped unless they were asked for."""

    __module__ = "c_python_backend_utils"

    INFO = INFO
    WARNING = WARNING
    ERROR = ERROR
    VERBOSE = VERBOSE


# For annotations in Logger, where the name is an attribute.
_Level = LogLevel


class _Route:
    """Where messages go at present; one for the process, as a process has one model."""

    sink: Optional[Sink] = None  # noqa: UP045 - evaluated at run time
    # By level.
    is_wanted: tuple[bool, bool, bool, bool] = (True, True, True, False)


def set_sink(sink: Sink | None) -> None:
    """Sends all further messages to `sink`, or to stderr again where it is None."""
    _Route.sink = sink


def set_levels(info: bool, warning: bool, error: bool, verbose: bool) -> None:
    """Which messages are delivered from now on. Others cost nothing but the call."""
    _Route.is_wanted = (info, warning, error, verbose)


class Logger:
    """Triton's logger. All methods are static and may be called from any thread."""

    __module__ = "c_python_backend_utils"

    LogLevel = LogLevel
    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: _Level = LogLevel.INFO) -> None:
        if not isinstance(level, LogLevel):
            raise TypeError(
                "log(): incompatible function arguments. level must be one of Logger.INFO, "
                f"WARNING, ERROR and VERBOSE, not {type(level)}"
            )
        _log(message, level.value)

    @staticmethod
    def log_info(message: str) -> None:
        _log(message, INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        _log(message, WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        _log(message, ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        _log(message, VERBOSE)


def _log(message: object, level: int) -> None:
    if not isinstance(message, (str, bytes)):
        raise TypeError(
            f"log(): incompatible function arguments. message must be a str, not {type(message)}"
        )
    if not _Route.is_wanted[level]:
        return
    if isinstance(message, bytes):
        message = message.decode("utf-8", "backslashreplace")
    caller = sys._getframe(2)
    _deliver(level, str(message), caller.f_code.co_filename, caller.f_lineno)


def _deliver(level: int, message: str, file: str, line: int) -> None:
    sink = _Route.sink
    if sink is not None:
        sink(level, message, file, line)
        return
    letter = "IWEI"[level]
    now = time.time()
    stamp = time.strftime("%m%d %H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1e6):06d}"
    # The model may have replaced or closed sys.stderr; a log line is not worth its failure.
    stream = sys.__stderr__
    if stream is not None and not stream.closed:
        stream.write(f"{letter}{stamp} {os.getpid()} {os.path.basename(file)}:{line}] {message}\n")
        stream.flush()


def logging_handler() -> logging.Handler:
    """A handler that delivers the records of Python's `logging` to where Logger's messages go.

    DEBUG records are verbose messages. It does not raise. The caller adds it to a logger.
    """
    import logging  # Slow to import, and many models do without it.

    class Forwarder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            level = _level_of(record)
            if not _Route.is_wanted[level]:
                return
            try:
                _deliver(level, self.format(record), record.pathname, record.lineno)
            except Exception:
                self.handleError(record)

    handler = Forwarder()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    return handler


def _level_of(record: logging.LogRecord) -> int:
    # 40, 30 and 20 are logging.ERROR, WARNING and INFO.
    if record.levelno >= 40:
        return ERROR
    if record.levelno >= 30:
        return WARNING
    return INFO if record.levelno >= 20 else VERBOSE


def adopt_logging() -> bool:
    """Routes Python's root logger here if the model uses `logging` and left it unconfigured.

    Returns whether it did. A model that set up handlers of its own keeps them as they are.
    """
    logging = sys.modules.get("logging")
    if logging is None or logging.root.handlers:
        return False
    logging.root.addHandler(logging_handler())
    return True
