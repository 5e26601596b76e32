"""Waits for the answers of stubs to requests that came over gRPC.

Theory of operation. Two threads wait. If a model is quick, the polling thread of `grpc.core` itself does: it has nothing else to do
when its queue is empty, and an answer that it reads needs no other thread. It keeps the executions that it sent in `_fresh` and waits
for them in `attend`. An execution that is not answered within `_PATIENCE_MS` goes to the other thread, which waits on the sockets of
all stubs with one epoll, and the instance is not waited for on the polling thread for the next `_SKIPS` executions. `_fresh`, `_skips`
and `poller` belong to the polling thread alone.

An execution is either offered or claimed, and the thread that claims it reads its answer (`schedule.scheduler`). So only one thread
calls `_finish`, even if several waited. `_turn` is held while an answer is handed out, as the polling thread holds it while it handles an
event: each of the two threads releases the interpreter at every system call, and would otherwise have to win it back from the
other many times for one event.

`_lock` guards the watched sockets and `_is_closed`, and is never held while an execution is finished. A socket may have an event that
was seen before its present execution was watched: it was the answer to an earlier execution, which somebody else has read. `_round`
counts the looks at the epoll, and an event does not count for an execution that was watched after that look began; if there is an
answer, the next look finds it.

`close` refuses further executions, ends the thread, and leaves what is executing to the reactors of the models. `drive` returns False
from then on, and its callers do the same.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref

from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.model.backend import ModelInstance
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.schedule.scheduler import Execution
from moonpool.runtime.schedule.watched_sockets import WatchedSockets

_log = logging.getLogger("moonpool")
# The polling thread waits so long for an answer before it looks after its clients again. `poll` cannot wait for less.
_PATIENCE_MS = 1
# A model that takes longer is not waited for there, and is tried again after so many executions.
_QUICK_NS = 600_000
_SKIPS = 64


class Answers:
    """Drives executions. `drive` is for any thread."""

    def __init__(self, turn: threading.Lock) -> None:
        """Start the thread. A thread holds `turn` while it handles an event. Raises `OutOfThreads`."""
        self._turn = turn
        self._lock = threading.Lock()
        self._sockets = WatchedSockets()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sockets.epoll.register(self._wake_fd, select.EPOLLIN)
        self._is_closed = False
        self._round = 0
        # For the polling thread: its id, executions that it sent and nobody waits for yet, and the executions for which each
        # slow instance is passed over.
        self.poller: int | None = None
        self._fresh: list[Execution] = []
        self._skips: weakref.WeakKeyDictionary[ModelInstance, int] = weakref.WeakKeyDictionary()
        self._thread = threading.Thread(target=self._run, name="moonpool-grpc-answers", daemon=True)
        try:
            start_thread(self._thread)
        except OutOfThreads:
            self._sockets.close()
            os.close(self._wake_fd)
            raise

    def drive(self, execution: Execution) -> bool:
        """Wait for the answer of an execution that is offered, and claim the execution when it has come.

        Returns False if nobody waits here any more.
        """
        if threading.get_ident() == self.poller:
            skips = self._skips.get(execution.instance, 0)
            if not skips:
                self._fresh.append(execution)
                return True
            self._skips[execution.instance] = skips - 1
        return self._watch(execution)

    # On the polling thread

    @property
    def has_fresh(self) -> bool:
        """If executions were sent that the polling thread waits for."""
        return bool(self._fresh)

    def attend(self, patience_ms: int = _PATIENCE_MS) -> None:
        """Wait a moment for the answers to fresh executions, and leave those that take longer to the other thread."""
        fresh, self._fresh = self._fresh, []
        waiting: dict[int, Execution] = {}
        poll = select.poll()
        for execution in fresh:
            if execution.claim(poll):
                fd = execution.pending.fileno()
                if fd < 0:  # the stub has ended, and was cleared away
                    self._finish(execution)
                    continue
                waiting[fd] = execution
                poll.register(fd, select.POLLIN)
        begun_ns = time.monotonic_ns()
        ready = poll.poll(patience_ms) if waiting else ()
        # Time in other calls does not count: an answer that has come by now was quick enough.
        is_slow = time.monotonic_ns() - begun_ns > _QUICK_NS
        if is_slow:
            for execution in waiting.values():
                self._skips[execution.instance] = _SKIPS
        for fd, _ in ready:
            self._finish(waiting.pop(fd))
        for execution in waiting.values():
            execution.offer()
            if patience_ms and not is_slow:
                self._fresh.append(execution)
            elif not self._watch(execution) and execution.claim(self):
                execution.drive_in_reactor()

    def _watch(self, execution: Execution) -> bool:
        with self._lock:
            if self._is_closed:
                return False
            if not execution.is_offered:
                return True
            try:
                watched = self._sockets.of(execution.pending)
            except OSError:  # the stub has ended, and was cleared away
                return False
            watched.execution = execution
            watched.round = self._round
        return True

    def _run(self) -> None:
        while True:
            ready = self._sockets.epoll.poll()
            with self._lock:
                self._round += 1
            for fd, _ in ready:
                if fd == self._wake_fd:
                    return
                execution = self._take(fd)
                if execution is not None and execution.claim(self):
                    self._finish(execution)

    def _finish(self, execution: Execution) -> None:
        try:
            with self._turn:
                execution.finish()
        except BaseException:  # all clients depend on this thread
            _log.exception("an answer could not be handed out")

    def _take(self, fd: int) -> Execution | None:
        with self._lock:
            watched = self._sockets.find(fd)
            if watched is None:
                return None
            execution = watched.execution
            if execution is not None and watched.round == self._round:
                # Watched after the look: the event may be of an answer that somebody else has read.
                return None
            watched.execution = None
            if execution is None or not execution.is_offered:
                # The answer to an execution of somebody else, or the end of the stub. The next execution adds the socket again.
                self._sockets.forget(watched)
            return execution

    def close(self) -> None:
        """Wait no more. Executions are left to the reactors of their models."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        for execution in self._sockets.close():
            if execution.claim(self):
                execution.drive_in_reactor()
        os.close(self._wake_fd)
