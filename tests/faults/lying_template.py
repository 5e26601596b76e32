"""A template that lies about what it forks, in the way that FAULT_IN_TEMPLATE names. Started in place of `stub/boot.py`.

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


def close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def say(birth_fd: int) -> None:
    with socket.socket(fileno=os.dup(birth_fd)) as birth, contextlib.suppress(OSError):
        birth.send(b"\0")


def forks_nothing(real: Any, template: Any, name: str, fds: list[int]) -> None:
    close(fds)


def says_nothing(real: Any, template: Any, name: str, fds: list[int]) -> None:
    """And keeps them open."""


def says_it_is_the_child(real: Any, template: Any, name: str, fds: list[int]) -> None:
    say(fds[-1])
    close(fds)


def forks_a_grandchild(real: Any, template: Any, name: str, fds: list[int]) -> Any:
    pid = os.fork()
    if pid:
        close(fds)
        return None
    handshake = template_fork(real, template, name, fds)
    if handshake is None:
        signal.pause()
    return handshake


def template_fork(real: Any, template: Any, name: str, fds: list[int]) -> Any:
    return real(template, name, fds)


HELPERS: list[socket.socket] = []


def has_one_child_speak_for_all(real: Any, template: Any, name: str, fds: list[int]) -> Any:
    if not HELPERS:
        ours, theirs = socket.socketpair()
        if not os.fork():
            ours.close()
            while True:
                _, births, _, _ = socket.recv_fds(theirs, 1, 1)
                if not births:
                    os._exit(0)
                say(births[0])
                close(births)
        theirs.close()
        HELPERS.append(ours)
    socket.send_fds(HELPERS[0], [b"\0"], [fds[-1]])
    mute, other = socket.socketpair()
    os.dup2(mute.fileno(), fds[-1])
    handshake = real(template, name, fds)
    mute.close()
    other.close()
    return handshake


def tells_an_end_that_nobody_asked_for(real: Any, template: Any, name: str, fds: list[int]) -> None:
    close(fds)
    template._handshake.control.send_waiting(encode(Kind.EXITED, 1, 0))


def sends_a_message_of_the_runtime(real: Any, template: Any, name: str, fds: list[int]) -> None:
    close(fds)
    template._handshake.control.send_waiting(encode(Kind.FORK, name))


def dies(real: Any, template: Any, name: str, fds: list[int]) -> None:
    os._exit(5)


FAULTS = {
    name.replace("_", " "): fault
    for name, fault in list(globals().items())
    if callable(fault) and getattr(fault, "__code__", None) is not None
}


def main() -> None:
    fault = os.environ["FAULT_IN_TEMPLATE"]
    from moonpool.stub import template

    real_fork, real_tell = template.Template._fork, template.Template._tell_end
    if fault == "tells a wrong end":
        template.Template._tell_end = lambda self, pid: self._handshake.control.send_waiting(
            encode(Kind.EXITED, pid, 77)
        )
    elif fault == "never tells an end":
        template.Template._tell_end = lambda self, pid: None
    else:
        template.Template._fork = lambda self, name, fds: FAULTS[fault](real_fork, self, name, fds)
    BOOT["main"]()


main()
