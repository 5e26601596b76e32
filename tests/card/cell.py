"""A process of a cell: takes a role, and says what it finds. Processes of a cell talk in messages with descriptors."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.card import guises
from tests.card.cuda import NOT_SUPPORTED, Absent, Box, Cuda, Refused

WORKS, REFUSED = "works", "refused"
_MOST_BYTES = 1 << 16
# PIPE_BUF: a pipe takes so many bytes in one piece.
_MOST_AT_ONCE = 1 << 12
_MOST_TEXT = 1400
_MOST_DESCRIPTORS = 4


class Ended(Exception):
    """Another process of the cell has ended, or has failed with an error of this name."""

    def __init__(self, text: str, name: str = "ended") -> None:
        super().__init__(text)
        self.name = name


class Talk:
    """One end of a conversation between two processes of a cell."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message with descriptors. Raises `Ended`."""
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], fds)
        except OSError as error:
            raise Ended(str(error)) from error

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Wait for a message. Raises `Ended`."""
        try:
            message, fds, _, _ = socket.recv_fds(self._socket, _MOST_BYTES, _MOST_DESCRIPTORS)
        except OSError as error:
            raise Ended(str(error)) from error
        if not message:
            raise Ended("it said nothing more")
        found: dict[str, Any] = json.loads(message)
        return found, fds

    def answer(self) -> dict[str, Any]:
        """Wait for a message. Raises `Ended`, also if it says that the other process has failed, and `Impossible`."""
        message, _ = self.receive()
        if "impossible" in message:
            raise guises.Impossible(message["impossible"])
        if "failed" in message:
            raise Ended(message["text"], message["failed"])
        return message


class Helper(Talk):
    """Another process of the cell, as the one that started it sees it."""

    def __init__(self, end: socket.socket, process: subprocess.Popen[bytes]) -> None:
        super().__init__(end)
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> float:
        """Kill it as a stub is killed, and return the seconds until it is gone."""
        began = time.monotonic()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        return time.monotonic() - began

    def finish(self) -> None:
        """Have it end, and wait until it has."""
        self._socket.close()
        self._process.wait()


class Cell:
    """This process of the cell."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._box_fd, self._lines_fd = int(settings["box"]), int(settings["lines"])
        self._slot = self._helpers = int(settings["slot"])
        self._box = Box(self._box_fd)
        self._box.take(self._slot, settings["role"])

    def say(
        self,
        name: str,
        ok: bool | None,
        value: float | str | None = None,
        unit: str = "",
        expected: str = "",
        text: str = "",
    ) -> None:
        """Report a result. One write, so that lines of several processes do not mix."""
        line = {"name": name, "ok": ok, "value": value, "unit": unit, "expected": expected}
        for most in (_MOST_TEXT, _MOST_TEXT // 8):
            # What is no ASCII takes six bytes or twelve.
            written = json.dumps(line | {"text": text[:most]}).encode() + b"\n"
            if len(written) <= _MOST_AT_ONCE:
                break
        os.write(self._lines_fd, written)

    def judge(self, name: str, outcome: str, expected: str, text: str = "", *, needed: bool = True) -> None:
        """Report whether something works: `outcome` is that it does, or the error's name.

        If nothing is expected, any outcome is an answer. `needed` is False for what moonpool can do without.
        """
        ok: bool | None = True
        if not needed and outcome in (NOT_SUPPORTED, ABSENT):
            ok = None
        elif expected:
            ok = (outcome == WORKS) == (expected == WORKS)
        self.say(name, ok, outcome, expected=expected, text=text)

    def cuda(self) -> Cuda:
        """Load the driver and make a context."""
        found = self.driver()
        found.start()
        return found

    def driver(self) -> Cuda:
        """Load the driver."""
        return Cuda(self._box)

    def helper(self, role: str, guise: str = guises.CHILD, nodes: Sequence[str] = (), **arguments: object) -> Helper:
        """Start another process with this role. Raises `Impossible` if it cannot put on the guise."""
        self._helpers += 1
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {
            "box": self._box_fd,
            "lines": self._lines_fd,
            "slot": self._helpers,
            "parent": os.getpid(),
            "role": role,
            "arguments": arguments,
            "talk": its.fileno(),
            "guise": guise,
            "nodes": list(nodes),
        }
        with its:
            process = subprocess.Popen(
                [*_command(), json.dumps(settings)],
                pass_fds=(self._box_fd, self._lines_fd, its.fileno()),
                stdin=subprocess.DEVNULL,
            )
        found = Helper(own, process)
        found.answer()
        return found


def _command() -> list[str]:
    """Return the command by which this process was started, without its settings."""
    return [sys.executable, *sys.orig_argv[1:-1]]


ABSENT = Absent("").name


def nodes_of(cuda: Cuda) -> list[str]:
    """Return the names of the device nodes of device 0 alone."""
    place = ctypes.create_string_buffer(32)
    cuda("cuDeviceGetPCIBusId", place, 32, 0)
    file = Path(f"/proc/driver/nvidia/gpus/{place.value.decode().lower()}/information")
    try:
        found = re.search(r"Device Minor:\s*(\d+)", file.read_text())
    except OSError:
        found = None
    return [f"nvidia{found[1] if found else 0}"]


def _run(settings: Mapping[str, Any]) -> None:
    # Before the guise is on, under which files may be hidden.
    from tests.card import roles

    role = getattr(roles, settings["role"])
    if "talk" in settings:
        _help(role, settings)
        return
    guises.die_with(settings["parent"])
    cell = Cell(settings)
    try:
        role(cell, **settings["arguments"])
    except guises.Impossible as error:
        cell.say("", None, "impossible here", text=str(error))
    except Exception as error:
        is_unsupported = name_of(error) in (NOT_SUPPORTED, ABSENT)
        cell.say("", None if is_unsupported else False, name_of(error), text=str(error))


def _help(role: Any, settings: Mapping[str, Any]) -> None:
    talk = Talk(socket.socket(fileno=settings["talk"]))
    try:
        guises.put_on(settings["guise"], settings["nodes"], settings["parent"])
        cell = Cell(settings)
        talk.send({})
        role(cell, talk, **settings["arguments"])
    except Ended:
        # Nobody is there to be told.
        return
    except guises.Impossible as error:
        talk.send({"impossible": str(error)})
    except Exception as error:
        talk.send({"failed": name_of(error), "text": str(error)})


def name_of(error: Exception) -> str:
    """Return what a result says of an error: the name that NVIDIA or the kernel gives it."""
    if isinstance(error, Refused | Ended):
        return error.name
    if isinstance(error, OSError) and error.errno:
        return errno.errorcode.get(error.errno, str(error.errno))
    return type(error).__name__


def main() -> None:
    """Take the role that the last argument says, and end without what libraries do at the end of a process."""
    _run(json.loads(sys.argv[-1]))
    sys.stdout.flush()
    os._exit(0)
