"""Tests that changes of metrics are added up in order, wherever they come from."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.waiting import wait_until

from moonpool.ipc.messages import INCREMENT, MAX_METRIC_CHANGES, MAX_OBSERVATIONS, OBSERVE, SET
from moonpool.ipc.signals import at_once
from moonpool.stub.peers.control import MetricChanges

pytestmark = pytest.mark.promise(
    "Metrics", "Changes from threads, finalizers and forks are added up in order, and none is lost."
)


class Sent:
    """Keeps what was sent, message by message."""

    def __init__(self) -> None:
        self.messages: list[tuple[list[Any], list[int]]] = []

    def __call__(self, rows: list[Any], dropped: list[int], *steps: Callable[[], object]) -> None:
        at_once(*steps, partial(self.messages.append, (rows, dropped)))

    @property
    def rows(self) -> list[Any]:
        return [row for rows, _ in self.messages for row in rows]

    @property
    def dropped(self) -> list[int]:
        return [number for _, dropped in self.messages for number in dropped]


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def changes(sent: Sent) -> MetricChanges:
    return MetricChanges(sent)


def test_a_million_increments_are_one_message(changes: MetricChanges, sent: Sent) -> None:
    for _ in range(1_000_000):
        changes.add(1, INCREMENT, 1.0)
    changes.flush()

    assert sent.messages == [([(1, INCREMENT, 1_000_000.0, 1)], [])]


def test_a_set_forgets_what_was_before_and_keeps_what_comes_after(changes: MetricChanges, sent: Sent) -> None:
    for operation, value in ((INCREMENT, 5.0), (SET, 1.0), (INCREMENT, 2.0), (INCREMENT, -4.0)):
        changes.add(1, operation, value)
    changes.flush()

    assert sent.rows == [(1, SET, -1.0, 1)]


def test_equal_observations_are_counted(changes: MetricChanges, sent: Sent) -> None:
    for value in (1.0, 2.0, 1.0, 1.0):
        changes.add(7, OBSERVE, value)
    changes.flush()

    assert sorted(sent.rows) == [(7, OBSERVE, 1.0, 3), (7, OBSERVE, 2.0, 1)]


def test_nothing_is_sent_where_there_is_nothing(changes: MetricChanges, sent: Sent) -> None:
    changes.flush()
    changes.add(1, SET, 1.0)
    changes.flush()
    changes.flush()

    assert len(sent.messages) == 1


def test_a_metric_is_dropped_after_its_changes(changes: MetricChanges, sent: Sent) -> None:
    count = 2 * MAX_METRIC_CHANGES + 1
    for number in range(count):
        changes.add(number, SET, 0.0)
        changes.drop(number)
    changes.flush()

    assert all(len(rows) <= MAX_METRIC_CHANGES for rows, _ in sent.messages)
    assert all(len(dropped) <= MAX_METRIC_CHANGES for _, dropped in sent.messages)
    first = next(index for index, (_, dropped) in enumerate(sent.messages) if dropped)
    assert not any(rows for rows, _ in sent.messages[first + 1 :])
    assert [row[0] for row in sent.rows] == sent.dropped == list(range(count))


def test_changes_are_sent_soon_without_a_flush(changes: MetricChanges, sent: Sent) -> None:
    changes.start()
    changes.add(1, SET, 1.0)
    wait_until(lambda: sent.rows == [(1, SET, 1.0, 1)])
    changes.drop(1)
    wait_until(lambda: sent.dropped == [1])
    # One thread serves for the life of a stub.
    assert [each.name for each in threading.enumerate()].count("moonpool-metrics") == 1


def test_a_finalizer_may_come_at_any_moment(changes: MetricChanges, sent: Sent) -> None:
    class Dropped:
        def __init__(self, number: int) -> None:
            self.me, self.number = self, number

        def __del__(self) -> None:
            changes.add(self.number, INCREMENT, 1.0)
            changes.drop(self.number)
            changes.flush()

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for number in range(300):
            Dropped(number)
            changes.add(number, INCREMENT, 1.0)
            changes.flush()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    changes.flush()

    assert sorted(sent.dropped) == list(range(300))


def test_threads_lose_nothing(changes: MetricChanges, sent: Sent) -> None:
    def count() -> None:
        for _ in range(100_000):
            changes.add(1, INCREMENT, 1.0)

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        changes.flush()
    for thread in threads:
        thread.join()
    changes.flush()

    assert sum(value for _, _, value, _ in sent.rows) == 300_000


def test_more_observations_than_a_message_may_have_are_several_messages(changes: MetricChanges, sent: Sent) -> None:
    for number in range(MAX_OBSERVATIONS + 10):
        changes.add(1 + number % 2, OBSERVE, 0.5)
    changes.flush()

    counts = [sum(count for *_, count in rows) for rows, _ in sent.messages]
    assert counts == [MAX_OBSERVATIONS, 10]
    of_each = [sum(row[3] for row in sent.rows if row[0] == metric) for metric in (1, 2)]
    assert of_each == [MAX_OBSERVATIONS // 2 + 5] * 2
