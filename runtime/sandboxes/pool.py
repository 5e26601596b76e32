"""Starts workers when they are wanted, hands each out to one thread at a time, and ends them with the program.

Theory of operation. `_changed` guards the lists; it is held for moments, and never while a process is started, forked
or waited for. A worker is either in `_idle`, or belongs to the thread that took it. A thread that takes one gets the
one that was given back last, whose memory is warm, and prepares it if the keeper has not. The keeper is one thread,
which prepares workers in the background: it takes them out of `_idle` for that, and ends those that nobody has wanted
for a while.

The number of workers is bounded for all settings together, but for those of a `Sandbox`, which may be any number. If
there is no room, an idle worker with other settings ends, and else the caller waits.

In a fork of this program, workers belong to the parent: `_forget` begins with an empty pool there.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from moonpool.runtime.errors import ModelNotFound, OutOfThreads, RuntimeClosed
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.observe.log_settings import LogSettings
from moonpool.runtime.process.parallel import attended
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.spawner import fill_standard_descriptors
from moonpool.runtime.process.threads import check_unpatched, start_thread
from moonpool.runtime.sandboxes.cancellation import RunCancellation
from moonpool.runtime.sandboxes.settings import Settings
from moonpool.runtime.sandboxes.worker import Worker
from moonpool.runtime.stubs.handle import Stubs

_log = RuntimeLog("moonpool")
# Processes for `moonpool.run` at the same time. Each has some 30 MB, and each `Sandbox` that is open has one more.
MOST_WORKERS = max(2, len(os.sched_getaffinity(0)))
# Seconds after which an idle worker ends.
IDLE_S = 600.0
# The longest wait for runs that are cancelled, one of which may be in a call of its caller's.
_END_S = 10.0
# The pause between two looks for idle workers.
_LOOK_S = 60.0


class Pool:
    """Starts, keeps and hands out workers. Any thread may call any method."""

    def __init__(self, most: int = MOST_WORKERS) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._idle: list[tuple[Worker, float]] = []
        # The number of workers, without those that are beyond it: of sandboxes, and of runs in calls.
        self._count = 0
        self._extra: set[Worker] = set()
        self._numbers = itertools.count(1)
        self._kept: threading.Thread | None = None
        self._closed = False
        # The runs that go on, and the keeper's starts, for the end.
        self._runs: set[RunCancellation] = set()
        self._keepers = RunCancellation()
        # The worker that the keeper has at the moment.
        self._preparing: Worker | None = None
        # The settings of a worker that somebody has missed.
        self._more: Settings | None = None
        check_unpatched()
        fill_standard_descriptors()
        # All workers, for the end.
        self._all: set[Worker] = set()
        # What finalizers have given back, which must not take a lock.
        self.forgotten: deque[Worker] = deque()
        self._reactor = Reactor("moonpool-sandboxes")
        self._stubs = Stubs(self._reactor, LogSettings(), _NoCallees)

    def __len__(self) -> int:
        """Return the number of workers that it has, at work or not."""
        return len(self._all)

    @contextlib.contextmanager
    def running(self, cancellation: RunCancellation) -> Iterator[None]:
        """Make a run, which is cancelled when the program ends. Raises `RuntimeClosed` then, and `RunCancelled`."""
        with self._changed:
            self._check_open()
            self._runs.add(cancellation)
        try:
            yield
        except Exception:
            if cancellation.is_set:
                self._check_open()
            raise
        finally:
            with self._changed:
                self._runs.discard(cancellation)
                self._changed.notify_all()
        if cancellation.is_set:  # the end of its process may have passed for an error of its own
            self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeClosed(_ENDS)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def take(self, settings: Settings, cancellation: RunCancellation, *, is_extra: bool = False) -> Worker:
        """Return a worker, which the caller gives back. Waits if all are at work, unless this one `is_extra`.

        Raises `RunCancelled`.
        """
        self._collect()
        with cancellation.by(self._wake):
            found, old = self._found(settings, cancellation, is_extra)
        return found or self._start(settings, cancellation, old, is_extra=is_extra)

    def _found(
        self, settings: Settings, cancellation: RunCancellation, is_extra: bool
    ) -> tuple[Worker | None, Worker | None]:
        """Return an idle worker. If there is none, count one that is to be started, and return the one to end for it,
        if it takes the place of another.
        """
        with self._changed:
            while True:
                self._check_open()
                cancellation.check()
                fitting = [each for each in self._idle if each[0].settings == settings]
                if fitting:
                    # One with a process that waits, and of these the last one, whose memory is warm.
                    found = max(fitting, key=lambda each: (each[0].is_prepared, each[1]))
                    self._idle.remove(found)
                    if is_extra:
                        self._extra.add(found[0])
                        self._count -= 1
                        self._changed.notify_all()
                    return found[0], None
                if self._preparing is not None and self._preparing.settings == settings:
                    # Sooner than another one would start. But from now on, there should be one.
                    if self._count < self._most:
                        self._more = settings
                    self._changed.wait()
                    continue
                if is_extra:
                    return None, None
                if self._count < self._most:
                    self._count += 1
                    return None, None
                if self._idle:
                    old = self._idle.pop(0)[0]
                    self._all.discard(old)
                    return None, old
                self._changed.wait()

    def _start(
        self, settings: Settings, cancellation: RunCancellation, old: Worker | None = None, *, is_extra: bool = False
    ) -> Worker:
        """Start a worker, which is counted already unless it `is_extra`, after the end of an old one."""
        try:
            if old is not None:
                old.close()
            worker = Worker(self._stubs, settings, f"sandbox_{next(self._numbers)}", cancellation)
        except BaseException:
            if not is_extra:
                self._lose(None)
            raise
        with self._changed:
            self._all.add(worker)
            if is_extra:
                self._extra.add(worker)
        return worker

    def _lose(self, worker: Worker | None) -> None:
        with self._changed:
            if worker in self._extra:
                self._extra.remove(worker)
            else:
                self._count -= 1
            if worker is not None:
                self._all.discard(worker)
            self._changed.notify_all()

    def _collect(self) -> None:
        """Take back what finalizers have left."""
        while self.forgotten:
            self.give_back(self.forgotten.popleft())

    def give_back(self, worker: Worker) -> None:
        """Take a worker back. Its run, if there is one, ends in the background."""
        if not worker.is_healthy:
            self._end(worker)
            return
        with self._changed:
            closed = self._closed
            if worker in self._extra:
                self._extra.remove(worker)
                self._count += 1
            is_surplus = self._count > self._most
            if not (closed or is_surplus):
                self._idle.append((worker, time.monotonic()))
                self._changed.notify_all()
                self._keep()
        if closed or is_surplus:
            self._end(worker)

    def _end(self, worker: Worker) -> None:
        try:
            worker.close()
        finally:
            self._lose(worker)

    def _keep(self) -> None:
        """Start the keeper, if it does not run. Under the lock."""
        if self._kept is None:
            kept = threading.Thread(target=self._prepare_all, name="moonpool-sandboxes-keeper", daemon=True)
            with contextlib.suppress(OutOfThreads):  # those who take workers prepare them then
                start_thread(kept)
                self._kept = kept

    def _prepare_all(self) -> None:
        while True:
            self._collect()
            old: list[Worker] = []
            with self._changed:
                unprepared = [each for each in self._idle if not each[0].is_prepared]
                more, self._more = self._more, None
                if self._count >= self._most:
                    more = None
                self._count += more is not None
                if not unprepared and more is None and not self._closed:
                    self._changed.wait(_LOOK_S if self._idle else None)
                if self._closed:
                    return
                if unprepared:
                    self._idle.remove(unprepared[-1])
                    self._preparing = unprepared[-1][0]
                else:
                    ends_s = time.monotonic() - IDLE_S
                    old = [worker for worker, since_s in self._idle if since_s < ends_s]
                    self._idle = [each for each in self._idle if each[0] not in old]
            if unprepared:
                self._prepare(*unprepared[-1])
            for worker in old:
                self._end(worker)
            if more is not None:
                try:
                    self.give_back(self._start(more, self._keepers))
                except Exception as error:  # the next caller who needs one starts it, and gets the error
                    _log.debug("no further worker for runs of source starts: %s", error)

    def _prepare(self, worker: Worker, since_s: float) -> None:
        why = None
        try:
            worker.prepare()
        except Exception as error:
            why = error
        with self._changed:
            self._preparing = None
            is_kept = why is None and not self._closed
            if is_kept:
                self._idle.append((worker, since_s))
            self._changed.notify_all()
        if not is_kept:
            _log.debug("a worker for runs of source ends: %s", why)
            self._end(worker)

    def close(self) -> None:
        """End all runs and workers, and take no more."""
        with self._changed:
            self._closed = True
            self._idle = []
            self._changed.notify_all()
            runs = list(self._runs)
        for each in (*runs, self._keepers):
            each.set()
        with self._changed:
            self._changed.wait_for(lambda: not self._runs, _END_S)
        if self._kept is not None:
            self._kept.join()
        for worker in list(self._all):
            self._end(worker)
        self._reactor.close()


class _NoCallees:
    """The models that source may call: none. Nothing that runs source has the channel to ask for one."""

    def __init__(self, _: object) -> None:
        """Know nobody."""

    def find(self, name: str, version: int | None = None) -> NoReturn:  # noqa: ARG002
        raise ModelNotFound(f"source calls no models, and not {name!r:.80}")

    def check_may_load(self, name: str) -> NoReturn:
        self.find(name)

    def load(self, name: str, config: str, files: Mapping[str, bytes] | None) -> NoReturn:  # noqa: ARG002
        self.find(name)

    def begin_unload(self, name: str, *, with_members: bool = False) -> NoReturn:  # noqa: ARG002
        self.find(name)

    def ask_ready(self, name: str, version: str, answer: Callable[[bool], object]) -> None:  # noqa: ARG002
        answer(False)


_ENDS = "the program ends, and runs no more source"
_pool: Pool | None = None
_making = threading.Lock()
# True when the program ends.
_ends = False


def the_pool() -> Pool:
    global _pool
    pool = _pool
    if pool is None:
        with _making:
            pool = _pool
            if pool is None:
                if _ends:
                    raise RuntimeClosed(_ENDS)
                pool = _pool = Pool()
    return pool


def close_pool() -> None:
    """End all workers of this program. The next run starts others."""
    global _pool
    pool, _pool = _pool, None
    if pool is not None:
        attended(lambda _: pool.close(), "moonpool-sandboxes-end", go_on)


@atexit.register
def _end() -> None:
    global _ends
    with _making:
        _ends = True
    close_pool()


def go_on() -> None:
    """Take note of an interruption that cannot be obeyed: the end takes seconds."""


def _forget() -> None:
    global _pool, _making
    _pool, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
