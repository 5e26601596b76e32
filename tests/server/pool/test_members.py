"""A front end as the main process has it."""

from __future__ import annotations

import threading

import pytest

from moonpool.runtime.frontend.pool.member import Member
from moonpool.runtime.reactor import Reactor


def test_a_front_end_that_nobody_could_tell_anything_is_not_left_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "moonpool-front_end_0":
            raise RuntimeError("can't start new thread")
        start(thread)

    reactor = Reactor()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    try:
        with pytest.raises(OSError, match="can't start new thread"):
            Member("front_end_0", reactor, lambda *_: None, lambda *_: None)
    finally:
        reactor.close()
