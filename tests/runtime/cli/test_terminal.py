"""Colours and progress: on a terminal, and nowhere else."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import threading
from collections.abc import Iterator

import pytest
from tests.refused_threads import refuse_threads
from tests.runtime.cli.shell import MODELS, PATIENCE_S, CommandLine
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.process.terminal import Terminal

COLOUR = re.compile(rb"\x1b\[[0-9;]+m")


@contextlib.contextmanager
def pseudo_terminal() -> Iterator[tuple[int, int]]:
    """The end of the person, and the end of the program."""
    ours, theirs = pty.openpty()
    try:
        yield ours, theirs
    finally:
        os.close(ours)


def shown(cli: CommandLine, stream: str, *arguments: object, **variables: str) -> bytes:
    """Return what a command writes to a terminal, which is its `stream`. The other stream is a pipe."""
    with pseudo_terminal() as (ours, theirs):
        stdout = theirs if stream == "stdout" else subprocess.PIPE
        stderr = theirs if stream == "stderr" else subprocess.PIPE
        with cli.start(*arguments, stdout=stdout, stderr=stderr, **variables) as process:
            os.close(theirs)
            timer = threading.Timer(PATIENCE_S, process.kill)
            timer.start()
            data = b""
            # The end of the last process that has the other end is an error here.
            with contextlib.suppress(OSError):
                while part := os.read(ours, 65536):
                    data += part
            timer.cancel()
            timer.join()
            process.communicate()
    assert process.returncode == 0, data
    return data


def test_progress_of_a_command_shows_what_starts_and_leaves_nothing_behind(cli: CommandLine) -> None:
    data = shown(cli, "stderr", "infer", MODELS, "normalise", "--input", "X=[[1,2]]")

    assert "normalise_0 starting…".encode() in data
    assert b"\n" not in data
    assert data.endswith(b"\r\x1b[K")


@pytest.mark.parametrize("text", ["moonpool: interrupted", "moonpool: error: it failed"])
def test_the_last_line_of_a_command_stands_alone(tty: Tty, text: str) -> None:
    tty.write("m_0 starting… 0.1 s^C")

    Terminal(tty).last_line(text)

    assert tty.getvalue().endswith(f"^C\r\x1b[K{text}\n")


def test_a_measurement_shows_how_far_it_is(cli: CommandLine) -> None:
    text = shown(cli, "stderr", "bench", MODELS, "add_sub", "--concurrency", "1,2", "--seconds", "0.05").decode()

    assert "load 1 of 2, 1 caller, warm-up" in text
    assert re.search(r"load 2 of 2, 2 callers, window 2 of at most 10, [\d,]+/s, \d+ s", text)


def test_no_color_leaves_progress_without_colours(cli: CommandLine) -> None:
    data = shown(cli, "stderr", "infer", MODELS, "normalise", "--input", "X=[[1,2]]", NO_COLOR="1")

    assert "normalise_0 starting…".encode() in data
    assert not COLOUR.search(data)


def test_a_dumb_terminal_gets_plain_lines(cli: CommandLine) -> None:
    data = shown(cli, "stdout", "check", MODELS, "normalise", TERM="dumb")

    assert data.startswith(b"ok: normalise: ")
    assert b"\x1b" not in data


def test_levels_are_coloured_on_a_terminal(cli: CommandLine) -> None:
    data = shown(cli, "stdout", "check", MODELS, "normalise")

    assert data.startswith(b"\x1b[32mok\x1b[0m: normalise: ")


class Tty(io.StringIO):
    """A stream that takes itself for a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def tty(monkeypatch: pytest.MonkeyPatch) -> Tty:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    return Tty()


def test_a_stream_that_is_no_terminal_sees_no_progress() -> None:
    stream = io.StringIO()
    progress = moonpool.Progress(stream)

    progress("m:1", "LOADING", "load")
    progress("m_0", "STARTING", "load")
    progress("m_0", "FAILED", "no")

    assert stream.getvalue() == ""


def test_the_time_goes_on_while_something_starts(tty: Tty) -> None:
    progress = moonpool.Progress(tty)

    progress("m_0", "STARTING", "load")

    wait_until(lambda: re.search(r"m_0 starting… (0\.[1-9]|[1-9])", tty.getvalue()))
    progress("m_0", "READY", "initialized")
    assert "ready" in tty.getvalue()


def test_a_copy_has_a_bar(tty: Tty) -> None:
    progress = moonpool.Progress(tty)
    progress.copying("hf://o/m", 1_500_000, 3_000_000)
    assert "hf://o/m [##########..........] 1.5 of 3.0 MB" in tty.getvalue()
    progress.copying("hf://o/m", 0, 0)
    tty.truncate(0)
    progress.say("over")
    assert "MB" not in tty.getvalue()


def test_a_death_and_a_return_are_shown(tty: Tty) -> None:
    progress = moonpool.Progress(tty)

    progress("m_0", "BACKING_OFF", "was killed\nat night")
    progress("m_0", "STARTING", "restart")
    progress("m_0", "READY", "restarted")

    assert "m_0 lost was killed\n" in tty.getvalue()
    assert re.search(r"m_0 ready \d+\.\d s\n", tty.getvalue())


def test_brief_progress_keeps_lines_of_failures_alone(tty: Tty) -> None:
    progress = moonpool.Progress(tty, is_brief=True)

    progress("m_0", "STARTING", "load")
    progress("m_0", "READY", "initialized")
    progress("n_0", "FAILED", "no")

    assert "\x1b[Kn_0 failed no\n" in tty.getvalue()
    assert "ready" not in tty.getvalue()


def test_texts_of_a_model_cannot_command_the_terminal(tty: Tty) -> None:
    moonpool.Progress(tty)("m_0", "FAILED", "\x1b]0;owned\x07")

    assert "\x1b]" not in tty.getvalue()
    assert "owned" in tty.getvalue()


def test_lines_are_written_above_the_one_that_changes(tty: Tty) -> None:
    progress = moonpool.Progress(tty)
    progress("m_0", "STARTING", "load")

    progress.say("a warning")

    assert "\r\x1b[Ka warning\n\r\x1b[Km_0 starting…" in tty.getvalue()
    progress("m_0", "STOPPED", "unload")


def test_many_names_do_not_wrap(tty: Tty) -> None:
    progress = moonpool.Progress(tty)
    for number in range(50):
        progress(f"model_{number}", "STARTING", "load")

    last = tty.getvalue().rpartition("\x1b[K")[2]
    assert len(last) < Terminal(tty).width
    assert "…" in last
    for number in range(50):
        progress(f"model_{number}", "STOPPED", "unload")


def test_a_stream_that_breaks_does_not_break_the_model(tty: Tty) -> None:
    progress = moonpool.Progress(tty)
    tty.close()

    progress("m_0", "STARTING", "load")
    progress("m_0", "READY", "initialized")
    progress.say("unheard")


def test_a_start_is_shown_though_no_thread_counts_its_time(tty: Tty, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = moonpool.Progress(tty)
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        progress("m_0", "STARTING", "load")
        assert re.search(r"m_0 starting… \d+\.\d s", tty.getvalue())
    progress("m_1", "STARTING", "load")

    wait_until(lambda: re.search(r"starting… (0.[1-9]|[1-9])", tty.getvalue()))
    for name in ("m_0", "m_1"):
        progress(name, "STOPPED", "unload")
