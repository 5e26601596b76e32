"""A timer goes off at its time, not before, and as often as it is set."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator

import pytest

from moonpool.runtime.process.reactor import Timer


@pytest.fixture
def timer() -> Iterator[Timer]:
    timer = Timer()
    yield timer
    timer.close()


def is_readable(timer: Timer, timeout_ms: float = 0) -> bool:
    poll = select.poll()
    poll.register(timer.fileno(), select.POLLIN)
    return bool(poll.poll(timeout_ms))


def test_it_goes_off_at_its_time_and_not_before(timer: Timer) -> None:
    when = time.monotonic() + 0.003
    timer.set(when)
    assert is_readable(timer, 10_000)
    # A float holds the clock to some hundred nanoseconds.
    assert time.monotonic() >= when - 1e-6


def test_a_time_that_is_over_makes_it_go_off_at_once(timer: Timer) -> None:
    for when in (time.monotonic() - 1.0, 0.0, 1e-12):
        timer.set(when)
        assert is_readable(timer, 10_000)
        timer.clear()


def test_after_clear_it_is_silent_and_can_be_set_to_the_same_time_again(timer: Timer) -> None:
    when = time.monotonic()
    for _ in range(3):
        timer.set(when)
        assert is_readable(timer, 10_000)
        timer.clear()
        assert not is_readable(timer)


def test_clear_before_it_went_off_does_not_block(timer: Timer) -> None:
    timer.set(time.monotonic() + 3600)
    timer.clear()
    assert not is_readable(timer)


def test_none_switches_it_off(timer: Timer) -> None:
    timer.set(time.monotonic() + 0.001)
    timer.set(None)
    assert not is_readable(timer, 20)


def test_another_time_replaces_the_one_before(timer: Timer) -> None:
    timer.set(time.monotonic() + 3600)
    timer.set(time.monotonic() + 0.001)
    assert is_readable(timer, 10_000)


def test_a_time_that_is_very_far_away_is_no_error(timer: Timer) -> None:
    for when in (1e12, 1e18, 1e300, float("inf")):
        timer.set(when)
        assert not is_readable(timer)
