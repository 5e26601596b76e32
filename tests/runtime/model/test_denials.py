"""Denials that stubs report are counted, kept in part, and logged at a bounded rate."""

from __future__ import annotations

import logging

import pytest

from moonpool.ipc.denials import CONNECT, FORK, KINDS, OPEN
from moonpool.runtime.model.denials import MOST_TEXTS, DenialBook

pytestmark = pytest.mark.promise("Seeing sandboxes", "Acts of a model's Python code …")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock, caplog: pytest.LogCaptureFixture) -> DenialBook:
    caplog.set_level(logging.INFO, "moonpool")
    return DenialBook(clock)


def test_they_are_counted_by_instance_and_kind(book: DenialBook) -> None:
    book.add("m_0", [[OPEN, 2, "/a"], [OPEN, 5, ""], [CONNECT, 1, "h:1"]])
    book.add("m_1", [[OPEN, 1, "/a"]])
    book.add("m_0", [[OPEN, 1, "/a"]])

    assert book.counts("m_0") == dict.fromkeys(KINDS, 0) | {"open": 8, "connect": 1}
    assert book.counts("m_1")["open"] == 1
    assert book.counts("m_2") == dict.fromkeys(KINDS, 0)
    assert book.instances() == ["m_0", "m_1"]
    assert [(each.kind, each.text, each.count) for each in book.latest("m_0")] == [
        ("open", "/a", 3),
        ("connect", "h:1", 1),
    ]
    assert book.latest("m_2") == []


def test_a_line_says_what_was_refused_and_what_would_allow_it(
    book: DenialBook, caplog: pytest.LogCaptureFixture
) -> None:
    book.add("m_0", [[OPEN, 3, "/data/weights"], [FORK, 1, ""], [OPEN, 7, ""]])

    assert caplog.messages == [
        "[m_0] its sandbox did not let it read /data/weights (3 times); "
        "MOONPOOL_SANDBOX_PATHS=ro:/data/weights would allow it",
        "[m_0] its sandbox did not let it start a process; MOONPOOL_SANDBOX_SYSCALLS=fork would allow it",
    ]


def test_the_same_is_not_logged_again_within_an_hour(
    book: DenialBook, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        book.add("m_0", [[OPEN, 1, "/a"]])
        clock.now_s += 600
    assert len(caplog.messages) == 1
    clock.now_s += 3600
    book.add("m_0", [[OPEN, 1, "/a"]])
    assert caplog.messages[1].endswith("; 2 more refusals were not logged")


def test_lines_come_at_a_bounded_rate_and_samples_have_an_end(
    book: DenialBook, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(1000):
        book.add("m_0", [[OPEN, 1, f"/{second}/{each}"] for each in range(8)])
        clock.now_s += 1

    assert 100 <= len(caplog.messages) <= 110
    assert len(book.latest("m_0")) == MOST_TEXTS
    assert book.counts("m_0")["open"] == 8000


def test_texts_of_a_stub_are_harmless(book: DenialBook, caplog: pytest.LogCaptureFixture) -> None:
    book.add("m_0", [[OPEN, 1, "/a\n[m_1] READY\x1b[2J\u2028"]])

    (line,) = caplog.messages
    assert line.isprintable()
    assert line.endswith("; MOONPOOL_SANDBOX_PATHS would allow it")
    (denial,) = book.latest("m_0")
    assert denial.text.isprintable()
    assert denial.option == "MOONPOOL_SANDBOX_PATHS"
