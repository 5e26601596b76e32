"""The main process's end of one front end: its process, its messages, its heartbeat."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict

import pytest
from tests.waiting import wait_until

from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.server.log import LogOptions
from moonpool.runtime.server.pool import front_end_process as members
from moonpool.runtime.server.pool.front_end_process import FrontEndProcess
from moonpool.runtime.server.pool.messages import Word

pytestmark = pytest.mark.promise("At the limits", "If no thread can be started …")


def test_a_front_end_that_nobody_could_tell_anything_is_not_left_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "moonpool-send-front_end_0":
            raise RuntimeError("can't start new thread")
        start(thread)

    reactor = Reactor()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    try:
        with pytest.raises(OSError, match="can't start new thread"):
            FrontEndProcess("front_end_0", reactor, lambda *_: None, lambda *_: None)
    finally:
        reactor.close()


def told(*message: object, contents: bytes) -> int:
    """Return the exit code of a front end that gets this message first, after its settings."""
    reactor, gone = Reactor(), threading.Event()
    settings = {"http": None, "grpc": None, "folder": "/nowhere", "log": asdict(LogOptions())}
    front_end = FrontEndProcess("front_end_0", reactor, lambda *_: None, lambda _: gone.set())
    try:
        front_end.begin(settings)
        fd = os.memfd_create("contents")
        os.write(fd, contents)
        os.lseek(fd, 0, os.SEEK_SET)
        front_end.send(*message, fds=(fd,))
        assert gone.wait(60.0)
        return front_end.process.wait(60.0) or 0
    finally:
        front_end.end()
        reactor.close()


@pytest.mark.promise("Front ends", "A front end that was stopped …")
@pytest.mark.parametrize(
    ("message", "contents"),
    [
        ((Word.MODEL, 1, 1, "standard", "triton"), b"{"),
        ((Word.MODEL, 1, 1, "standard", "triton"), b"{}"),
        # Only the other side may send the first one, and no table has the second one.
        ((Word.LISTENING,), b""),
        ((99,), b""),
    ],
)
def test_a_front_end_that_cannot_take_what_it_is_told_ends(
    message: tuple[object, ...], contents: bytes
) -> None:
    assert told(*message, contents=contents) == 1


@pytest.mark.promise("Front ends", "A front end that was stopped …")
def test_a_front_end_that_cannot_be_told_something_is_ended() -> None:
    reactor, gone = Reactor(), threading.Event()
    front_end = FrontEndProcess("front_end_0", reactor, lambda *_: None, lambda _: gone.set())
    try:
        front_end.send(Word.SERVE, "x" * 40_000, [])
        assert gone.wait(60.0)
    finally:
        front_end.end()
        reactor.close()


@pytest.mark.promise(
    "Front ends",
    "A front end that was stopped misses its heartbeat, and is ended and replaced. A front end "
    "that loses a message ends. One that computes, because of a large body for example, has two "
    "minutes for its heartbeat.",
)
@pytest.mark.parametrize(("is_busy", "turns"), [(False, 4), (True, 41)])
def test_one_that_does_not_answer_has_longer_while_it_computes(
    monkeypatch: pytest.MonkeyPatch, is_busy: bool, turns: int
) -> None:
    """A client may keep a front end busy by a large body, and must not be able to end it by that."""
    monkeypatch.setattr(members, "_BEAT_S", 0.01)
    monkeypatch.setattr(members, "_MOST_BEATS_AT_START", 3)
    monkeypatch.setattr(members, "_MOST_BUSY_BEATS", 40)
    looks = itertools.count(1)
    looked: list[int] = []

    def processor_time_s(_: int) -> float:
        looked.append(next(looks))
        return looked[-1] * (1.0 if is_busy else 0.0)

    monkeypatch.setattr(members, "_processor_time_s", processor_time_s)
    reactor, gone = Reactor(), threading.Event()
    front_end = FrontEndProcess("front_end_0", reactor, lambda *_: None, lambda _: gone.set())
    try:
        os.kill(front_end.process.pid, signal.SIGSTOP)
        settings = {"http": None, "grpc": None, "folder": "/nowhere", "log": asdict(LogOptions())}
        front_end.begin(settings)
        assert gone.wait(60.0)
        assert len(looked) == turns
    finally:
        front_end.end()
        reactor.close()


def test_the_processor_time_of_a_process_is_read() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            wait_until(lambda: members._processor_time_s(process.pid) > 0.2)
        finally:
            process.kill()
    assert members._processor_time_s(process.pid) == 0.0
