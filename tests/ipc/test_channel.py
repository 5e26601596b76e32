"""Packets: order, limits, ends, waiting."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from tests.waiting import is_blocked, wait_until

from moonpool.ipc.channel import MAX_PACKET_BYTES, Channel
from moonpool.ipc.errors import Closed, LocalProtocolError, PeerGone, RemoteProtocolError

Ends = tuple[Channel, Channel]


def _with_fds(channel: Channel) -> bytes:
    packet, fds = channel.receive_with_fds()
    assert fds == []
    return packet


def _ready(channel: Channel) -> bytes:
    packet = channel.receive_ready()
    assert packet is not None
    return packet


RECEIVES = {"receive": Channel.receive, "receive_ready": _ready, "receive_with_fds": _with_fds}
in_every_way = pytest.mark.parametrize("receive", RECEIVES.values(), ids=RECEIVES.keys())
Receive = Callable[[Channel], bytes]


def _fill(channel: Channel) -> list[bytes]:
    """Send until the peer would have to read."""
    sent: list[bytes] = []
    for number in range(100_000):
        packet = b"%d" % number
        try:
            channel.send(packet)
        except BlockingIOError:
            assert sent
            return sent
        sent.append(packet)
    raise AssertionError("the channel took 100,000 packets that nobody read")


@in_every_way
def test_packets_arrive_whole_and_in_order(ends: Ends, receive: Receive) -> None:
    ours, theirs = ends
    packets = [b"a", b"", b"bc" * 1000, b"\0", bytes(range(256))]
    for packet in filter(None, packets):
        ours.send(packet)

    assert [receive(theirs) for _ in range(4)] == list(filter(None, packets))


@in_every_way
def test_both_ends_may_send(ends: Ends, receive: Receive) -> None:
    ours, theirs = ends
    ours.send(b"down")
    theirs.send_waiting(b"up")

    assert (receive(theirs), receive(ours)) == (b"down", b"up")


@in_every_way
def test_a_packet_of_the_largest_size_arrives(ends: Ends, receive: Receive) -> None:
    ours, theirs = ends
    ours.send(b"x" * MAX_PACKET_BYTES)

    assert receive(theirs) == b"x" * MAX_PACKET_BYTES


@in_every_way
@pytest.mark.parametrize("beyond", [1, 2, 65536])
def test_a_larger_packet_is_against_the_rules(ends: Ends, receive: Receive, beyond: int) -> None:
    ours, theirs = ends
    ours.send(b"x" * (MAX_PACKET_BYTES + beyond))

    with pytest.raises(RemoteProtocolError, match=f"more than {MAX_PACKET_BYTES} bytes"):
        receive(theirs)


def test_a_packet_that_is_too_large_is_not_sent(ends: Ends) -> None:
    ours, theirs = ends

    with pytest.raises(LocalProtocolError, match="Message too long"):
        ours.send(bytes(16 << 20))
    assert theirs.receive_ready() is None


@in_every_way
def test_the_end_of_the_peer_comes_after_its_last_packet(ends: Ends, receive: Receive) -> None:
    ours, theirs = ends
    theirs.send(b"last words")
    theirs.close()

    assert receive(ours) == b"last words"
    for _ in range(3):
        with pytest.raises(PeerGone, match="the peer closed the channel"):
            receive(ours)


@in_every_way
def test_a_peer_that_ends_with_packets_unread_is_heard_to_the_end(ends: Ends, receive: Receive) -> None:
    ours, theirs = ends
    ours.send(b"never read")
    theirs.send(b"last")
    theirs.send(b"words")
    theirs.close()

    assert [receive(ours), receive(ours)] == [b"last", b"words"]
    with pytest.raises(PeerGone):
        receive(ours)


def test_sending_to_a_peer_that_is_gone_is_told(ends: Ends) -> None:
    ours, theirs = ends
    theirs.close()

    with pytest.raises(PeerGone, match="Broken pipe"):
        ours.send(b"x")
    with pytest.raises(PeerGone, match="Broken pipe"):
        ours.send_waiting(b"x")
    with pytest.raises(PeerGone, match="Broken pipe"):
        ours.send_fds(b"x", 0)


def test_the_death_of_the_peers_process_is_told() -> None:
    ours, theirs = Channel.pair()
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with theirs:
        command = [sys.executable, "-I", "-c", program]
        child = subprocess.Popen(command, pass_fds=(theirs.fileno(),))

    with pytest.raises(PeerGone):
        ours.receive()
    assert child.wait(60) == -signal.SIGKILL
    ours.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda channel: channel.send(b"x"),
        lambda channel: channel.send_waiting(b"x"),
        lambda channel: channel.send_fds(b"x", 0),
        Channel.wait,
        *RECEIVES.values(),
    ],
    ids=["send", "send_waiting", "send_fds", "wait", *RECEIVES],
)
def test_a_channel_that_this_side_closed_says_so(ends: Ends, use: Callable[[Channel], object]) -> None:
    ours, _ = ends
    ours.close()
    ours.close()

    with pytest.raises(Closed, match="this end of the channel was closed"):
        use(ours)
    assert ours.fileno() == -1


@pytest.mark.promise("Containment", "Neither side of a channel can …")
def test_sending_never_blocks_on_a_peer_that_does_not_read(ends: Ends) -> None:
    ours, theirs = ends
    sent = _fill(ours)
    with pytest.raises(BlockingIOError):
        ours.send_fds(b"x", 0)

    received = [theirs.receive() for _ in sent]
    ours.send(b"more")

    assert received == sent
    assert theirs.receive() == b"more"


def test_sending_on_the_stubs_side_waits_until_the_peer_reads(ends: Ends) -> None:
    ours, theirs = ends
    sent = _fill(ours)
    thread = threading.Thread(target=ours.send_waiting, args=(b"at last",))
    thread.start()
    wait_until(lambda: is_blocked(thread), what="the sender to block")
    received = [theirs.receive() for _ in range(len(sent) + 1)]
    thread.join()

    assert received == [*sent, b"at last"]


@pytest.mark.promise("Containment", "Neither side of a channel can make the other block.")
def test_a_peer_cannot_make_this_side_block(ends: Ends) -> None:
    ours, theirs = ends
    flags = fcntl.fcntl(theirs.fileno(), fcntl.F_GETFL)
    fcntl.fcntl(theirs.fileno(), fcntl.F_SETFL, flags & ~os.O_NONBLOCK)

    _fill(ours)
    assert ours.receive_ready() is None


def test_a_channel_blocks_even_where_its_socket_did_not() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    channel = Channel(theirs)
    thread = threading.Thread(target=channel.wait)
    thread.start()
    wait_until(lambda: is_blocked(thread), what="the receiver to block")
    ours.send(b"x")
    thread.join()

    assert channel.receive() == b"x"
    ours.close()
    channel.close()


def test_nothing_there_is_told_at_once(ends: Ends) -> None:
    ours, _ = ends

    assert ours.receive_ready() is None


def test_the_descriptor_is_readable_when_a_packet_or_the_end_can_be_received(ends: Ends) -> None:
    ours, theirs = ends
    poll = select.poll()
    poll.register(ours.fileno(), select.POLLIN)
    assert poll.poll(0) == []
    theirs.send(b"x")
    assert poll.poll(0)
    ours.receive()
    assert poll.poll(0) == []
    theirs.close()

    assert poll.poll(0)


def test_a_packet_that_ended_a_wait_is_received_without_the_socket(ends: Ends) -> None:
    ours, theirs = ends
    for packet in (b"1", b"2", b"3"):
        theirs.send(packet)
    ours.wait()
    ours.wait()

    assert [ours.receive_ready(), ours.receive(), ours.receive_ready()] == [b"1", b"2", b"3"]


def test_a_thread_that_blocks_is_woken(ends: Ends) -> None:
    ours, _ = ends
    told: list[Exception] = []

    def receive() -> None:
        try:
            ours.receive()
        except PeerGone as error:
            told.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    wait_until(lambda: is_blocked(thread), what="the receiver to block")
    ours.wake()
    thread.join(60)

    assert len(told) == 1


def test_waking_is_harmless_at_any_time(ends: Ends) -> None:
    ours, theirs = ends
    theirs.close()
    ours.wake()
    ours.wake()
    ours.close()
    ours.wake()


def test_the_peer_of_a_woken_channel_sees_its_end(ends: Ends) -> None:
    ours, theirs = ends
    ours.wake()

    with pytest.raises(PeerGone):
        theirs.receive()
