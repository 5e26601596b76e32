"""Signals whose handlers raise, while a channel waits for a packet."""

from __future__ import annotations

import random
import select
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest
from tests.waiting import is_blocked, wait_until

from moonpool.ipc.channel import Channel

Ends = tuple[Channel, Channel]


class Rang(Exception):
    """Raised by the signal handler."""


@pytest.fixture
def ringing() -> Iterator[list[int]]:
    """While the list says [1], the next SIGUSR1 raises `Rang` in the main thread."""
    armed = [0]

    def handle(_number: int, _frame: FrameType | None) -> None:
        if armed[0]:
            armed[0] = 0
            raise Rang

    before = signal.signal(signal.SIGUSR1, handle)
    yield armed
    armed[0] = 0
    signal.signal(signal.SIGUSR1, before)


def test_an_exception_of_a_signal_handler_ends_the_wait(ends: Ends, ringing: list[int]) -> None:
    ours, theirs = ends
    main = threading.main_thread()

    def ring() -> None:
        wait_until(lambda: ringing[0] and is_blocked(main), what="the receiver to block")
        # Python does not notice a signal that comes just before it waits in the kernel.
        while ringing[0]:
            signal.pthread_kill(main.ident or 0, signal.SIGUSR1)
            never.wait(0.01)

    def receive() -> None:
        ringing[0] = 1
        ours.receive()

    never = threading.Event()
    thread = threading.Thread(target=ring)
    thread.start()
    with pytest.raises(Rang):
        receive()
    thread.join()
    theirs.send(b"afterwards")

    assert ours.receive() == b"afterwards"


def test_an_exception_of_a_signal_handler_loses_no_packet(ends: Ends, ringing: list[int]) -> None:
    rounds = 3000
    ours, theirs = ends
    main = threading.main_thread().ident or 0
    chance = random.Random(1)
    rang = 0

    def send_and_ring() -> None:
        for number in range(rounds):
            rings_first = chance.random() < 0.5
            if rings_first:
                signal.pthread_kill(main, signal.SIGUSR1)
            theirs.send_waiting(b"%d" % number)
            if not rings_first:
                signal.pthread_kill(main, signal.SIGUSR1)
            if not select.select([theirs], [], [], 60)[0]:
                theirs.wake()  # the packet was lost: end the wait for it
                return
            theirs.receive()

    thread = threading.Thread(target=send_and_ring)
    thread.start()
    received: list[int] = []
    while len(received) < rounds:
        try:
            ringing[0] = 1
            ours.wait()
            ringing[0] = 0
        except Rang:
            rang += 1
            continue
        received.append(int(ours.receive()))
        ours.send(b"next")
    thread.join()

    assert received == list(range(rounds))
    assert rang > rounds / 100  # or nothing was tried
