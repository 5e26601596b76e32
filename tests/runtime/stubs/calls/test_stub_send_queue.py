"""Messages to a stub that is behind with reading."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from tests.waiting import wait_until

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import calls_codec
from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import Kind, Side
from moonpool.ipc.port.calls import CallPort
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.model.request import WireTensor
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.stubs.allotment import Allotment
from moonpool.runtime.stubs.borrowed_blocks import BorrowedBlocks
from moonpool.runtime.stubs.calls.dispatcher import StubSendQueue


class Ends:
    """A send queue whose channel the reactor watches, and the messages that the other end reads."""

    def __init__(self) -> None:
        self.reactor = Reactor()
        self.channel, end = Channel.pair()
        self.peer = Channel(end)
        self.regions: dict[int, SharedRegion] = {}
        memory = Allotment(None, is_contained=False)
        first = memory.region(0, 1 << 16)
        self.regions[first.id] = first
        self.borrowed_blocks = BorrowedBlocks(
            lambda each, _: self.regions.update({each.id: each}), first, memory, print
        )
        port = CallPort(self.channel, self.borrowed_blocks, deque(), {}, WireTensor)
        self.queue = StubSendQueue(self.channel, self.reactor, port)
        self.errors: list[BaseException] = []
        self.reactor.watch(self.channel.fileno(), self._ready)
        self._codec = calls_codec(Side.STUB)

    def _ready(self) -> None:
        try:
            self.queue.flush()
        except RemoteProtocolError as error:
            self.errors.append(error)
            self.reactor.forget(self.channel.fileno())

    def send(self, number: int, text: str = "") -> None:
        self.queue.send((Kind.DONE, number, [1, text], {}), self.borrowed_blocks)

    def receive(self) -> list[object]:
        fields = self._codec.decode(self.peer.receive())
        if fields[0] == Kind.INDIRECT:
            region, offset, size_bytes = fields[1:]
            memory = self.regions[region].memory()
            fields = self._codec.decode(bytes(memory[offset : offset + size_bytes]))
            self.borrowed_blocks.take_back([(region, offset)])
        return fields

    def close(self) -> None:
        self.reactor.call_soon(lambda: self.reactor.forget(self.channel.fileno()))
        self.reactor.close()
        self.channel.close()
        self.peer.close()
        self.borrowed_blocks.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def test_messages_that_do_not_fit_the_socket_come_later_in_order(ends: Ends) -> None:
    for number in range(5000):
        ends.send(number)

    assert [ends.receive()[1] for _ in range(5000)] == list(range(5000))
    ends.send(5000)
    assert ends.receive()[1] == 5000
    assert ends.errors == []


def test_a_large_message_lies_in_memory_until_it_was_read(ends: Ends) -> None:
    ends.send(1, "x" * 100_000)

    assert ends.borrowed_blocks.is_kept
    assert ends.receive()[2] == [1, "x" * 100_000]
    assert not ends.borrowed_blocks.is_kept
    assert ends.borrowed_blocks.used_bytes == 0


def test_a_stub_that_reads_nothing_is_given_up_at_some_size(ends: Ends) -> None:
    number = 0
    while not ends.queue.is_full:
        number += 1
        ends.send(number, "x" * 30_000)
    assert ends.errors == []
    for more in range(number):
        ends.send(number + more, "x" * 30_000)

    def errors() -> list[BaseException]:
        ends.peer.receive_ready()  # this makes room in the socket
        return ends.errors

    (error,) = wait_until(errors)
    assert "bytes unread" in str(error)
