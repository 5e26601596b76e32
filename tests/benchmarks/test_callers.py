"""Callers in this process, as threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from moonpool.benchmarks.callers import measure
from moonpool.ipc.errors import MoonpoolError


def test_callers_for_whom_there_is_no_thread_are_told_of_and_nobody_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, before = threading.Thread.start, set(threading.enumerate())

    def start_some(thread: Any) -> None:
        if len(set(threading.enumerate()) - before) >= 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(MoonpoolError, match="no room for 5 threads of callers: can't start new"):
        measure(lambda: None, 5, 60.0)

    assert set(threading.enumerate()) <= before
