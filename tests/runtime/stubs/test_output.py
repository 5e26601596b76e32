"""A stub's output becomes log lines: whole, marked, harmless, and not too many."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from moonpool.runtime.stubs.output import Budget, StubOutput


class Printed:
    """A `StubOutput`, the end that the stub would write to, and what was logged."""

    def __init__(self, lines_per_s: int, caplog: pytest.LogCaptureFixture) -> None:
        read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.write_fd, False)
        # The limits do not grow with time, as they would on a busy machine.
        self.output = StubOutput("m_0_0", read_fd, lines_per_s, clock=lambda: 0.0)
        self._caplog = caplog

    def write(self, data: bytes) -> None:
        assert os.write(self.write_fd, data) == len(data)

    def end(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def printed(caplog: pytest.LogCaptureFixture) -> Iterator[Printed]:
    caplog.set_level(logging.DEBUG, "moonpool.stub")
    printed = Printed(1000, caplog)
    yield printed
    printed.end()
    printed.output.close()


def test_lines_are_marked_with_the_instance(printed: Printed) -> None:
    printed.write(b"one\ntwo\n")
    assert printed.output.ready()
    assert printed.lines == ["[m_0_0] one", "[m_0_0] two"]


def test_a_line_is_logged_when_it_is_whole(printed: Printed) -> None:
    printed.write("über ".encode()[:1])
    printed.output.ready()
    printed.write("über ".encode()[1:] + b"the line")
    printed.output.ready()
    assert printed.lines == []
    printed.write(b"s\nrest")
    printed.output.ready()
    assert printed.lines == ["[m_0_0] über the lines"]


def test_the_rest_is_logged_at_the_end(printed: Printed) -> None:
    printed.write(b"no newline")
    assert printed.output.ready()
    printed.end()
    assert not printed.output.ready()
    assert printed.lines == ["[m_0_0] no newline"]


def test_nothing_to_read_is_not_the_end(printed: Printed) -> None:
    assert printed.output.ready()
    assert printed.lines == []


def test_the_tail_has_what_was_said_before_the_stacks_of_all_threads(printed: Printed) -> None:
    stack = b"Thread 0x1 (most recent call first):\n" + b'  File "a.py", line 3 in run\n' * 60 + b"\n"
    for part in (b"what(): std::bad_alloc\n", b"Fatal Python error: Aborted\n\n", *[stack] * 5):
        printed.write(part)
        printed.output.ready()
    assert printed.output.tail()[0] == "what(): std::bad_alloc"
    assert len(printed.lines) == 3 + 5 * 62


def test_an_empty_line_is_a_line_and_carriage_returns_are_dropped(printed: Printed) -> None:
    printed.write(b"one\r\n\nthree\n")
    printed.output.ready()
    assert printed.lines == ["[m_0_0] one", "[m_0_0] ", "[m_0_0] three"]


def test_control_characters_are_escaped(printed: Printed) -> None:
    printed.write(b"\x1b[2Jgone\x07\x00\x7f\xc2\x9b\ttab\rover\n")
    printed.output.ready()
    assert printed.lines == ["[m_0_0] \\x1b[2Jgone\\x07\\x00\\x7f\\x9b\ttab\\x0dover"]


def test_bytes_that_are_no_text_are_shown(printed: Printed) -> None:
    printed.write(b"\xff\xfe caf\xc3\n")
    printed.output.ready()
    assert printed.lines == ["[m_0_0] \\xff\\xfe caf\\xc3"]


def test_a_long_line_is_cut_and_says_so(printed: Printed) -> None:
    printed.write(b"x" * 10_000 + b"\nnext\n")
    printed.output.ready()
    assert printed.lines == [f"[m_0_0] {'x' * 8192} … (cut)", "[m_0_0] next"]


def test_a_line_that_never_ends_is_not_kept_in_memory(printed: Printed) -> None:
    for _ in range(20):
        printed.write(b"y" * 5000)
        printed.output.ready()
    assert len(printed.lines) == 10
    assert all(len(line) < 8300 for line in printed.lines)


def test_lines_over_the_budget_are_counted_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "moonpool.stub")
    printed = Printed(3, caplog)
    printed.write(b"".join(b"%d\n" % i for i in range(10)))
    printed.output.ready()
    printed.end()
    printed.output.ready()
    printed.output.close()
    assert printed.lines[:3] == ["[m_0_0] 0", "[m_0_0] 1", "[m_0_0] 2"]
    assert printed.lines[-1].endswith("lines were left out: too many a second (MOONPOOL_LOG_LINES_PER_S is 3)")
    assert len(printed.lines) < 10


@pytest.mark.promise("Limits", "Lines over the limit are …")
@pytest.mark.parametrize(("data", "reads"), [(b"\n" * 65536, 9), (b"x" * 65536, 1025)], ids=["empty lines", "no line"])
def test_endless_output_is_read_later(caplog: pytest.LogCaptureFixture, data: bytes, reads: int) -> None:
    printed = Printed(3, caplog)
    printed.write(b"a line\n")
    printed.output.ready()
    for _ in range(reads):
        assert not printed.output.is_ahead
        printed.write(data)
        assert printed.output.ready()
    assert printed.output.is_ahead
    printed.end()
    printed.output.close()


def test_the_last_of_the_dropped_lines_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "moonpool.stub")
    printed = Printed(0, caplog)
    printed.write(b"".join(b"%d\n" % i for i in range(5000)))
    printed.output.ready()
    assert printed.output.tail() == [str(i) for i in range(4960, 5000)]
    printed.output.flush()
    assert printed.lines == ["[m_0_0] 5000 lines were left out: too many a second (MOONPOOL_LOG_LINES_PER_S is 0)"]
    printed.end()
    printed.output.close()


@pytest.mark.promise("What a stub says", "Lines that are dropped cost …")
def test_a_log_message_is_cut_and_charged_by_its_length(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "moonpool.stub")
    printed = Printed(20, caplog)
    for _ in range(5):
        printed.output.log(0, "x" * 1_000_000, "", 0)
    printed.output.log(0, "\n".join("abcdef"), "", 0)
    assert len(printed.lines) == 3
    assert all(line.endswith("x … (cut)") and len(line) < 66_000 for line in printed.lines)
    printed.output.flush()
    assert printed.lines[3].startswith("[m_0_0] 8 lines were left out: ")
    printed.end()
    printed.output.close()


def test_the_budget_saves_up_for_a_second_and_no_more() -> None:
    now = 100.0
    budget = Budget(4, lambda: now)
    assert [budget.spend() for _ in range(6)] == [True] * 4 + [False] * 2
    assert budget.dropped == 2
    now = 100.25
    assert [budget.spend() for _ in range(2)] == [True, False]
    now = 1000.0
    assert [budget.spend() for _ in range(6)] == [True] * 4 + [False] * 2
    assert budget.dropped == 5


def test_a_budget_of_nothing_lets_nothing_through() -> None:
    now = 0.0
    budget = Budget(0, lambda: now)
    now = 1e6
    assert not budget.spend()


def test_the_tail_has_the_last_lines_also_of_those_that_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "moonpool.stub")
    printed = Printed(2, caplog)
    printed.write(b"".join(b"line %d\n" % i for i in range(100)) + b"the reason")
    printed.end()
    printed.output.drain()
    tail = printed.output.tail()
    assert tail[-2:] == ["line 99", "the reason"]
    assert len(tail) == 40
    printed.output.close()


def test_drain_reads_what_is_there_and_does_not_wait_for_more(printed: Printed) -> None:
    printed.write(b"one\ntwo")
    printed.output.drain()
    assert printed.lines == ["[m_0_0] one", "[m_0_0] two"]


def test_drain_ends_also_where_somebody_writes_without_end(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    # A process that the stub left behind might write so.
    reads = 0

    def read(_: int, size: int) -> bytes:
        nonlocal reads
        reads += 1
        assert reads < 10_000
        return b"z" * size

    monkeypatch.setattr("moonpool.runtime.stubs.output.os.read", read)
    printed.output.drain()


def test_a_log_message_has_its_level_and_place(printed: Printed, caplog: pytest.LogCaptureFixture) -> None:
    printed.output.log(1, "careful\n\x1b[31mred\n", "/models/m/1/model.py", 12)
    assert printed.lines == ["[m_0_0] careful (model.py:12)", "[m_0_0] \\x1b[31mred (model.py:12)"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    printed.output.log(0, "nowhere", "", 0)
    assert printed.lines[-1] == "[m_0_0] nowhere"


def test_close_may_be_called_often(printed: Printed) -> None:
    printed.output.close()
    printed.output.close()
    printed.output.drain()
