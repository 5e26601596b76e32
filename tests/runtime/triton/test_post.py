"""Messages between the shim and its launcher: with their descriptors, and of any length."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import encode
from moonpool.ipc.errors import PeerGone, RemoteProtocolError
from moonpool.runtime.triton.messages import End, Word
from moonpool.runtime.triton.post import Post


@pytest.fixture
def ends() -> Iterator[tuple[Post, Channel]]:
    """A launcher's end, and the bare channel at the other one."""
    channel, end = Channel.pair()
    post, other = Post(Channel(end), End.LAUNCHER), channel
    yield post, other
    other.close()
    post.close()


def in_a_file(contents: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, contents)
    return fd


def test_a_long_message_lies_in_a_file(ends: tuple[Post, Channel]) -> None:
    post, other = ends
    shim = Post(other, End.SHIM)
    message = [Word.MODEL, 1, "m", 1, "/m", "x" * 100_000, True]

    shim.tell(*message)

    assert post.hear() == (message, [])
    shim.close()


def test_what_was_told_before_the_end_is_heard(ends: tuple[Post, Channel]) -> None:
    post, other = ends
    shim = Post(other, End.SHIM)
    shim.tell(Word.END_MODEL, 1)
    shim.close()

    assert post.hear() == ([Word.END_MODEL, 1], [])
    with pytest.raises(PeerGone):
        post.hear()


@pytest.mark.parametrize(
    ("contents", "size", "expected"),
    [
        (b"", 100, "0 bytes in a file that is to hold 100"),
        (encode(Word.LONG, 7), None, "LONG that stands for another one"),
        (b"\xc1", None, "a packet that is not msgpack"),
        (encode(Word.HELLO, 1, 1, "", 1), None, "HELLO is not the peer's to send"),
    ],
)
def test_a_file_that_is_not_as_it_is_said_to_be_is_refused(
    ends: tuple[Post, Channel], contents: bytes, size: int | None, expected: str
) -> None:
    post, other = ends
    fd = in_a_file(contents)
    other.send_fds(encode(Word.LONG, size or len(contents)), fd)
    os.close(fd)

    with pytest.raises(RemoteProtocolError, match=expected):
        post.hear()


def test_a_file_that_does_not_come_is_refused(ends: tuple[Post, Channel]) -> None:
    post, other = ends
    other.send(encode(Word.LONG, 100))

    with pytest.raises(RemoteProtocolError, match="LONG without a file"):
        post.hear()


def test_descriptors_that_nobody_expects_are_refused_and_closed(
    ends: tuple[Post, Channel],
) -> None:
    post, other = ends
    fd = in_a_file(b"")
    other.send_fds(encode(Word.END_MODEL, 1), fd)
    os.close(fd)

    with pytest.raises(RemoteProtocolError, match="1 descriptors with END_MODEL"):
        post.hear()
