"""The port looks and changes in one step, also if garbage is collected or other threads run meanwhile."""

from __future__ import annotations

import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
from tests.ipc.port.both import Side, packed
from tests.runtime.lane.built import port_on, skip_without_compiled
from tests.waiting import wait_until

from moonpool.ipc.channel import Channel
from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import Kind
from moonpool.ipc.port import RuntimePort
from moonpool.runtime.model.request import Response
from moonpool.runtime.stubs.link import Link

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _with_the_port() -> None:
    skip_without_compiled()


@contextmanager
def collecting(interfere: Callable[[], None], number: int) -> Iterator[Callable[[], bool]]:
    """Run code at the collection of that number, as a destructor or another thread might. Returns whether it came so
    far.

    Up to 3.11, there is a collection at each allocation of a container.
    """
    thresholds, left = gc.get_threshold(), [number]

    def collected(phase: str, _: object) -> None:
        if phase == "start":
            left[0] -= 1
            if not left[0]:
                interfere()

    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        yield lambda: left[0] <= 0
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)


def side_with_a_known_answer() -> Side:
    side = Side(is_compiled=True)
    side.answered(packed(side.usual(4)))
    return side


def test_a_request_gets_no_second_outcome_while_its_answer_is_read() -> None:
    side = side_with_a_known_answer()
    try:
        for number in range(1, 500):
            packet = packed(side.usual(4))
            link, peer = side.pair.link, side.pair.peer
            outcomes: list[object] = []

            def end(link: Link = link, batch: int = peer.batch, outcomes: list[object] = outcomes) -> None:
                try:  # a stub that answers the last request apart from its batch, too
                    outcomes.append(link.replies.find(batch, 3, is_last=True))
                except RemoteProtocolError:
                    return

            peer.channel.send(packet)
            peer.conversation.turn = peer.conversation.after[Kind.ANSWER]
            link.wait()
            with collecting(end, number) as has_come:
                try:
                    outcomes += link.finish(side.requests)[3:]
                except RemoteProtocolError:
                    assert not isinstance(outcomes[0], Response)
            assert len(outcomes) == 1
            if not has_come():
                return
            side.pair.close()  # a link that broke serves no more
            side = side_with_a_known_answer()
    finally:
        side.pair.close()


def test_the_port_reads_from_the_channel_that_is_open_now() -> None:
    """A handler closes a channel while a thread waits for a packet there, and its number becomes another stub's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours)
    waiting = port_on(channel)
    waits: list[bool] = []
    others: list[socket.socket] = []

    def reuse() -> None:
        number = channel.fileno()
        channel.close()
        others.extend(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        assert number in [each.fileno() for each in others]
        for each in others:
            each.send(b"of another stub")

    with interrupting(reuse, waits) as has_run:
        # One call into C notes that it waits, and does: a handler that finds the note runs in the port.
        waits.extend(map(type(waiting).wait, notes(waits, waiting)))
        assert has_run()
    assert waits == [True, False]
    assert list(channel.inbox) == []
    for each in (theirs, *others):
        each.close()


def notes(waits: list[bool], waiting: RuntimePort) -> Iterator[RuntimePort]:
    waits.append(True)
    yield waiting


@contextmanager
def interrupting(code: Callable[[], None], waits: list[bool]) -> Iterator[Callable[[], bool]]:
    """Run code in the handler of a signal, which comes again until that was done, once something waits."""
    has_run = threading.Event()

    def handle(_: int, frame: FrameType | None) -> None:
        is_in_port = frame is not None and frame.f_code is not notes.__code__
        if waits and is_in_port and not has_run.is_set():
            code()
            has_run.set()

    def ring() -> bool:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return has_run.is_set()

    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=wait_until, args=(ring, PATIENCE_S))
    thread.start()
    try:
        yield has_run.is_set
    finally:
        thread.join(PATIENCE_S)
        signal.signal(signal.SIGUSR1, before)
