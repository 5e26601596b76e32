"""The queue of packets to the runtime, while signal handlers raise and other packets come in between."""

from __future__ import annotations

import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest

from moonpool.ipc.channel import Channel
from moonpool.ipc.errors import PeerGone
from moonpool.stub.peers.send_queue import SendQueue


class Interrupted(Exception):
    """A signal handler has raised."""


class Queue:
    """A queue, and the end of its channel at the runtime."""

    def __init__(self, packet_of: Callable[[deque[Any]], tuple[bytes, int]] | None = None) -> None:
        self.runtime, theirs = Channel.pair()
        self.channel = Channel(theirs)
        self.gone: list[None] = []
        self.queue = SendQueue(self.channel, lambda: self.gone.append(None), packet_of)

    def arrived(self) -> list[bytes]:
        """Return the packets that have arrived since the last call."""
        packets = []
        while (packet := self.runtime.receive_ready()) is not None:
            packets.append(packet)
        return packets

    def fill(self) -> int:
        """Send packets until no other one has space. Return their number."""
        for count in range(100_000):
            try:
                self.channel.send(b"other")
            except BlockingIOError:
                return count
        raise AssertionError("the socket is never full")

    def close(self) -> None:
        self.runtime.close()
        self.channel.close()


@pytest.fixture
def queue() -> Iterator[Queue]:
    made = Queue()
    yield made
    made.close()


@pytest.fixture
def gathering() -> Iterator[Queue]:
    def gather(items: deque[Any]) -> tuple[bytes, int]:
        return b"+".join(items), len(items)

    made = Queue(gather)
    yield made
    made.close()


def interrupt_while(is_due: Callable[[], object], work: Callable[[], object]) -> None:
    """Work until a signal handler raises, which it does at each signal at which it `is_due`."""

    def working() -> None:
        work()

    def handle(_signal: int, frame: FrameType | None) -> None:
        codes = []
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        # On a busy machine a signal may come while another one is handled, or after the work.
        if working.__code__ in codes and handle.__code__ not in codes and is_due():
            raise Interrupted

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        with pytest.raises(Interrupted):
            working()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_handler_that_raises_while_the_socket_is_full_loses_no_packet(queue: Queue) -> None:
    others = queue.fill()
    interrupt_while(lambda: len(queue.queue), lambda: queue.queue.put(b"first"))
    assert queue.arrived() == [b"other"] * others
    queue.queue.put(b"second")
    assert queue.arrived() == [b"first", b"second"]
    assert not queue.queue


def test_what_other_threads_left_to_an_interrupted_one_is_sent(queue: Queue) -> None:
    others = queue.fill()
    read: list[bytes] = []

    def leave_one() -> bool:
        """Leave a packet to the thread that has the turn, which is interrupted then."""
        if read:
            return False
        thread = threading.Thread(target=queue.queue.put, args=(b"left",))
        thread.start()
        while thread.is_alive():
            # If the signal came before the turn was taken, it is this thread that waits for space.
            read.extend(queue.arrived())
            thread.join(0.01)
        read.extend(queue.arrived())
        return True

    interrupt_while(lambda: len(queue.queue) and leave_one(), lambda: queue.queue.put(b"first"))
    assert [*read, *queue.arrived()] == [*[b"other"] * others, b"first", b"left"]


def test_items_of_a_packet_stay_together_until_it_is_sent(gathering: Queue) -> None:
    others = gathering.fill()
    for item in (b"a", b"b"):
        interrupt_while(lambda: len(gathering.queue), partial(gathering.queue.put, item))
    assert gathering.arrived() == [b"other"] * others
    gathering.queue.put(b"c")
    assert gathering.arrived() == [b"a+b+c"]
    assert not gathering.queue


def calls_of(work: Callable[[], object], raise_at: int) -> int:
    """Work, and raise at the end of so many calls, where the interpreter runs signal handlers. Return the number of
    calls.
    """
    count = 0

    def look(_frame: FrameType, event: str, _what: object) -> None:
        nonlocal count
        if event in ("call", "c_return"):
            count += 1
            if count == raise_at:
                raise Interrupted

    sys.setprofile(look)
    try:
        work()
    except Interrupted:
        pass
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kind", ["queue", "gathering"])
def test_a_handler_that_raises_anywhere_neither_loses_nor_repeats_a_packet(
    kind: str, request: pytest.FixtureRequest
) -> None:
    queue: Queue = request.getfixturevalue(kind)
    calls = calls_of(lambda: queue.queue.put(b"calls"), 0)
    assert calls > 5
    queue.arrived()
    for moment in range(1, calls + 1):
        items = [b"%d first" % moment, b"%d second" % moment]
        calls_of(partial(queue.queue.put, items[0]), moment)
        queue.queue.put(items[1])
        arrived = b"+".join(queue.arrived()).split(b"+")
        # It may have raised before the queue had the item.
        assert arrived in (items, items[1:])
        assert len(arrived) == 2 or moment < 3


def test_packets_for_a_peer_that_is_gone_are_dropped_and_each_is_noted(queue: Queue) -> None:
    queue.runtime.close()
    for _ in range(3):
        queue.queue.put(b"late")
    assert len(queue.gone) == 3
    assert not queue.queue
    with pytest.raises(PeerGone):
        queue.channel.send_waiting(b"late")
