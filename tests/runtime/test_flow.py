"""A stub pays for all that it says, even while it is over budget."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from moonpool.runtime import flow as flow_module
from moonpool.runtime.budgets import MESSAGE_BYTES, MESSAGES_PER_S, PAUSE_MS
from moonpool.runtime.flow import Flow


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(flow_module, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def heard_in(seconds: float, size_bytes: int, clock: SimpleNamespace) -> int:
    """How many messages of that size are heard in so much time, where the stub says them without end."""
    pauses: list[float] = []
    flow = Flow(cast(Any, SimpleNamespace(pause=lambda _, delay_s: pauses.append(delay_s))), 0)
    count = 0
    while clock.s < seconds:
        flow.took(size_bytes)
        flow.settle()
        count += 1
        clock.s += pauses.pop() if pauses else 0.0
    return count


@pytest.mark.parametrize("size_bytes", [0, 512, 32 << 10, 1 << 20, 64 << 20])
def test_messages_of_any_size_are_heard_at_one_rate(
    clock: SimpleNamespace, size_bytes: int
) -> None:
    seconds = 20.0
    cost = 1 + size_bytes // MESSAGE_BYTES

    count = heard_in(seconds, size_bytes, clock)

    # What was saved up comes on top, and so does the last message.
    most = (seconds + 1) * MESSAGES_PER_S + cost
    assert 0.9 * seconds * MESSAGES_PER_S < count * cost <= most + cost


def test_who_says_little_never_waits() -> None:
    flow = Flow(cast(Any, None), 0)
    for _ in range(MESSAGES_PER_S // 2):
        flow.took(100)
        flow.settle()


@pytest.mark.usefixtures("clock")
def test_a_wait_is_long_enough_to_be_worth_it() -> None:
    pauses: list[float] = []
    flow = Flow(cast(Any, SimpleNamespace(pause=lambda _, delay_s: pauses.append(delay_s))), 0)
    flow.took(0, MESSAGES_PER_S + 1)
    flow.settle()
    assert pauses == [PAUSE_MS / 1000]
