"""The runtime's log. Its records go to the program's handlers on a thread of their own, so no other thread of the
runtime waits for them.

Python's `logging` runs handlers, filters and formatters of the embedding program on the thread that logs, and takes
their locks. They may raise anything, and block for as long as nobody reads a pipe. The reactor serves all models, a
thread that drives a batch serves all callers in it, and a recovery is the only one that its instance gets. So no
thread of the runtime may run them, except one that does nothing else.

Theory of operation. `RuntimeLog` makes a record where it is logged, with its time, thread and place, and puts it into
an `Outlet`: a queue, and a thread that takes items out of it. The record is finished, which may run the program's
factory of records, and handled on that thread. Thus the records of one thread stay in order. Whether a level is
enabled is looked up without `Logger.isEnabledFor`, which may take the lock that the program holds while it sets up its
logging.

The thread begins with the first item and stays. It is started bare: this is one step, so that no signal handler can
raise half-way, and nobody waits for its beginning. If the kernel refuses it, items stay in the queue until the next
one comes, or until `flush` writes them itself. `_turn` belongs to the thread that writes, so items are written in
order even if two threads were started at the same moment; the second one ends.

The queue is a SimpleQueue: an item is put, and the thread woken, in one step, in any thread, also in a signal handler
that interrupts another `put`. The arguments of a record are put into its text on that thread, too: they must not
change. The queue is bounded. Items beyond that are counted and dropped, and the count is reported behind those that
were there before. `flush` puts a mark behind all items and waits until the thread comes to it, but not for ever. It is
called when a runtime is closed, before a handler of our own is removed, and at the end of the program. A fork begins
with an empty queue and no thread: the items are its parent's.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from _thread import start_new_thread
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")
# Seconds that the end of a runtime, or of the program, waits for what is being written.
END_S = 2.0
# Records that wait to be handled. A model may log 1,000 lines a second, and a line has 8 KiB at most.
_MOST_WAITING = 8192


class _Mark:
    """Stands behind the items for which a flush waits."""

    def __init__(self) -> None:
        # Released when they are written. A bare lock: a signal handler may raise in the one who waits.
        self.reached = threading.Lock()
        self.reached.acquire()


class Outlet(Generic[T]):
    """Gives items to a function that may block and raise, on a thread of its own.

    Any thread may call any method, and only `flush` waits.
    """

    def __init__(self, name: str, write: Callable[[list[T], int], object], most_waiting: int) -> None:
        """`write` gets items in their order, and the number of those that were dropped after them.

        `name` is that of the thread.
        """
        self._name, self._write, self._most_waiting = name, write, most_waiting
        self.forget()

    def forget(self) -> None:
        """Start empty, in a fork."""
        self._items: SimpleQueue[T | _Mark] = SimpleQueue()
        self._dropped = 0
        self._has_thread = False
        self._turn = threading.Lock()
        # The thread that has the turn.
        self._writer: int | None = None

    def put(self, item: T) -> None:
        """Have an item written soon."""
        if self._items.qsize() < self._most_waiting:
            self._items.put(item)
        else:
            self._dropped += 1
        self._start()

    def flush(self, timeout_s: float = END_S) -> None:
        """Return when all is written that was put before, or after so long.

        Writes it itself if no thread can be started.
        """
        # `write` itself may come here, for example if a handler closes the runtime.
        if (self._items.empty() and not self._has_thread) or threading.get_ident() == self._writer:
            return
        self._start()
        if not self._has_thread:
            self._write_here()
            return
        mark = _Mark()
        self._items.put(mark)
        mark.reached.acquire(timeout=timeout_s)

    def _start(self) -> None:
        if self._has_thread:
            return
        try:
            # First, as the thread may have begun before the next line.
            self._has_thread = True
            start_new_thread(self._run, ())
        except BaseException as error:
            self._has_thread = False
            if not isinstance(error, RuntimeError):  # a signal handler's
                raise

    def _run(self) -> None:
        # This gives the thread an entry in `threading`.
        threading.current_thread().name = self._name
        if self._turn.acquire(blocking=False):
            self._writer = threading.get_ident()
            while True:
                self._write_from(self._items.get())

    def _write_here(self) -> None:
        """Write what waits."""
        has_turn: list[bool] = []
        try:
            # In one step: a signal handler that raises must not leave it taken.
            has_turn.extend(map(self._turn.acquire, (False,)))
            if has_turn[0]:
                self._writer = threading.get_ident()
                with contextlib.suppress(Empty):
                    while True:
                        self._write_from(self._items.get_nowait())
        finally:
            if has_turn == [True]:
                self._writer = None
                self._turn.release()
                # A thread that was started meanwhile has ended, as it did not get the turn.
                self._has_thread = False
        if not self._items.empty():
            self._start()

    def _write_from(self, first: T | _Mark) -> None:
        """Write this item and those behind it."""
        taken = [first]
        with contextlib.suppress(Empty):
            while len(taken) < self._most_waiting:
                taken.append(self._items.get_nowait())
        dropped, self._dropped = self._dropped, 0
        items = [each for each in taken if not isinstance(each, _Mark)]
        try:
            if items or dropped:
                self._write(items, dropped)
        except BaseException:  # this thread has to write what comes later
            with contextlib.suppress(BaseException):
                sys.excepthook(*sys.exc_info())
        for mark in taken:
            if isinstance(mark, _Mark):
                mark.reached.release()


# A record with its logger and what it has beyond a plain one.
_Logged: TypeAlias = tuple[logging.Logger, logging.LogRecord, Mapping[str, object] | None]
# The attributes that tell when and where a record was logged.
_OF_THE_MOMENT = ("created", "msecs", "relativeCreated", "thread", "threadName", "process", "processName", "taskName")


class RuntimeLog:
    """A logger, with the methods of Python's. None of them blocks, raises, or runs code of the program."""

    def __init__(self, name: str) -> None:
        """Log to the logger of this name, whose handlers, filters and levels are the program's."""
        self.logger = logging.getLogger(name)

    def is_enabled(self, level: int) -> bool:
        """Return True if the logger takes records of this level. Takes no lock."""
        # The function of the base class: the program may have put a class of its own in its place.
        effective = logging.Logger.getEffectiveLevel(self.logger)
        return level >= effective and level > self.logger.manager.disable

    def debug(self, message: str, *arguments: object) -> None:
        """Log what helps to find a fault."""
        self._take(logging.DEBUG, message, arguments)

    def info(self, message: str, *arguments: object, extra: Mapping[str, object] | None = None) -> None:
        """Log what happens as a rule."""
        self._take(logging.INFO, message, arguments, extra=extra)

    def warning(self, message: str, *arguments: object) -> None:
        """Log what somebody may have to change."""
        self._take(logging.WARNING, message, arguments)

    def error(
        self,
        message: str,
        *arguments: object,
        exc_info: BaseException | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        """Log what went wrong, with the traceback of an exception if there is one."""
        self._take(logging.ERROR, message, arguments, exc_info, extra)

    def exception(self, message: str, *arguments: object) -> None:
        """Log what went wrong, with the traceback of the exception that is being handled."""
        self._take(logging.ERROR, message, arguments, sys.exc_info()[1])

    def log(self, level: int, message: str, *arguments: object, extra: Mapping[str, object] | None = None) -> None:
        """Log something at a level."""
        self._take(level, message, arguments, extra=extra)

    def _take(
        self,
        level: int,
        message: str,
        arguments: tuple[object, ...],
        error: BaseException | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        if not self.is_enabled(level):
            return
        # The one who called the method that called this.
        frame = sys._getframe(2)
        code = frame.f_code
        exc_info: Any = None if error is None else (type(error), error, error.__traceback__)
        record = logging.LogRecord(
            self.logger.name, level, code.co_filename, frame.f_lineno, message, arguments, exc_info, code.co_name
        )
        record.__dict__.update(extra or {})
        _RECORDS.put((self.logger, record, extra))


def flush(timeout_s: float = END_S) -> None:
    """Return when all that was logged before has been handled, or after so long."""
    _RECORDS.flush(timeout_s)


class _Handling:
    """Hands records to their loggers. On the log's thread."""

    def __init__(self) -> None:
        # True from a record whose handlers raised to the next one whose handlers did not, so that one fault is
        # reported once.
        self._is_failing = False
        self._reporter = logging.Handler()

    def __call__(self, taken: list[_Logged], dropped: int) -> None:
        for logged in taken:
            self._handle(*logged)
        if dropped:
            text = "%d records were dropped here: the handlers of this log take too long"
            path, line = __file__, sys._getframe().f_lineno
            record = logging.LogRecord("moonpool", logging.WARNING, path, line, text, (dropped,), None, "__call__")
            self._handle(logging.getLogger("moonpool"), record, None)

    def _handle(self, logger: logging.Logger, record: logging.LogRecord, extra: Mapping[str, object] | None) -> None:
        try:
            logger.handle(_finished(logger, record, extra))
        except BaseException:  # also SystemExit: the other records are not to blame
            if not self._is_failing:
                self._is_failing = True
                # It writes the traceback to stderr, where there is one.
                with contextlib.suppress(BaseException):
                    self._reporter.handleError(record)
        else:
            self._is_failing = False


def _finished(
    logger: logging.Logger, record: logging.LogRecord, extra: Mapping[str, object] | None
) -> logging.LogRecord:
    """Return the record as the program's own factory makes it, if there is one. Formats may need what that adds."""
    if logging.getLogRecordFactory() is logging.LogRecord:
        return record
    made = logger.makeRecord(
        record.name,
        record.levelno,
        record.pathname,
        record.lineno,
        record.msg,
        record.args or (),
        record.exc_info,
        record.funcName,
        extra,
    )
    made.__dict__.update({name: record.__dict__[name] for name in _OF_THE_MOMENT if name in record.__dict__})
    return made


_RECORDS: Outlet[_Logged] = Outlet("moonpool-log", _Handling(), _MOST_WAITING)
os.register_at_fork(after_in_child=_RECORDS.forget)
atexit.register(flush)
