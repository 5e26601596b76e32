"""Waiting for descriptors where the kernel has watches for some of them, or none."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterator

import pytest

from moonpool.runtime.process.reactor import Poller

pytestmark = pytest.mark.promise("What the server bears, and whom it answers like", "If the server's user has no …")


class Full:
    """An epoll in which nothing has room any more."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.fileno, self.poll, self.close = self._epoll.fileno, self._epoll.poll, self._epoll.close

    def register(self, *_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def modify(self, *_: int) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    unregister = modify


@pytest.fixture(params=["with watches", "without"])
def poller(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Poller]:
    poller = Poller()
    if request.param == "without":
        poller.close()
        monkeypatch.setattr(poller, "_epoll", Full())
    yield poller
    poller.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def test_a_readable_descriptor_is_found_until_it_is_read(poller: Poller, pipe: tuple[int, int]) -> None:
    poller.register(pipe[0], select.EPOLLIN)
    os.write(pipe[1], b"x")

    assert poller.poll() == poller.poll() == [(pipe[0], select.EPOLLIN)]


def test_a_one_shot_descriptor_is_found_once(poller: Poller, pipe: tuple[int, int]) -> None:
    other = os.pipe()
    poller.register(pipe[0], select.EPOLLIN | select.EPOLLONESHOT)
    poller.register(other[0], select.EPOLLIN)
    for end in (pipe[1], other[1]):
        os.write(end, b"x")

    assert {fd for fd, _ in poller.poll()} == {pipe[0], other[0]}
    assert {fd for fd, _ in poller.poll()} == {other[0]}
    poller.modify(pipe[0], select.EPOLLIN | select.EPOLLONESHOT)
    assert {fd for fd, _ in poller.poll()} == {pipe[0], other[0]}
    for end in other:
        os.close(end)


def test_other_events_are_waited_for(poller: Poller, pipe: tuple[int, int]) -> None:
    poller.register(pipe[1], 0)
    poller.modify(pipe[1], select.EPOLLOUT)

    assert poller.poll() == [(pipe[1], select.EPOLLOUT)]


def test_the_end_of_a_pipe_is_found_though_nothing_is_waited_for(poller: Poller) -> None:
    read_fd, write_fd = os.pipe()
    poller.register(read_fd, 0)
    os.close(write_fd)

    assert poller.poll() == [(read_fd, select.EPOLLHUP)]
    poller.unregister(read_fd)
    os.close(read_fd)


def test_unknown_and_doubly_known_descriptors_are_errors(poller: Poller, pipe: tuple[int, int]) -> None:
    with pytest.raises(FileNotFoundError):
        poller.modify(pipe[0], select.EPOLLIN)
    poller.register(pipe[0], select.EPOLLIN)
    with pytest.raises(FileExistsError):
        poller.register(pipe[0], select.EPOLLIN)
    poller.unregister(pipe[0])
    with pytest.raises(FileNotFoundError):
        poller.unregister(pipe[0])
