"""Delivers the log messages of a model, from Triton's `Logger` and from Python's `logging`."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Callable, Optional

from moonpool.ipc.messages import Kind, beginning, end
from moonpool.stub.pb_utils.errors import Constant

if TYPE_CHECKING:
    import logging

# Gets level (as in LogLevel), message, file and line, from any thread of the model.
Sink = Callable[[int, str, str, int], None]

# The message of a log line and the name of its file are cut to these, so that both fit into a packet.
_LOGGED_BYTES, _FILE_BYTES = 8192, 1024

INFO = 0
WARNING = 1
ERROR = 2
VERBOSE = 3


class LogLevel(Constant):
    """Lists Triton's levels. Verbose messages are dropped unless the runtime wants them."""

    __module__ = "c_python_backend_utils"

    INFO = INFO
    WARNING = WARNING
    ERROR = ERROR
    VERBOSE = VERBOSE


# For annotations in Logger, where the name is an attribute.
_Level = LogLevel


class _Route:
    """Holds where messages go. There is one for the process, which has one model."""

    sink: Optional[Sink] = None  # noqa: UP045 - evaluated at run time
    # False in a process that logs what the sink gets: it would come back here.
    adopts_logging: bool = True
    # By level.
    is_wanted: tuple[bool, bool, bool, bool] = (True, True, True, False)


def set_sink(sink: Sink | None, *, adopts_logging: bool = True) -> None:
    """Send all further messages to `sink`, or to stderr if it is None. Without `adopts_logging`, Python's logging stays
    as it is.
    """
    _Route.sink = sink
    _Route.adopts_logging = adopts_logging


def set_levels(info: bool, warning: bool, error: bool, verbose: bool) -> None:
    """Set which messages are delivered from now on. Others cost only the call."""
    _Route.is_wanted = (info, warning, error, verbose)


class Logger:
    """Is Triton's logger. All methods are static, and any thread may call them."""

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
        raise TypeError(f"log(): incompatible function arguments. message must be a str, not {type(message)}")
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
    # The model may have replaced or closed `sys.stderr`, and a log line must not fail for that.
    stream = sys.__stderr__
    if stream is not None and not stream.closed:
        stream.write(f"{letter}{stamp} {os.getpid()} {os.path.basename(file)}:{line}] {message}\n")
        stream.flush()


def log_message(level: int, message: str, file: str, line: int) -> tuple[int, int, str, str, int]:
    """Return the message LOG for a log line, cut to what fits into a packet."""
    return int(Kind.LOG), level, beginning(message, _LOGGED_BYTES), end(file, _FILE_BYTES), line


def logging_handler() -> logging.Handler:
    """Return a handler that delivers records of Python's `logging` like messages of `Logger`.

    DEBUG records become verbose messages. The handler never raises. The caller adds it to a logger.
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
    """Give Python's root logger a handler if the model uses `logging` and has not configured it.

    Returns whether it did. Handlers that the model has set up stay as they are.
    """
    logging = sys.modules.get("logging")
    if logging is None or logging.root.handlers or not _Route.adopts_logging:
        return False
    logging.root.addHandler(logging_handler())
    return True
