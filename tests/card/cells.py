"""Runs cells: small programs that each ask the driver one question, side by side, with a limit for each.

A call of the driver may never return, and may take its process with it. So each cell is a process started by exec, with
those that it starts itself in one process group, and what it finds comes through a pipe, line by line. At its limit a
cell is killed, and the line that is recorded for it says which call it was in. A hanging call costs its own cell and no
other.

Theory of operation. One thread waits for the pipes and for the ends of all cells, until the earliest limit. A group is
killed before its first process is reaped, while its number cannot belong to another one. If this process is killed, the
kernel kills the cells.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.card import guises
from tests.card.cuda import Box

ROOT = Path(__file__).parents[2]
# Without `site`, which a cell does not need, an interpreter starts twice as fast.
_PROGRAM = "import sys; sys.path.insert(0, sys.argv.pop(1)); from tests.card.cell import main; main()"
COMMAND = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(ROOT)]
# The first context of a machine may take so long.
_START_S = 10.0
_MOST_KEPT_S = 600.0
# A killed process that is not gone after this time waits in the kernel.
_DEATH_S = 2.0
_LOOK_S = 0.005
Line = Mapping[str, Any]
Record = Callable[..., None]


@dataclass(frozen=True)
class Cell:
    """A question. `role` is a function of `roles`, and `name` begins the names of its results."""

    name: str
    role: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = 15


class _Running:
    """A cell that has started."""

    def __init__(self, cell: Cell, ends: float) -> None:
        self.cell = cell
        box_fd = os.memfd_create("moonpool-card-box")
        os.truncate(box_fd, Box.BYTES)
        self.box = Box(box_fd)
        self.lines_fd, lines_fd = os.pipe()
        os.set_blocking(self.lines_fd, False)
        settings = {
            "box": box_fd,
            "lines": lines_fd,
            "slot": 0,
            "parent": os.getpid(),
            "role": cell.role,
            "arguments": dict(cell.arguments),
        }
        self.process = subprocess.Popen(
            [*COMMAND, json.dumps(settings)],
            # What the driver compiles is not worth a file in somebody's home.
            env={**os.environ, "CUDA_CACHE_DISABLE": "1"},
            pass_fds=(box_fd, lines_fd),
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        os.close(box_fd)
        os.close(lines_fd)
        self.end_fd = os.pidfd_open(self.process.pid)
        self.began = time.monotonic()
        self.ends = min(self.began + cell.limit_s, ends)
        self.lines = 0
        self.is_at_end = False
        self._part = b""

    def read(self) -> list[Line]:
        """Return the results that have come since the last call."""
        read = b""
        with contextlib.suppress(BlockingIOError):
            while more := os.read(self.lines_fd, 1 << 16):
                read += more
            self.is_at_end = True
        *whole, self._part = (self._part + read).split(b"\n")
        self.lines += len(whole)
        return [json.loads(line) for line in whole]

    def kill(self) -> bool:
        """End all processes of the cell. Returns False if one does not die."""
        ends = time.monotonic() + _DEATH_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(_DEATH_S)
        except subprocess.TimeoutExpired:
            return False
        # Those that it had started are now children of this process, if it adopts orphans.
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < ends:
                if os.waitpid(-self.process.pid, os.WNOHANG)[0] == 0:
                    time.sleep(_LOOK_S)
            return False
        return True

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.lines_fd)
        os.close(self.end_fd)


class Cells:
    """Runs cells until a moment, and records what they find."""

    def __init__(self, record: Record, ends: float) -> None:
        self._record = record
        self._ends = ends
        guises.adopt_orphans()

    def run(self, cells: Iterable[Cell], at_once: int, until: float = math.inf) -> list[Cell]:
        """Run cells in their order, so many side by side. Returns those for which there was no time until this
        moment.
        """
        waiting = deque(cells)
        running: list[_Running] = []
        with selectors.DefaultSelector() as selector:
            try:
                while waiting or running:
                    may_start = time.monotonic() < until
                    while waiting and may_start and len(running) < at_once:
                        self._start(waiting.popleft(), running, selector)
                    if not running and not may_start:
                        break
                    self._wait(running, selector)
            finally:
                for each in running:
                    each.kill()
        return [*waiting]

    def _start(self, cell: Cell, running: list[_Running], selector: selectors.BaseSelector) -> None:
        if time.monotonic() >= self._ends:
            self._record(cell.name, None, text="not tried: no time is left")
            return
        try:
            each = _Running(cell, self._ends)
        except OSError as error:
            self._record(cell.name, False, text=f"it could not be started: {error}")
            return
        selector.register(each.lines_fd, selectors.EVENT_READ, each)
        selector.register(each.end_fd, selectors.EVENT_READ, each)
        running.append(each)

    def _wait(self, running: list[_Running], selector: selectors.BaseSelector) -> None:
        if not running:
            return
        first = min(each.ends for each in running)
        ended = []
        for key, _ in selector.select(max(0.0, first - time.monotonic())):
            each: _Running = key.data
            if key.fd == each.end_fd:
                ended.append(each)
            else:
                self._take(each)
                if each.is_at_end:
                    selector.unregister(each.lines_fd)
        now = time.monotonic()
        for each in [*running]:
            if each in ended or now >= each.ends:
                self._end(each, selector, hangs=each not in ended)
                running.remove(each)

    def _take(self, each: _Running) -> None:
        for line in each.read():
            name = ": ".join(filter(None, (each.cell.name, line["name"])))
            self._record(name, *(line[key] for key in ("ok", "value", "unit", "expected", "text")))

    def _end(self, each: _Running, selector: selectors.BaseSelector, *, hangs: bool) -> None:
        for fd in (each.lines_fd, each.end_fd):
            with contextlib.suppress(KeyError):
                selector.unregister(fd)
        where = each.box.read()
        is_dead = each.kill()
        self._take(each)
        each.close()
        problems: list[str] = []
        if hangs:
            limit_s = each.ends - each.began
            problems.append(f"no end within {limit_s:.1f} s, killed")
        elif each.process.returncode:
            problems.append(f"ended with {_ending(each.process.returncode)}")
        elif not each.lines:
            problems.append("said nothing")
        if not is_dead:
            problems.append("does not die: it waits in the kernel")
        if problems:
            self._record(each.cell.name, False, text=", ".join([*problems, where]).rstrip(", "))


def _ending(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-status).name
    return str(status)


@contextlib.contextmanager
def keeper(record: Record) -> Iterator[None]:
    """Keep a process with a context, so that the driver does not put the card to sleep between two cells."""
    kept = _Running(Cell("keeper", "keep"), time.monotonic() + _MOST_KEPT_S)
    try:
        # What comes later is of no use to it.
        with selectors.DefaultSelector() as selector:
            selector.register(kept.lines_fd, selectors.EVENT_READ)
            selector.select(_START_S)
        yield
    finally:
        is_dead = kept.kill()
        for line in kept.read():
            record(*(line[key] for key in ("name", "ok", "value", "unit", "expected", "text")))
        if not is_dead:
            record("keeper", False, text="does not die: it waits in the kernel")
        kept.close()
