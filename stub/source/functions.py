"""Lets source call functions of the program that runs it, by name. The program's end is `runtime/sandboxes/functions`.

A call is a value, [name, arguments, named arguments], in a packet that begins with `values.CALL`. Its arrays lie in the
file for the answer, which has no other use yet. The reply is a packet with a value, and perhaps a file of its own.

Theory of operation. One thread at a time calls, under `_lock`, and the thread that serves takes it when a run begins
and ends. So it never gets the packets of a call. A handler of a signal may raise while a call waits: its reply is
dropped before anything else is read. A thread that outlives its run finds no channel here.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from typing import Any, Callable

from moonpool.ipc.channel import Channel
from moonpool.ipc.source import values


class HostError(RuntimeError):
    """A call of a function of the program has failed there, or was refused. `limit` is the option that was met."""

    limit = ""


class HostFunctions:
    """Calls functions of the program. Any thread may call.

    The source has this object within reach. What it does with it harms its own process only.
    """

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._answer_fd = -1
        self._lock = threading.Lock()
        # The calls whose replies were not received.
        self._pending = 0

    def begin(self, channel: Channel | None, answer_fd: int) -> None:
        """Allow calls for the run that begins."""
        with self._lock:
            self._channel, self._answer_fd = channel, answer_fd

    def end(self) -> None:
        """Wait for the end of the call that is going on, and allow none until the next run begins."""
        with self._lock:
            self._drop_replies()
            self._channel = None

    def named(self, name: str) -> Callable[..., Any]:
        """Return what calls the function of this name."""

        def function(*arguments: Any, **named: Any) -> Any:
            return self._call(name, arguments, named)

        function.__name__ = function.__qualname__ = name
        return function

    def _call(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        try:
            written = values.write([name, list(arguments), named])
        except values.Unsendable as why:
            raise TypeError(f"the arguments of {name} cannot be sent: {why}") from None
        with self._lock:
            channel = self._channel
            if channel is None:
                raise HostError(f"{name} can be called only during a run that was given functions")
            self._drop_replies()
            try:
                packet = values.CALL + values.parcel(written, self._answer_fd)
            except OSError as why:
                what = f"the arguments of {name} take {written.size_bytes} bytes, more than `files_bytes`"
                raise OSError(errno.EFBIG, what) from why
            self._pending += 1
            channel.send_waiting(packet)
            reply = self._received(channel)
        if reply["error"] is not None:
            error = HostError(reply["error"])
            error.limit = reply["limit"]
            raise error
        return reply["value"]

    def _received(self, channel: Channel) -> Any:
        packet, fds = channel.receive_with_fds()
        self._pending -= 1
        try:
            return values.unpacked(packet, lambda size_bytes: mapped(fds[0], size_bytes))
        finally:
            for fd in fds:
                os.close(fd)

    def _drop_replies(self) -> None:
        while self._pending and self._channel is not None:
            self._received(self._channel)


def mapped(fd: int, size_bytes: int) -> memoryview:
    """Map the beginning of a file, as a private copy."""
    return memoryview(mmap.mmap(fd, size_bytes, access=mmap.ACCESS_COPY))
