"""Looks once a second at the processes of instances with limits that the kernel does not enforce.

These are resident memory, and tasks and scratch folders of instances without a group or namespace of their own. The
watcher notices a breach up to a second late, so limits of the kernel are used if there are any. It reads numbers of the
kernel and sizes of files, which a process can influence only by its use of memory, tasks and disk; it may have any
number of files.

Theory of operation. One thread runs while there is anything to watch. `_lock` guards the set and the thread. The thread
copies the set under the lock, and looks at the processes without it: a look may take long, and may end a process, whose
owner then calls `remove`. So `remove` does not wait for the thread, and a process may get one more look after it. To
end it once more has no effect.

The thread ends when the last process is removed. Each thread has an event of its own. If another process is added
before the old thread has seen its event, a new thread with a new event begins, and the old one still ends. If no thread
can be started, the limits are not enforced, the log says so, and the next `add` tries again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.ipc.policy import reached
from moonpool.runtime.errors import OutOfThreads, StubDied
from moonpool.runtime.isolation.scratch import size_of_folder
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.child import ChildProcess
from moonpool.runtime.process.process_tree import children_of
from moonpool.runtime.process.threads import start_thread

_log = RuntimeLog("moonpool")
_PERIOD_S = 1.0


@dataclass(eq=False)
class Watched:
    """A process and its limits. A limit of None is not watched."""

    name: str
    process: ChildProcess
    # Called with the reason if the process has to end.
    end: Callable[[BaseException], object]
    tasks: int | None = None
    scratch: str = ""
    scratch_bytes: int | None = None
    rss_bytes: int | None = None
    # The most memory of the process together with all that it has started.
    memory_bytes: int | None = None
    # Called with the memory of a process that has grown beyond `rss_bytes` since it began to serve.
    grown: Callable[[int], object] | None = None

    @property
    def is_needed(self) -> bool:
        """True if there is a limit to watch."""
        watched = (self.tasks, self.scratch_bytes, self.rss_bytes, self.memory_bytes)
        return any(each is not None for each in watched)

    def look(self) -> None:
        """Compare the process with its limits."""
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
        """Call `grown` from now on, unless the process is too large from the beginning."""
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
        """Look at a process from now on. If no thread can be started, it is not watched, and the log says so."""
        with self._lock:
            self._watched.add(watched)
            if self._thread is not None:
                return
            self._wake = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._wake,), name="moonpool-watcher", daemon=True)
            try:
                start_thread(self._thread)
            except OutOfThreads as error:
                self._thread = None
                _log.error("[%s] limits are not enforced, the watcher thread did not start: %s", watched.name, error)

    def remove(self, watched: Watched) -> None:
        """Stop looking at a process."""
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
                    _log.exception("[%s] the limits cannot be checked", each.name)


def memory_and_threads(process: ChildProcess) -> tuple[int, int] | None:
    """Return a process's resident memory, without shared memory, and its threads; None once it has ended."""
    fields: dict[bytes, int] = {}
    try:
        with open(f"/proc/{process.pid}/status", "rb") as file:
            for line in file:
                name, _, value = line.partition(b":")
                if name in (b"RssAnon", b"RssFile", b"Threads"):
                    fields[name] = int(value.split()[0])
    except OSError:
        return None
    # Checked after the read, so the pid was its own while the file was read.
    if not process.is_there() or len(fields) < 3:
        return None
    return (fields[b"RssAnon"] + fields[b"RssFile"]) << 10, fields[b"Threads"]


def tasks_of(process: ChildProcess, threads: int) -> int:
    """Return the number of threads of a process and all its descendants. `threads` are its own."""
    tasks = threads
    for child in descendants_of(process):
        # The child may have ended by now.
        with contextlib.suppress(OSError):
            tasks += len(os.listdir(f"/proc/{child}/task"))
    return tasks


def memory_of_all(process: ChildProcess, enough_bytes: int) -> int:
    """Return the memory of a process and all that it has started, without that of files.

    Memory that forks share is counted once if the kernel lets this process see that. Up to `enough_bytes`, the result
    is a quick sum, which may count it several times.
    """
    pids = [process.pid, *descendants_of(process)]
    # A quick sum, which is too large if they share memory. Shared memory counts only for the descendants: for the
    # process itself it is the memory of its requests, which the runtime counts.
    simple = sum(_field(pid, "status", _RESIDENT if number else _RESIDENT[:1]) for number, pid in enumerate(pids))
    if simple <= enough_bytes:
        return simple
    shares = [_field(pid, "smaps_rollup", _SHARES if number else _SHARES[:1]) for number, pid in enumerate(pids)]
    return sum(shares) if all(shares) else simple


_RESIDENT = (b"RssAnon", b"RssShmem")
_SHARES = (b"Pss_Anon", b"Pss_Shmem")


def _field(pid: int, name: str, fields: Sequence[bytes]) -> int:
    """Return the bytes of these lines of a file in /proc; 0 if it cannot be read."""
    total_bytes = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        for line in file:
            field, _, value = line.partition(b":")
            if field in fields:
                total_bytes += int(value.split()[0]) << 10
    return total_bytes


def descendants_of(process: ChildProcess) -> list[int]:
    """List the processes that a process and its descendants have started, known orphans included."""
    found = [] if process.tree is None else process.tree.orphans()
    parents = [process.pid, *found]
    while parents:
        children = children_of(parents.pop())
        found += children
        parents += children
    return found
