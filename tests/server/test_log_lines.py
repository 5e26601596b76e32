"""The log of a server, line by line."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import unicodedata
from pathlib import Path

import pytest

from moonpool.runtime.server.log import LogOptions, ServerLog, logged

_BIDI = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
LOG = logging.getLogger("moonpool.server")


def lines(options: LogOptions, *messages: tuple[int, str], is_table: bool = False) -> list[str]:
    stream = io.StringIO()
    with logged(ServerLog(options, stream)):
        for level, text in messages:
            LOG.log(level, "%s", text, extra={"is_table": is_table})
    return stream.getvalue().splitlines()


@pytest.mark.promise(
    "The server (`moonpool serve`)", "A line of the log has Triton's form, or is JSON; nobody can forge one."
)
def test_a_line_has_triton_s_form() -> None:
    (line,) = lines(LogOptions(), (logging.WARNING, "watch out"))

    assert re.fullmatch(rf"W\d{{4}} \d\d:\d\d:\d\d\.\d{{6}} {os.getpid()} test_log_lines\.py:\d+\] watch out", line)


@pytest.mark.promise(
    "The server (`moonpool serve`)", "A malformed record for the log does not fail the code that logs it."
)
def test_a_malformed_log_record_does_not_fail_its_caller(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with logged(ServerLog(LogOptions(), stream)):
        LOG.warning("%d", "no number")
        LOG.warning("another")

    (line,) = stream.getvalue().splitlines()
    assert line.endswith("] another")
    assert "no number" in capsys.readouterr().err


def test_times_may_be_iso_8601() -> None:
    (line,) = lines(LogOptions(log_format="ISO8601"), (logging.ERROR, "bad"))

    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ E {os.getpid()} test_log_lines\.py:\d+\] bad", line)


def test_a_line_may_be_json() -> None:
    (line,) = lines(LogOptions(log_format="json"), (logging.INFO, 'two\nlines, "quoted"'))
    said = json.loads(line)

    assert said["text"] == 'two\nlines, "quoted"'
    assert (said["level"], said["pid"], said["logger"]) == ("info", os.getpid(), "moonpool.server")
    assert said["time"].endswith("Z")


@pytest.mark.promise("The server (`moonpool serve`)", "A line of the log has …")
@pytest.mark.promise(
    "HTTP",
    "No line of the log, in any format, has a character that a terminal obeys or that turns the "
    "direction of text. A line in JSON has them escaped.",
)
@pytest.mark.parametrize("log_format", ["default", "ISO8601", "json"])
def test_nobody_can_forge_a_line(log_format: str) -> None:
    forged = "harmless\nE1121 00:00:00.000000 1 server.py:1] all is lost\x1b[2J"
    (line,) = lines(LogOptions(log_format=log_format), (logging.INFO, forged))

    assert "\x1b" not in line


@pytest.mark.promise("HTTP", "No line of the log, in …")
@pytest.mark.parametrize("log_format", ["default", "ISO8601", "json"])
def test_no_character_of_a_line_does_something_to_who_reads_it(log_format: str) -> None:
    said = "".join(map(chr, (*range(0x2100), *range(0xFFF0))))
    acting = [each for each in said if unicodedata.category(each) in ("Cc", "Zl", "Zp")]
    turning = [each for each in said if unicodedata.bidirectional(each) in _BIDI]
    assert {"\x07", "\x7f", "\x85", "\x9b", "\u2028"} <= {*acting}
    assert {"\u061c", "\u200e", "\u202e", "\u2066"} <= {*turning, "\u061c", "\u200e"}
    text = "a" + "".join({*acting, *turning, "\u061c", "\u200e", "\u200f"} - {"\t"}) + "ä"

    (line,) = lines(LogOptions(log_format=log_format), (logging.INFO, text))

    assert not {*line} & ({*text} - {"a", "ä"})
    if log_format == "json":
        assert json.loads(line)["text"] == text


def test_a_table_has_its_lines() -> None:
    head, *rest = lines(LogOptions(), (logging.INFO, "+---+\n| a |\n+---+"), is_table=True)

    assert head.endswith("] ")
    assert rest == ["+---+", "| a |", "+---+", ""]


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        (LogOptions(), "IWE"),
        (LogOptions(log_info=False), "WE"),
        (LogOptions(log_warning=False), "IE"),
        (LogOptions(log_error=False), "IW"),
        (LogOptions(log_verbose_level=1), "IIWE"),
    ],
)
def test_each_level_can_be_left_out(options: LogOptions, seen: str) -> None:
    levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)

    assert "".join(line[0] for line in lines(options, *((each, "x") for each in levels))) == seen


def test_settings_change_while_it_is_used(tmp_path: Path) -> None:
    stream, file = io.StringIO(), tmp_path / "log"
    with logged(ServerLog(stream=stream)) as log:
        LOG.info("here")
        log.update(log_file=str(file))
        LOG.info("there")
        with pytest.raises(OSError, match="No such file"):
            log.update(log_file=str(tmp_path / "missing" / "log"))
        LOG.info("still there")
        assert log.update(log_file="", log_info=False) == LogOptions(log_info=False)
        LOG.warning("here again")
    assert [line.partition("] ")[2] for line in file.read_text().splitlines()] == ["there", "still there"]
    assert [line.partition("] ")[2] for line in stream.getvalue().splitlines()] == ["here", "here again"]


def test_a_log_that_cannot_be_written_harms_nobody() -> None:
    with logged(ServerLog(LogOptions(log_file="/dev/full"))):
        LOG.info("lost")


def test_the_level_is_as_it_was_when_a_log_is_closed() -> None:
    ours = logging.getLogger("moonpool")
    before = ours.level
    lines(LogOptions(log_verbose_level=1), (logging.DEBUG, "much"))

    assert ours.level == before
    assert LOG.isEnabledFor(logging.DEBUG) == (LOG.getEffectiveLevel() <= logging.DEBUG)


def test_no_lock_is_missed_by_a_newer_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(self: logging.Handler, record: logging.LogRecord) -> bool:
        # As from Python 3.13 on.
        with self.lock:  # type: ignore[union-attr]
            self.emit(record)
        return True

    monkeypatch.setattr(logging.Handler, "handle", handle)
    stream = io.StringIO()
    with logged(ServerLog(LogOptions(), stream)):
        logging.getLogger("moonpool").warning("heard")
    assert "heard" in stream.getvalue()
