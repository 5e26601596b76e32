"""A template that lies about what it forks, in the way that FAULT_IN_TEMPLATE names. Started in place of
`stub/boot.py`.

`FAULT_BOOT` is the path of the real one. Stubs that are no templates are as they should be.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import sys
from typing import Any

BOOT = runpy.run_path(os.environ["FAULT_BOOT"])
BOOT["make_importable"]("moonpool", os.path.dirname(os.path.dirname(BOOT["__file__"])))
BOOT["load_msgpack"](sys.argv[-1])

from moonpool.ipc.codec import encode  # noqa: E402
from moonpool.ipc.messages import Kind  # noqa: E402
from moonpool.stub import handshake  # noqa: E402
from moonpool.stub.handshake import Handshake  # noqa: E402

FAULT = os.environ["FAULT_IN_TEMPLATE"]


def say(handshake_fd: int) -> None:
    """Pretend to be the new process."""
    with socket.socket(fileno=os.dup(handshake_fd)) as handshake, contextlib.suppress(OSError):
        handshake.send(b"\0")


class Speaker:
    """Start a child process that pretends to be the new process, for others."""

    def __init__(self) -> None:
        self._end, theirs = socket.socketpair()
        if not os.fork():
            self._end.close()
            while handshakes := socket.recv_fds(theirs, 1, 1)[1]:
                say(handshakes[0])
                os.close(handshakes[0])
            os._exit(0)
        theirs.close()

    def speak(self, handshake_fd: int) -> None:
        socket.send_fds(self._end, [b"\0"], [handshake_fd])


def lying(honest: type) -> type:
    """A template that lies, made of the honest one."""

    class LyingTemplate(honest):  # type: ignore[misc]
        _speaker: Speaker | None = None

        def _fork(self, name: str, fds: list[int]) -> Handshake | None:
            if FAULT == "forks a grandchild":
                if not os.fork():
                    handshake = self._fork_honestly(name, fds)
                    if handshake is None:
                        signal.pause()
                    return handshake
            elif FAULT == "has one child speak for all":
                return self._fork_mutely(name, fds)
            elif FAULT == "says it is the child":
                say(fds[-1])
            elif FAULT == "tells an end that nobody asked for":
                self._handshake.control.send_waiting(encode(Kind.EXITED, 1, 0))
            elif FAULT == "sends a message of the runtime":
                self._handshake.control.send_waiting(encode(Kind.FORK, name))
            elif FAULT == "dies":
                os._exit(5)
            elif FAULT == "says nothing":
                return None
            elif FAULT != "forks nothing":
                return self._fork_honestly(name, fds)
            for fd in fds:
                os.close(fd)
            return None

        def _fork_mutely(self, name: str, fds: list[int]) -> Handshake | None:
            """Fork as the honest template does, but let another process announce the fork."""
            if self._speaker is None:
                self._speaker = Speaker()
            self._speaker.speak(fds[-1])
            mute, other = socket.socketpair()
            os.dup2(mute.fileno(), fds[-1])
            with mute, other:
                return self._fork_honestly(name, fds)

        def _fork_honestly(self, name: str, fds: list[int]) -> Handshake | None:
            handshake: Handshake | None = super()._fork(name, fds)
            return handshake

        def _send_end(self, pid: int) -> None:
            if FAULT == "tells a wrong end":
                self._handshake.control.send_waiting(encode(Kind.EXITED, pid, 77))
            elif FAULT != "never tells an end":
                super()._send_end(pid)

    return LyingTemplate


def shake_hands(*arguments: Any, **options: Any) -> Handshake:
    """Handshake as usual. The lying template is made after the sandbox is on, since it starts threads."""
    handshake.shake_hands = honestly
    ended = honestly(*arguments, **options)
    from moonpool.stub import template

    setattr(template, "Template", lying(template.Template))  # noqa: B010 - a type checker takes it for a type
    return ended


honestly = handshake.shake_hands
handshake.shake_hands = shake_hands
BOOT["main"]()
