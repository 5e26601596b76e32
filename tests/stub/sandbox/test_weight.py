"""The niceness of a session, where the kernel takes few changes a second."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator

import pytest

from moonpool.stub.sandbox import limits


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The errors with which the kernel refuses the next changes of a nice process; it takes those after them."""
    waiting: list[int] = []

    def opened(path: str, mode: str) -> io.StringIO:
        assert (path, mode) == ("/proc/self/autogroup", "w")
        if waiting:
            number = waiting.pop(0)
            raise OSError(number, os.strerror(number))
        return io.StringIO()

    monkeypatch.setattr(limits, "open", opened, raising=False)
    monkeypatch.setattr(limits, "_AGAIN_S", 0.0)
    monkeypatch.setattr(os, "getpriority", lambda *_: 5)
    yield waiting
    assert waiting == []


def test_a_change_that_comes_too_soon_is_tried_again(refusals: list[int]) -> None:
    refusals += [errno.EAGAIN] * 3

    assert limits.weigh_session() == ""


def test_a_change_that_is_refused_is_not_tried_again(refusals: list[int]) -> None:
    refusals += [errno.EPERM]

    assert limits.weigh_session() == "niceness 5 of its session: [Errno 1] Operation not permitted"


def test_a_change_that_comes_too_soon_again_and_again_is_given_up(
    refusals: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals += [errno.EAGAIN]
    monkeypatch.setattr(limits, "_WEIGHING_S", -1.0)

    assert "Resource temporarily unavailable" in limits.weigh_session()


def test_a_kernel_without_such_groups_asks_for_nothing(refusals: list[int]) -> None:
    refusals += [errno.ENOENT]

    assert limits.weigh_session() == ""
