"""Every message of a stub is charged to its budget, even while it is over budget."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from moonpool.runtime.model.budgets import MESSAGE_BYTES, MESSAGES_PER_S, PAUSE_MS
from moonpool.runtime.stubs import control
from moonpool.runtime.stubs.control import MessageRateLimiter

pytestmark = pytest.mark.promise("Containment", "The runtime and the library …")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(control, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def heard_in(seconds: float, size_bytes: int, clock: SimpleNamespace) -> int:
    """Return how many messages of that size are read in so much time from a stub that sends without end."""
    pauses: list[float] = []
    limiter = MessageRateLimiter(cast(Any, SimpleNamespace(pause=lambda _, delay_s: pauses.append(delay_s))), 0)
    count = 0
    while clock.s < seconds:
        limiter.took(size_bytes)
        limiter.settle()
        count += 1
        clock.s += pauses.pop() if pauses else 0.0
    return count


@pytest.mark.parametrize("size_bytes", [0, 512, 32 << 10, 1 << 20, 64 << 20])
def test_messages_of_any_size_are_heard_at_one_rate(clock: SimpleNamespace, size_bytes: int) -> None:
    seconds = 20.0
    cost = 1 + size_bytes // MESSAGE_BYTES

    count = heard_in(seconds, size_bytes, clock)

    # The saved budget comes on top, and so does the last message.
    most = (seconds + 1) * MESSAGES_PER_S + cost
    assert 0.9 * seconds * MESSAGES_PER_S < count * cost <= most + cost


def test_a_stub_within_its_budget_never_waits() -> None:
    limiter = MessageRateLimiter(cast(Any, None), 0)
    for _ in range(MESSAGES_PER_S // 2):
        limiter.took(100)
        limiter.settle()


@pytest.mark.usefixtures("clock")
def test_a_wait_is_long_enough_to_be_worth_it() -> None:
    pauses: list[float] = []
    limiter = MessageRateLimiter(cast(Any, SimpleNamespace(pause=lambda _, delay_s: pauses.append(delay_s))), 0)
    limiter.took(0, MESSAGES_PER_S + 1)
    limiter.settle()
    assert pauses == [PAUSE_MS / 1000]
