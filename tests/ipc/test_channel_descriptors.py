"""Descriptors in packets: no process gets one for which it did not ask."""

from __future__ import annotations

import array
import os
import socket

import pytest

from moonpool.ipc.channel import MAX_PACKET_BYTES, Channel
from moonpool.ipc.errors import LocalProtocolError, PeerGone, RemoteProtocolError

Ends = tuple[Channel, Channel]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _ready(channel: Channel) -> bytes:
    packet = channel.receive_ready()
    assert packet is not None
    return packet


def test_descriptors_that_nobody_asked_for_are_dropped(ends: Ends) -> None:
    ours, theirs = ends
    before = _descriptors()
    for receive in (Channel.receive, _ready):
        watched, sent = os.pipe()
        theirs.send_fds(b"with a gift", sent)
        os.close(sent)
        assert receive(ours) == b"with a gift"

        # The end of file shows that no process has the other end any more.
        assert os.read(watched, 1) == b""
        os.close(watched)
    assert _descriptors() == before


def test_a_descriptor_that_is_asked_for_is_another_one_for_the_same_thing(ends: Ends) -> None:
    ours, theirs = ends
    reading, writing = os.pipe()
    ours.send_fds(b"take this", writing)
    packet, (received,) = theirs.receive_with_fds()
    os.write(received, b"through")

    assert packet == b"take this"
    assert received != writing
    assert not os.get_inheritable(received)
    assert os.read(reading, 7) == b"through"
    for fd in (reading, writing, received):
        os.close(fd)


def test_a_descriptor_that_is_closed_cannot_be_sent(ends: Ends) -> None:
    ours, theirs = ends

    with pytest.raises(LocalProtocolError, match="Bad file descriptor"):
        ours.send_fds(b"x", -1)
    assert theirs.receive_ready() is None


@pytest.mark.parametrize("count", [1, 16, 17, 200])
def test_more_descriptors_than_expected_do_not_leak(count: int) -> None:
    raw, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs = Channel(end)
    before = _descriptors()
    fds = array.array("i", [raw.fileno()] * count)
    raw.sendmsg([b"many"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    packet, received = theirs.receive_with_fds()

    assert packet == b"many"
    assert len(received) == min(count, 16) == _descriptors() - before
    for fd in received:
        os.close(fd)
    raw.close()
    theirs.close()


@pytest.mark.parametrize("packet", [b"", b"x" * (MAX_PACKET_BYTES + 1)], ids=["empty", "too large"])
def test_the_descriptors_of_a_packet_that_is_refused_are_closed(ends: Ends, packet: bytes) -> None:
    ours, theirs = ends
    before = _descriptors()
    ours.send_fds(packet, 0)

    with pytest.raises((PeerGone, RemoteProtocolError)):
        theirs.receive_with_fds()
    assert _descriptors() == before
