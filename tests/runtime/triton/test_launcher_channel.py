"""Messages between the shim and its launcher: with their descriptors, and of any length."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import encode
from moonpool.ipc.errors import PeerGone, RemoteProtocolError
from moonpool.runtime.triton.launcher_channel import LauncherChannel
from moonpool.runtime.triton.messages import End, Word


@pytest.fixture
def ends() -> Iterator[tuple[LauncherChannel, Channel]]:
    """A launcher's end, and the bare channel at the other one."""
    channel, end = Channel.pair()
    peer, other = LauncherChannel(Channel(end), End.LAUNCHER), channel
    yield peer, other
    other.close()
    peer.close()


def in_a_file(contents: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, contents)
    return fd


def test_a_long_message_lies_in_a_file(ends: tuple[LauncherChannel, Channel]) -> None:
    peer, other = ends
    shim = LauncherChannel(other, End.SHIM)
    message = [Word.MODEL, 1, "m", 1, "/m", "x" * 100_000, True]

    shim.send(*message)

    assert peer.receive() == (message, [])
    shim.close()


def test_messages_sent_before_the_end_are_received(ends: tuple[LauncherChannel, Channel]) -> None:
    peer, other = ends
    shim = LauncherChannel(other, End.SHIM)
    shim.send(Word.END_MODEL, 1)
    shim.close()

    assert peer.receive() == ([Word.END_MODEL, 1], [])
    with pytest.raises(PeerGone):
        peer.receive()


@pytest.mark.parametrize(
    ("contents", "size", "expected"),
    [
        (b"", 100, "0 bytes in a file that is to hold 100"),
        (encode(Word.LONG, 7), None, "LONG that refers to another one"),
        (b"\xc1", None, "a packet that is not msgpack"),
        (encode(Word.HELLO, 1, 1, "", 1), None, "HELLO is not the peer's to send"),
    ],
)
def test_a_file_that_is_not_as_it_is_said_to_be_is_refused(
    ends: tuple[LauncherChannel, Channel], contents: bytes, size: int | None, expected: str
) -> None:
    peer, other = ends
    fd = in_a_file(contents)
    other.send_fds(encode(Word.LONG, size or len(contents)), fd)
    os.close(fd)

    with pytest.raises(RemoteProtocolError, match=expected):
        peer.receive()


def test_a_file_that_does_not_come_is_refused(ends: tuple[LauncherChannel, Channel]) -> None:
    peer, other = ends
    other.send(encode(Word.LONG, 100))

    with pytest.raises(RemoteProtocolError, match="LONG without a file"):
        peer.receive()


def test_descriptors_that_nobody_expects_are_refused_and_closed(ends: tuple[LauncherChannel, Channel]) -> None:
    peer, other = ends
    fd = in_a_file(b"")
    other.send_fds(encode(Word.END_MODEL, 1), fd)
    os.close(fd)

    with pytest.raises(RemoteProtocolError, match="1 descriptors with END_MODEL"):
        peer.receive()
