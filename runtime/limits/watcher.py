"""Looks once a second at the processes of instances that have something to watch.

What the kernel enforces is better enforced there. This is for what it does not: resident memory, and tasks and
scratch folders where the instance has no group or namespace of its own. It is late by up to a second.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonpool.ipc.limits import reached
from moonpool.runtime.errors import StubDied
from moonpool.runtime.limits.footprint import (
    memory_and_threads,
    memory_of_all,
    size_of_folder,
    tasks_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonpool.runtime.process import ChildProcess

_log = logging.getLogger("moonpool")
_PERIOD_S = 1.0


@dataclass(eq=False)
class Watched:
    """A process, and what it may have; None is not watched."""

    name: str
    process: ChildProcess
    # Gets the reason for which the process is to end.
    end: Callable[[BaseException], object]
    tasks: int | None = None
    scratch: str = ""
    scratch_bytes: int | None = None
    rss_bytes: int | None = None
    # The most memory of the process and all that it has started, together.
    memory_bytes: int | None = None
    # Gets the memory of a process that has more than `rss_bytes`, and had not when it began to serve.
    grown: Callable[[int], object] | None = None

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to look at."""
        watched = (self.tasks, self.scratch_bytes, self.rss_bytes, self.memory_bytes)
        return any(each is not None for each in watched)

    def look(self) -> None:
        """Compare what there is with what may be."""
        if self.tasks is not None or (self.rss_bytes is not None and self.grown is not None):
            self._look_at_process()
        if self.memory_bytes is not None:
            size_bytes = memory_of_all(self.process, self.memory_bytes)
            if size_bytes > self.memory_bytes:
                had = f"{size_bytes} bytes with all that it started"
                self._end(reached("memory_bytes", self.memory_bytes), had)
        if self.scratch and self.scratch_bytes is not None:
            size_bytes = size_of_folder(self.scratch, self.scratch_bytes)
            if size_bytes > self.scratch_bytes:
                self._end(reached("file_bytes", self.scratch_bytes), f"{size_bytes} bytes")

    def _look_at_process(self) -> None:
        found = memory_and_threads(self.process)
        if found is None:
            return
        rss_bytes, threads = found
        if self.tasks is not None:
            # Looking for children takes longer.
            tasks = threads if threads > self.tasks else tasks_of(self.process, threads)
            if tasks > self.tasks:
                self._end(reached("tasks", self.tasks), f"{tasks}")
        if self.rss_bytes is not None and self.grown is not None and rss_bytes > self.rss_bytes:
            self.grown(rss_bytes)

    def serves(self, grown: Callable[[int], object]) -> None:
        """From now on `grown` is called; never, where the process is too large from the beginning."""
        found = memory_and_threads(self.process)
        if self.rss_bytes is not None and found is not None and found[0] > self.rss_bytes:
            _log.warning(
                "[%s] has %d bytes of memory before its first request, more than "
                "MOONPOOL_RECYCLE_RSS_BYTES (%d): it is not recycled for its memory",
                self.name,
                found[0],
                self.rss_bytes,
            )
            return
        self.grown = grown

    def _end(self, limit: str, had: str) -> None:
        self.end(StubDied(f"Stub process '{self.name}' {limit}, as it had {had}, and was ended"))


class Watcher:
    """One thread, while there is anything to watch. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: set[Watched] = set()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, watched: Watched) -> None:
        """Look at it from now on. Where no thread can be had, it is not watched, and the log says so."""
        with self._lock:
            self._watched.add(watched)
            if self._thread is not None:
                return
            self._wake = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._wake,), name="moonpool-watcher", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as error:
                self._thread = None
                _log.error("[%s] nobody watches its limits: %s", watched.name, error)

    def remove(self, watched: Watched) -> None:
        """Nothing is to be looked at there any more."""
        with self._lock:
            self._watched.discard(watched)
            if not self._watched and self._thread is not None:
                self._thread = None
                self._wake.set()

    def _run(self, ends: threading.Event) -> None:
        while not ends.wait(_PERIOD_S):
            with self._lock:
                watched = list(self._watched)
            for each in watched:
                try:
                    each.look()
                except Exception:
                    _log.exception("[%s] cannot be looked at", each.name)
