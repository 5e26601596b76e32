"""Records reach the program's log on a thread of their own, complete and in order, whatever its handlers do
meanwhile.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from moonpool.runtime import log
from moonpool.runtime.log import Outlet, RuntimeLog, flush

PATIENCE_S = 60.0
NAME = "moonpool.of_this_test"


class Kept(logging.Handler):
    """Keeps records, and may be made to wait or to raise."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.threads: set[str] = set()
        self.is_reached, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()
        self.error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.is_reached.set()
        self.goes_on.wait(PATIENCE_S)
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        self.records.append(record)

    @property
    def texts(self) -> list[str]:
        flush(PATIENCE_S)
        return [record.getMessage() for record in self.records]


@pytest.fixture
def kept() -> Iterator[Kept]:
    logger, handler = logging.getLogger(NAME), Kept()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield handler
    finally:
        handler.goes_on.set()
        flush(PATIENCE_S)
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


def test_a_record_tells_where_and_when_it_was_logged_and_is_handled_elsewhere(kept: Kept) -> None:
    kept.goes_on.clear()
    error = ValueError("wrong")

    def act() -> None:
        RuntimeLog(NAME).error("%s went %s", "it", "wrong", exc_info=error, extra={"is_mine": True})

    plain = logging.LogRecord(NAME, logging.ERROR, __file__, 0, "", (), None)
    thread = threading.Thread(target=act, name="one that logs")
    thread.start()
    thread.join()
    assert kept.is_reached.wait(PATIENCE_S)
    after = logging.LogRecord(NAME, logging.ERROR, __file__, 0, "", (), None)
    kept.goes_on.set()

    assert kept.texts == ["it went wrong"]
    (record,) = kept.records
    assert plain.created <= record.created <= after.created
    assert (record.name, record.levelname, record.msg) == (NAME, "ERROR", "%s went %s")
    assert (record.pathname, record.funcName, record.threadName) == (__file__, "act", "one that logs")
    assert record.lineno == act.__code__.co_firstlineno + 1
    assert record.exc_info == (ValueError, error, None)
    assert record.__dict__["is_mine"]
    assert kept.threads == {"moonpool-log"}


@pytest.mark.promise(
    "Log",
    "Records of the runtime are given to the program's log on a thread of their own, those of one thread in their "
    "order. Neither the runtime nor a model waits for a handler. What is not handled in time is dropped, counted and "
    "reported in the log.",
)
def test_nobody_waits_for_a_handler_that_is_stuck_and_what_is_dropped_is_counted(kept: Kept) -> None:
    logging.getLogger("moonpool").addHandler(kept)
    try:
        kept.goes_on.clear()
        RuntimeLog(NAME).info("first")
        assert kept.is_reached.wait(PATIENCE_S)
        for number in range(10_000):
            RuntimeLog(NAME).info("line %d", number)
        flush(0.01)
        assert kept.records == []

        kept.goes_on.set()
        first, *lines, last = kept.texts
        assert first == "first"
        assert 10 < len(lines) < 9_000
        assert lines == [f"line {number}" for number in range(len(lines))]
        assert last == f"{10_000 - len(lines)} records were dropped here: the handlers of this log take too long"
    finally:
        logging.getLogger("moonpool").removeHandler(kept)


@pytest.mark.promise("Log", "A handler that raises anything costs no more than the record, and is reported once.")
@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit(1)], ids=repr)
def test_a_handler_that_raises_costs_its_record_and_is_reported_once(
    kept: Kept, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    kept.error = error
    for number in range(3):
        RuntimeLog(NAME).info("lost %d", number)
    flush(PATIENCE_S)
    kept.error = None
    RuntimeLog(NAME).info("seen")

    assert kept.texts == ["seen"]
    reported = capsys.readouterr().err
    assert reported.count("Traceback") == 1
    assert "Arguments: (0,)" in reported
    assert type(error).__name__ in reported


def test_records_of_one_thread_stay_in_order(kept: Kept) -> None:
    def act(name: str) -> None:
        for number in range(200):
            RuntimeLog(NAME).info("%s %d", name, number)

    threads = [threading.Thread(target=act, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    texts = kept.texts
    for name in "abcd":
        assert [text for text in texts if text[0] == name] == [f"{name} {i}" for i in range(200)]


def test_filters_and_factories_of_the_program_run_where_handlers_do(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def passes(record: logging.LogRecord) -> bool:
        threads.append(threading.current_thread().name)
        return "hidden" not in record.getMessage()

    class Enriched(logging.LogRecord):
        request = "mine"

        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            threads.append(threading.current_thread().name)

    monkeypatch.setattr(logging.getLogger(NAME), "filters", [passes])
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(Enriched)
    try:
        RuntimeLog(NAME).info("hidden")
        RuntimeLog(NAME).info("shown")
        assert kept.texts == ["shown"]
    finally:
        logging.setLogRecordFactory(before)
    (record,) = kept.records
    assert isinstance(record, Enriched)
    assert (record.request, record.threadName) == ("mine", threading.current_thread().name)
    assert set(threads) == {"moonpool-log"}


def test_levels_are_those_of_the_logger_and_of_the_program(kept: Kept) -> None:
    logger = logging.getLogger(NAME)
    RuntimeLog(NAME).debug("too low")
    logger.setLevel(logging.DEBUG)
    RuntimeLog(NAME).debug("low")
    logging.disable(logging.INFO)
    try:
        RuntimeLog(NAME).info("forbidden")
        RuntimeLog(NAME).warning("high")
    finally:
        logging.disable(logging.NOTSET)
    assert kept.texts == ["low", "high"]
    logger.disabled = True
    try:
        RuntimeLog(NAME).warning("of a logger that is disabled")
        assert kept.texts == ["low", "high"]
    finally:
        logger.disabled = False


def test_nobody_waits_while_the_program_sets_up_its_logging(kept: Kept) -> None:
    """`logging.config` holds this lock while it makes the handlers of the program."""
    is_held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with logging._lock:  # type: ignore[attr-defined]
            is_held.set()
            may_go.wait(PATIENCE_S)

    # Loggers have forgotten which levels are enabled.
    logging.getLogger(NAME).setLevel(logging.INFO)
    log_of_this_test = RuntimeLog(NAME)
    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert is_held.wait(PATIENCE_S)
        logged = threading.Thread(target=log_of_this_test.info, args=("meanwhile",))
        logged.start()
        logged.join(PATIENCE_S)
        assert not logged.is_alive()
    finally:
        may_go.set()
        thread.join()
    assert kept.texts == ["meanwhile"]


def test_where_no_thread_can_be_started_whoever_flushes_writes(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(log, "_RECORDS", Outlet("moonpool-log", log._Handling(), 10))
    with monkeypatch.context() as patch:
        patch.setattr(log, "start_new_thread", refuse)
        RuntimeLog(NAME).info("one")
        RuntimeLog(NAME).info("two")
        assert kept.texts == ["one", "two"]
        assert kept.threads == {threading.current_thread().name}
        RuntimeLog(NAME).info("three")
    RuntimeLog(NAME).info("four")
    assert kept.texts == ["one", "two", "three", "four"]
    assert kept.threads == {threading.current_thread().name, "moonpool-log"}


def test_a_handler_may_wait_for_the_log_that_calls_it(kept: Kept) -> None:
    def waits(_: logging.LogRecord) -> bool:
        flush(PATIENCE_S)
        return True

    kept.addFilter(waits)
    RuntimeLog(NAME).info("seen")
    assert kept.texts == ["seen"]


HEAD = """
import logging, os, sys, threading
from moonpool.runtime.log import RuntimeLog, flush

class Prints(logging.Handler):
    def emit(self, record):
        if record.msg == "stuck":
            is_reached.set()
            threading.Event().wait()
        print(record.msg, flush=True)

is_reached = threading.Event()
log = RuntimeLog("moonpool")
"""
# In a process of its own: a fork of this one would have the locks that other threads of the tests hold.
FORKS = """
log.logger.addHandler(Prints())
log.error("stuck")
is_reached.wait()
log.error("of the parent")
# A lock of the program's log that the fork inherits taken would be the program's own fault.
log.logger.handlers[:] = [Prints()]
if os.fork() == 0:
    log.error("of the child")
    flush(60.0)
    os._exit(0)
os.wait()
os._exit(0)
"""
ENDS = """
log.logger.addHandler(Prints())
for number in range(3):
    log.error(str(number))
"""
# The handler has no lock, for which `logging` itself would wait at the end.
ENDS_STUCK = """
class Free(Prints):
    def createLock(self):
        self.lock = None

    def handle(self, record):
        self.emit(record)

log.logger.addHandler(Free())
log.error("first")
log.error("stuck")
is_reached.wait()
log.error("lost")
"""


@pytest.mark.parametrize(
    ("program", "output"),
    [(FORKS, "of the child\n"), (ENDS, "0\n1\n2\n"), (ENDS_STUCK, "first\n")],
    ids=["fork", "end", "end while stuck"],
)
def test_a_fork_and_the_end_of_a_program_wait_for_no_handler_for_ever(program: str, output: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", HEAD + program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)

    assert (ended.returncode, ended.stdout) == (0, output), ended.stderr
