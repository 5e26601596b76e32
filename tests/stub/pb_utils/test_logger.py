"""Tests where messages of a model go."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator

import pytest

from moonpool.stub.pb_utils import logger
from moonpool.stub.pb_utils.logger import Logger

Message = tuple[int, str, str, int]


@pytest.fixture
def sink() -> Iterator[list[Message]]:
    messages: list[Message] = []
    logger.set_sink(lambda *message: messages.append(message))
    yield messages
    logger.set_sink(None)
    logger.set_levels(True, True, True, False)


def test_each_level_has_tritons_number_and_the_callers_place(sink: list[Message]) -> None:
    logger.set_levels(True, True, True, True)
    here = sys._getframe().f_lineno
    Logger.log_info("a")
    Logger.log_warn("b")
    Logger.log_error("c")
    Logger.log_verbose(message="d")
    Logger.log("e")
    Logger.log("f", Logger.ERROR)

    assert [message[:2] for message in sink] == [(0, "a"), (1, "b"), (2, "c"), (3, "d"), (0, "e"), (2, "f")]
    assert [message[2:] for message in sink] == [(__file__, here + n) for n in range(1, 7)]


def test_verbose_messages_are_dropped_unless_they_are_wanted(sink: list[Message]) -> None:
    Logger.log_verbose("a")
    assert sink == []

    logger.set_levels(True, True, True, True)
    Logger.log("b", Logger.VERBOSE)
    assert [message[1] for message in sink] == ["b"]


def test_without_a_sink_messages_go_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    Logger.log_warn("text")

    line = capsys.readouterr().err
    pattern = rf"W\d{{4}} \d\d:\d\d:\d\d\.\d{{6}} {os.getpid()} test_logger\.py:\d+\] text\n"
    assert re.fullmatch(pattern, line)


def test_a_level_can_be_turned_off_and_on_again(sink: list[Message]) -> None:
    log = logging.Logger("model")
    log.addHandler(logger.logging_handler())

    def say_everything() -> list[str]:
        sink.clear()
        for say in (Logger.log_info, Logger.log_warn, Logger.log_error, Logger.log_verbose):
            say(say.__name__)
        for level in (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG):
            log.log(level, logging.getLevelName(level))
        return [message[1].removeprefix("model: ") for message in sink]

    logger.set_levels(False, True, False, True)
    assert say_everything() == ["log_warn", "log_verbose", "WARNING", "DEBUG"]
    logger.set_levels(True, False, True, False)
    assert say_everything() == ["log_info", "log_error", "INFO", "ERROR"]


def test_bytes_are_text_as_far_as_they_go(sink: list[Message]) -> None:
    Logger.log_info(b"good \xff")  # type: ignore[arg-type]

    assert sink[0][1] == r"good \xff"


def test_records_of_pythons_logging_arrive_too(sink: list[Message]) -> None:
    logger.set_levels(True, True, True, True)
    log = logging.Logger("model")
    log.addHandler(logger.logging_handler())
    log.warning("%d left", 3)
    log.debug("details")
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")

    assert [message[0] for message in sink] == [logger.WARNING, logger.VERBOSE, logger.ERROR]
    assert sink[0][1:3] == ("model: 3 left", __file__)
    assert "ValueError: broken" in sink[2][1]


def bare_root(monkeypatch: pytest.MonkeyPatch, *handlers: logging.Handler) -> None:
    # Tests call this themselves, because pytest adds handlers of its own after the fixtures.
    monkeypatch.setattr(logging.root, "handlers", list(handlers))


def test_logging_that_nobody_configured_is_adopted_once(monkeypatch: pytest.MonkeyPatch, sink: list[Message]) -> None:
    bare_root(monkeypatch)

    assert logger.adopt_logging()
    logging.getLogger("lib").warning("text")
    assert [message[:2] for message in sink] == [(logger.WARNING, "lib: text")]
    assert not logger.adopt_logging()


def test_logging_that_the_model_configured_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = logging.NullHandler()
    bare_root(monkeypatch, own)

    assert not logger.adopt_logging()
    assert logging.root.handlers == [own]
