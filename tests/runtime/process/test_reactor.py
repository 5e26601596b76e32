"""The reactor runs what it is given, in order, at its time, on its one thread, and survives all of it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
from tests.leaks import Holdings
from tests.runtime.interrupting import Alarm, Interrupted, interrupted_everywhere
from tests.waiting import wait_until

from moonpool.runtime.process.reactor import Reactor

PATIENCE_S = 60.0


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor("test-reactor")
    yield reactor
    reactor.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    yield read_fd, write_fd
    os.close(read_fd)
    os.close(write_fd)


def finish(reactor: Reactor) -> None:
    """Waits until the reactor has done what it was given before."""
    done = threading.Event()
    reactor.call_soon(done.set)
    assert done.wait(PATIENCE_S)


def test_callbacks_run_in_the_order_of_the_calls_on_a_thread_of_its_own(reactor: Reactor) -> None:
    seen: list[int] = []
    threads: set[str] = set()

    def note(number: int) -> None:
        seen.append(number)
        threads.add(threading.current_thread().name)

    for i in range(100):
        reactor.call_soon(partial(note, i))
    finish(reactor)
    assert seen == list(range(100))
    assert threads == {"test-reactor"}


def test_a_callback_may_ask_for_another_one(reactor: Reactor) -> None:
    seen: list[str] = []
    done = threading.Event()

    def first() -> None:
        reactor.call_soon(second)
        seen.append("first")

    def second() -> None:
        seen.append("second")
        done.set()

    reactor.call_soon(first)
    assert done.wait(PATIENCE_S)
    assert seen == ["first", "second"]


def test_callbacks_that_ask_for_themselves_do_not_keep_others_waiting(reactor: Reactor, pipe: tuple[int, int]) -> None:
    seen = threading.Event()
    stop = threading.Event()

    def again() -> None:
        if not stop.is_set():
            reactor.call_soon(again)

    reactor.watch(pipe[0], seen.set)
    reactor.call_soon(again)
    os.write(pipe[1], b"x")
    try:
        assert seen.wait(PATIENCE_S)
        at_a_time = threading.Event()
        reactor.call_later(0.001, at_a_time.set)
        assert at_a_time.wait(PATIENCE_S)
    finally:
        stop.set()
    os.read(pipe[0], 1)
    reactor.call_soon(lambda: reactor.forget(pipe[0]))
    finish(reactor)


def test_many_callbacks_do_not_keep_a_descriptor_waiting_for_all_of_them(
    reactor: Reactor, pipe: tuple[int, int]
) -> None:
    order: list[str] = []
    held = threading.Event()
    reactor.watch_once(pipe[0], lambda: order.append("descriptor"))
    reactor.call_soon(lambda: held.wait(PATIENCE_S))
    for _ in range(1000):
        reactor.call_soon(lambda: order.append("callback"))
    os.write(pipe[1], b"x")
    held.set()
    finish(reactor)

    assert order.count("callback") == 1000
    assert order.index("descriptor") < 500
    reactor.call_soon(lambda: reactor.forget(pipe[0]))
    finish(reactor)


def test_a_thread_waits_for_what_the_reactor_runs_but_not_for_ever(reactor: Reactor) -> None:
    ran: list[str] = []
    held = threading.Event()

    assert reactor.run(lambda: ran.append("first"), PATIENCE_S)
    reactor.call_soon(lambda: held.wait(PATIENCE_S))
    assert not reactor.run(lambda: ran.append("late"), 0.01)
    held.set()
    assert reactor.run(lambda: reactor.run(lambda: ran.append("inside"), 0.0), PATIENCE_S)

    assert ran == ["first", "late", "inside"]


def test_timers_run_in_the_order_of_their_times_and_not_before(reactor: Reactor) -> None:
    begin = time.monotonic()
    seen: list[tuple[str, float]] = []
    done = threading.Event()

    def begins() -> None:
        # On the reactor's thread, and from one moment on: nothing runs before all are there, however long that takes.
        for name, delay_s in (("c", 0.03), ("a", 0.0005), ("b", 0.01)):
            reactor.call_at(
                begin + delay_s,
                lambda name=name: seen.append((name, time.monotonic() - begin)),  # type: ignore[misc]
            )
        reactor.call_at(begin + 0.031, done.set)

    reactor.call_soon(begins)
    assert done.wait(PATIENCE_S)
    assert [name for name, _ in seen] == ["a", "b", "c"]
    for (_, at_s), delay_s in zip(seen, (0.0005, 0.01, 0.03), strict=True):
        assert at_s >= delay_s - 1e-5


def test_a_time_that_is_over_is_now(reactor: Reactor) -> None:
    done = threading.Event()
    reactor.call_at(0.0, done.set)
    assert done.wait(PATIENCE_S)


def test_a_descriptor_is_watched_until_it_is_forgotten(reactor: Reactor, pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    seen: list[bytes] = []
    reactor.watch(read_fd, lambda: seen.append(os.read(read_fd, 100)))
    for text in (b"one", b"two"):
        os.write(write_fd, text)
        wait_until(lambda text=text: text in seen)  # type: ignore[misc]
    reactor.call_soon(lambda: reactor.forget(read_fd))
    finish(reactor)
    os.write(write_fd, b"three")
    finish(reactor)
    assert seen == [b"one", b"two"]


def test_a_descriptor_that_is_watched_once_is_reported_once(reactor: Reactor, pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    seen: list[int] = []
    for i in range(3):
        reactor.watch_once(read_fd, lambda i=i: seen.append(i))  # type: ignore[misc]
        finish(reactor)
        os.write(write_fd, b"x")
        wait_until(lambda i=i: len(seen) == i + 1)  # type: ignore[misc]
        finish(reactor)  # the descriptor is still readable, and no callback runs
        assert seen == list(range(i + 1))
        os.read(read_fd, 1)


@pytest.mark.promise(
    "What a stub says",
    "A stub that sends more messages or calls than it may in a second has to wait. Nothing else waits for it.",
)
def test_a_paused_descriptor_is_read_later(reactor: Reactor, pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    seen: list[float] = []

    def read() -> None:
        os.read(read_fd, 1)
        seen.append(time.monotonic())
        reactor.pause(read_fd, 0.05)

    reactor.watch(read_fd, read)
    os.write(write_fd, b"ab")
    wait_until(lambda: len(seen) == 2)
    assert seen[1] - seen[0] >= 0.05 - 1e-5
    reactor.call_soon(lambda: reactor.forget(read_fd))
    finish(reactor)


def check_nothing_is_kept(reactor: Reactor, fd: int) -> None:
    """Watch a forgotten descriptor anew, which can be read and written to, and check that a pause is all it has."""
    seen: list[None] = []
    done = threading.Event()

    def again() -> None:
        reactor.watch(fd, lambda: seen.append(None))
        reactor.call_soon(lambda: reactor.pause(fd, 3600.0))
        reactor.call_later(0.01, done.set)

    reactor.call_soon(again)
    assert done.wait(PATIENCE_S)
    assert seen == []
    reactor.call_soon(lambda: reactor.forget(fd))
    finish(reactor)


@pytest.mark.promise("What a stub says", "A stub that sends more …")
def test_a_paused_descriptor_can_be_written_to_and_forgotten(reactor: Reactor) -> None:
    ours, theirs = socket.socketpair()
    rooms: list[float] = []

    def ready() -> None:
        rooms.append(time.monotonic())
        reactor.watch_room(ours.fileno(), wanted=len(rooms) < 3)

    def begin() -> None:
        reactor.pause(ours.fileno(), 0.01)
        reactor.watch_room(ours.fileno(), wanted=True)

    def end() -> None:
        reactor.watch_room(ours.fileno(), wanted=True)
        reactor.pause(ours.fileno(), 0.001)
        reactor.forget(ours.fileno())

    with ours, theirs:
        reactor.watch(ours.fileno(), ready)
        reactor.call_soon(begin)
        wait_until(lambda: len(rooms) == 3)
        theirs.send(b"x")
        wait_until(lambda: len(rooms) > 3)
        reactor.call_soon(end)
        check_nothing_is_kept(reactor, ours.fileno())


def test_room_of_what_was_forgotten_is_not_waited_for(reactor: Reactor) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reactor.watch(ours.fileno(), lambda: None)
        reactor.call_soon(lambda: reactor.forget(ours.fileno()))
        reactor.call_soon(lambda: reactor.watch_room(ours.fileno(), wanted=True))
        check_nothing_is_kept(reactor, ours.fileno())


def test_the_end_of_a_peer_is_reported(reactor: Reactor) -> None:
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    done = threading.Event()
    reactor.watch_once(read_fd, done.set)
    os.close(write_fd)
    assert done.wait(PATIENCE_S)
    finish(reactor)
    os.close(read_fd)


def test_a_descriptor_that_was_forgotten_in_the_same_round_is_not_reported(reactor: Reactor) -> None:
    pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
    seen: list[int] = []

    def told(mine: int, other: int) -> None:
        seen.append(mine)
        reactor.forget(mine)
        reactor.forget(other)

    (one, _), (other, _) = pipes
    proceed = threading.Event()
    reactor.call_soon(lambda: proceed.wait(PATIENCE_S))
    reactor.watch(one, lambda: told(one, other))
    reactor.watch(other, lambda: told(other, one))
    for _, write_fd in pipes:
        os.write(write_fd, b"x")
    proceed.set()
    wait_until(lambda: seen)
    finish(reactor)
    assert len(seen) == 1
    for ends in pipes:
        for fd in ends:
            os.close(fd)


@pytest.mark.parametrize("error", [ValueError("as planned"), SystemExit("as planned")], ids=repr)
def test_an_exception_of_a_callback_is_logged_and_the_reactor_goes_on(
    reactor: Reactor, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    reactor.call_soon(fail)
    reactor.call_later(0.0, fail)
    finish(reactor)
    finish(reactor)
    assert caplog.text.count("as planned") >= 2
    assert "a callback of the reactor failed" in caplog.text


def test_watching_what_is_no_descriptor_harms_nobody(reactor: Reactor, caplog: pytest.LogCaptureFixture) -> None:
    reactor.watch(-1, lambda: None)
    finish(reactor)
    assert "a callback of the reactor failed" in caplog.text


def test_close_runs_what_was_to_run_soon_and_may_be_called_often() -> None:
    reactor = Reactor()
    seen: list[int] = []
    for i in range(10):
        reactor.call_soon(lambda i=i: seen.append(i))  # type: ignore[misc]
    reactor.close()
    reactor.close()
    assert seen == list(range(10))


def test_a_close_that_is_interrupted_at_any_point_is_done_by_the_next_one() -> None:
    before = len(os.listdir("/proc/self/fd"))
    made = [Reactor()]

    def check() -> None:
        made.pop().close()
        assert len(os.listdir("/proc/self/fd")) == before
        made.append(Reactor())

    # Where the reactor is compiled, there are fewer points.
    assert interrupted_everywhere(lambda: made[0].close(), check) > 5
    made[0].close()


def test_a_close_waits_for_the_thread_after_one_that_was_interrupted() -> None:
    reactor, goes_on = Reactor(), threading.Event()
    done: list[None] = []

    def work() -> None:
        goes_on.wait(PATIENCE_S)
        done.append(None)

    reactor.call_soon(work)
    with pytest.raises(Interrupted), Alarm(Interrupted, 0.05):
        reactor.close()
    timer = threading.Timer(0.05, goes_on.set)
    timer.start()
    reactor.close()
    assert done
    timer.join()


def test_close_does_not_wait_for_what_is_to_run_later() -> None:
    reactor = Reactor()
    reactor.call_later(3600.0, lambda: None)
    reactor.close()


def test_a_call_after_close_touches_no_file_that_has_the_old_number() -> None:
    before = Holdings()
    reactor = Reactor()
    made = Holdings().descriptors
    (number,) = [fd for fd in made.keys() - before.descriptors if made[fd] == "anon_inode:[eventfd]"]
    reactor.close()
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    # The wake-up's number is very likely among the new ones; make sure that it is.
    spare = os.dup2(write_fd, number)
    try:
        reactor.call_soon(lambda: None)
        with pytest.raises(BlockingIOError):
            os.read(read_fd, 8)
    finally:
        for fd in {read_fd, write_fd, spare}:
            os.close(fd)


def test_it_may_be_closed_from_its_own_thread() -> None:
    reactor = Reactor()
    reactor.call_soon(reactor.close)
    wait_until(lambda: reactor.has_ended)
    reactor.close()
