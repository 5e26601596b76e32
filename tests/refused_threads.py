"""Threads that cannot be started, as at the limit of the user."""

from __future__ import annotations

import threading

import pytest


def refuse_threads(patch: pytest.MonkeyPatch, beginning: str = "") -> list[str]:
    """Refuse threads whose names begin so from now on. Returns the names of those that were refused, which grows."""
    start = threading.Thread.start
    refused: list[str] = []

    def start_others(thread: threading.Thread) -> None:
        if thread.name.startswith(beginning):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", start_others)
    return refused
