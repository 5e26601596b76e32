"""A front end as the main process has it."""

from __future__ import annotations

import os
import threading
from dataclasses import asdict

import pytest

from moonpool.runtime.frontend.pool.member import Member
from moonpool.runtime.frontend.pool.messages import Word
from moonpool.runtime.reactor import Reactor
from moonpool.runtime.server.log_lines import LogOptions


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


def told(*message: object, contents: bytes) -> int:
    """The exit code of a front end that hears this first, after its settings."""
    reactor, gone = Reactor(), threading.Event()
    settings = {"http": None, "grpc": None, "folder": "/nowhere", "log": asdict(LogOptions())}
    member = Member("front_end_0", reactor, lambda *_: None, lambda _: gone.set())
    try:
        member.begin(settings)
        fd = os.memfd_create("contents")
        os.write(fd, contents)
        os.lseek(fd, 0, os.SEEK_SET)
        member.tell(*message, fds=(fd,))
        assert gone.wait(30.0)
        return member.process.wait(30.0) or 0
    finally:
        member.end()
        reactor.close()


@pytest.mark.parametrize(
    ("message", "contents"),
    [
        ((Word.MODEL, 1, 1, "standard"), b"{"),
        ((Word.MODEL, 1, 1, "standard"), b"{}"),
        # What only the other side may say, and what no table describes.
        ((Word.LISTENING,), b""),
        ((99,), b""),
    ],
)
def test_a_front_end_that_cannot_take_what_it_is_told_ends(
    message: tuple[object, ...], contents: bytes
) -> None:
    assert told(*message, contents=contents) == 1


def test_a_front_end_that_cannot_be_told_something_is_ended() -> None:
    reactor, gone = Reactor(), threading.Event()
    member = Member("front_end_0", reactor, lambda *_: None, lambda _: gone.set())
    try:
        member.tell(Word.SERVE, "x" * 40_000, [])
        assert gone.wait(30.0)
    finally:
        member.end()
        reactor.close()
