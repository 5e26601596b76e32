"""Prints of models in a program without a log are written by another thread, in order, and nobody waits for them."""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping

import pytest
from tests.runtime.interrupting import interrupted_everywhere

from moonpool.runtime import log
from moonpool.runtime.stubs.output import Printer, are_logged

pytestmark = pytest.mark.promise("Containment", "If a program has a …")


class Stuck(io.StringIO):
    """A stream that nobody reads, until `goes_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reached, self.goes_on = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.is_reached.set()
        self.goes_on.wait(60.0)
        return super().write(text)


@contextlib.contextmanager
def stuck_output() -> Iterator[Stuck]:
    """Not a fixture: pytest puts its own stream in place before each test."""
    stream = Stuck()
    try:
        with contextlib.redirect_stdout(stream):
            yield stream
    finally:
        stream.goes_on.set()


def test_lines_are_written_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer()
    for number in range(1000):
        printer.say(f"line {number}")
    printer.wait(60.0)
    assert capsys.readouterr().out.splitlines() == [f"line {number}" for number in range(1000)]


def test_nobody_waits_for_a_stream_that_is_stuck_and_what_is_left_out_is_counted() -> None:
    printer = Printer()
    with stuck_output() as stuck:
        printer.say("first")
        assert stuck.is_reached.wait(60.0)
        for number in range(10_000):
            printer.say(f"line {number}")
        printer.wait(0.01)
        assert stuck.getvalue() == ""

        stuck.goes_on.set()
        printer.wait(60.0)
        first, *kept, last = stuck.getvalue().splitlines()
        assert first == "first"
        assert 10 < len(kept) < 9_000
        assert kept == [f"line {number}" for number in range(len(kept))]
        assert last == f"{10_000 - len(kept)} lines of models were dropped: this output is not being read"


def test_a_stream_that_cannot_be_written_to_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    printer = Printer()
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, object()):
        monkeypatch.setattr(sys, "stdout", stream)
        printer.say("lost")
        printer.wait(60.0)
    ascii_only = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    printer.say("gr\u00fcn")
    printer.wait(60.0)
    assert ascii_only.buffer.getvalue() == b"gr\\xfcn\n"


class Raises(io.StringIO):
    """A stream of a program's own, as a window's that was closed."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def write(self, _: str) -> int:
        raise self.error


class Misnamed(io.StringIO):
    encoding = "there is none such"


@pytest.mark.promise(
    "Containment",
    "Whatever error the standard output of a program raises, later lines of models are written, "
    "and the runtime never waits for it.",
)
@pytest.mark.parametrize("stream", [Raises(RuntimeError("deleted")), Raises(SystemExit(1)), Misnamed()])
def test_a_stream_that_raises_anything_does_not_end_what_comes_later(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO
) -> None:
    printer = Printer()
    monkeypatch.setattr(sys, "stdout", stream)
    printer.say("lost")
    printer.wait(60.0)
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    printer.say("seen")
    printer.wait(60.0)
    assert shown.getvalue() == "seen\n"


def test_where_no_thread_can_be_started_whoever_waits_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets the output of all stubs. It would hang if nobody read the stream."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    printer = Printer()
    with stuck_output() as stuck:
        with monkeypatch.context() as patch:
            patch.setattr(log, "start_new_thread", refuse)
            printer.say("first")
            printer.say("second")
            assert not stuck.is_reached.is_set()
        stuck.goes_on.set()
        printer.wait(60.0)
        assert stuck.getvalue() == "first\nsecond\n"


def test_a_wait_that_is_interrupted_at_any_point_loses_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    printers: list[Printer] = []

    def say() -> None:
        printers.append(Printer())
        with monkeypatch.context() as patch:
            patch.setattr(log, "start_new_thread", refuse)
            printers[-1].say(f"line {len(printers)}")

    def check() -> None:
        printers[-1].wait(60.0)
        assert shown.getvalue() == f"line {len(printers)}\n"
        shown.seek(0)
        shown.truncate()
        say()

    say()
    assert interrupted_everywhere(lambda: printers[-1].wait(60.0), check, at_lines=False) > 5
    printers[-1].wait(60.0)


# Its parent waits in a stream that nobody reads while the child prints. A process of its own: a fork of this one would
# have the locks that other threads of the tests hold.
FORKS = """
import io, os, sys, threading

from moonpool.runtime.stubs import output


class Stuck(io.StringIO):
    is_reached, goes_on = threading.Event(), threading.Event()

    def write(self, text):
        self.is_reached.set()
        self.goes_on.wait(60.0)
        return super().write(text)


stuck = sys.stdout = Stuck()
output.PRINTER.say("of the parent")
assert stuck.is_reached.wait(60.0)
pid = os.fork()
if pid == 0:
    code = 1
    try:
        sys.stdout = io.StringIO()
        output.PRINTER.say("of the child")
        output.PRINTER.wait(60.0)
        code = 0 if sys.stdout.getvalue() == "of the child\\n" else 2
    finally:
        os._exit(code)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
stuck.goes_on.set()
output.PRINTER.wait(60.0)
sys.exit(0 if (code, stuck.getvalue()) == (0, "of the parent\\n") else f"{code} {stuck.getvalue()!r}")
"""


def test_a_fork_prints_for_itself() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKS]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr


@contextlib.contextmanager
def levels(wanted: Mapping[str, str]) -> Iterator[None]:
    """Give loggers these levels. Not by a patch: loggers keep what follows from levels, and only `setLevel` makes them
    forget it.
    """
    loggers = {name: logging.getLogger(name) for name in wanted}
    before = {name: logger.level for name, logger in loggers.items()}
    try:
        for name, level in wanted.items():
            loggers[name].setLevel(level)
        yield
    finally:
        for name, number in before.items():
            loggers[name].setLevel(number)


@pytest.mark.parametrize(
    ("name", "level", "handled", "logged"),
    [
        ("root", "WARNING", True, False),  # logging.basicConfig()
        ("root", "INFO", True, True),
        ("root", "INFO", False, False),  # there is no handler
        ("moonpool", "WARNING", False, True),
        ("moonpool.stub", "INFO", False, True),
        ("other", "INFO", True, False),
    ],
)
def test_a_log_counts_if_it_takes_the_lines_or_is_said_to_take_none(
    monkeypatch: pytest.MonkeyPatch, name: str, level: str, handled: bool, logged: bool
) -> None:
    # The loggers are those of a program that sets up nothing, whatever earlier tests left.
    for each in ("root", "moonpool", "moonpool.stub"):
        monkeypatch.setattr(logging.getLogger(each), "handlers", [])
    handlers = [logging.NullHandler()] if handled else []
    monkeypatch.setattr(logging.getLogger(name), "handlers", handlers)
    plain = {"root": "WARNING", "moonpool": "NOTSET", "moonpool.stub": "NOTSET"}
    with levels(plain | {name: level}):
        assert are_logged() == logged
